"""Subspace capsules for PyTorch.

Names are loaded when they are first used, so that `subcaps --help` need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from subcaps import data as data
    from subcaps import measure as measure
    from subcaps import models as models
    from subcaps import nn as nn
    from subcaps import projection as projection
    from subcaps.measure.health import health as health
    from subcaps.nn import calibrate as calibrate
    from subcaps.nn import capsules as capsules
    from subcaps.nn import convert as convert
    from subcaps.nn import fuse as fuse
    from subcaps.nn import param_groups as param_groups
    from subcaps.nn import projected as projected
    from subcaps.nn import update_norms as update_norms
    from subcaps.projection import polar as polar

__version__ = "0.1.0"

_HOME = {
    "polar": "subcaps.projection",
    "health": "subcaps.measure.health",
    "calibrate": "subcaps.nn",
    "capsules": "subcaps.nn",
    "convert": "subcaps.nn",
    "fuse": "subcaps.nn",
    "param_groups": "subcaps.nn",
    "projected": "subcaps.nn",
    "update_norms": "subcaps.nn",
}
_ROOMS = ("data", "measure", "models", "nn", "projection")

__all__ = ["__version__", *_HOME, *_ROOMS]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ROOMS:
        return importlib.import_module(f"subcaps.{name}")
    raise AttributeError(f"module 'subcaps' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
