"""Named image sets as tensors. Knows no model."""

from subcaps.data._named import load

__all__ = ["load"]
