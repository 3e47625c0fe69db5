"""Capsule layers, their activations and heads; converting a CNN and fusing a trained network."""

from subcaps.nn import functional
from subcaps.nn._activation import AppendLengths, Spark, Squash
from subcaps.nn._conv import SubspaceConv1d, SubspaceConv2d, SubspaceConv3d
from subcaps.nn._convert import Report, convert
from subcaps.nn._fuse import LiftLinear, fuse
from subcaps.nn._head import CapsuleLength, CapsuleMeanPool2d, CapsuleSelect
from subcaps.nn._inspect import capsules, param_groups
from subcaps.nn._layer import SubspaceLayer
from subcaps.nn._linear import SubspaceLinear
from subcaps.nn._projected import projected
from subcaps.nn._statistics import calibrate, update_norms

__all__ = [
    "AppendLengths",
    "CapsuleLength",
    "CapsuleMeanPool2d",
    "CapsuleSelect",
    "LiftLinear",
    "Report",
    "Spark",
    "Squash",
    "SubspaceConv1d",
    "SubspaceConv2d",
    "SubspaceConv3d",
    "SubspaceLayer",
    "SubspaceLinear",
    "calibrate",
    "capsules",
    "convert",
    "functional",
    "fuse",
    "param_groups",
    "projected",
    "update_norms",
]
