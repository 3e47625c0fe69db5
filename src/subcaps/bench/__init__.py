"""Speed, side by side with what else one would use: what `subcaps bench` times."""
