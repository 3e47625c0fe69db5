"""W -> Q and its gradient: one function, `polar`, and several engines. Knows nothing of layers."""

from subcaps.projection.polar import polar

__all__ = ["polar"]
