"""What is measured, and the one form in which measurements are kept."""
