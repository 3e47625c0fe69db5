"""A trained network as plain torch layers: the projection is constant, so it is folded into the weights."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from subcaps.nn._layer import SubspaceLayer
from subcaps.nn._linear import OnRows, SubspaceLinear, on_rows
from subcaps.nn._linear import lift as lift_through


class LiftLinear(nn.Linear):
    """A fused `SubspaceLinear` that can take capsules back to its input space: it keeps P_d beside the folded weight."""

    P_c: Tensor

    def __init__(self, projection: Tensor, dim: int, weight: Tensor, bias: Tensor | None, activation: nn.Module | None) -> None:
        super().__init__(weight.shape[1], weight.shape[0], bias=bias is not None, device=weight.device, dtype=weight.dtype)
        self.dim = dim
        self.activation = activation
        self.register_buffer("P_c", projection)
        _set(self, weight, bias)

    def forward(self, x: Tensor) -> Tensor:
        u = super().forward(x)
        return u if self.activation is None else on_rows(self.activation, u)

    def lift(self, u: Tensor, index: Tensor | None = None) -> Tensor:
        """P_d, as `SubspaceLinear.lift`."""
        return lift_through(self.P_c, self.dim, u, index)


def fuse(model: nn.Module, lift: Collection[str] = ()) -> nn.Module:
    """A copy of the network in evaluation mode whose capsule layers are plain torch layers.

    Projection, gain, norm and bias become one weight and one bias, of the shapes the plain network has. A layer with an
    activation becomes a `Sequential` of the plain layer and the activation. The original is left as it is.

    Args:
        model: A network with capsule layers, or one such layer.
        lift: Names of `SubspaceLinear` layers whose `.lift` is needed; they become `LiftLinear`.

    Example:
        >>> import subcaps
        >>> fuse(nn.Sequential(subcaps.nn.SubspaceConv2d(3, types=4, dim=2, kernel_size=3)))
        Sequential(
          (0): Conv2d(3, 8, kernel_size=(3, 3), stride=(1, 1), bias=False)
        )
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SubspaceLayer)}
    for name in (lift := (lift,) if isinstance(lift, str) else lift):
        if not isinstance(layers.get(name), SubspaceLinear):
            has = ", ".join(repr(known) for known, layer in layers.items() if isinstance(layer, SubspaceLinear)) or "none"
            raise ValueError(f"fuse: lift={name!r} names no SubspaceLinear of the model; it has {has}")
    fused = copy.deepcopy(model).eval()
    if isinstance(fused, SubspaceLayer):
        return _plain(fused, "" in lift)
    done: dict[int, nn.Module] = {}
    for name, module in list(fused.named_modules(remove_duplicate=False)):
        if not isinstance(module, SubspaceLayer):
            continue
        if id(module) not in done:
            done[id(module)] = _plain(module, name in lift)
        parent, _, child = name.rpartition(".")
        setattr(fused.get_submodule(parent), child, done[id(module)])
    return fused


@torch.no_grad()
def _plain(layer: Any, keep_lift: bool) -> nn.Module:
    weight, bias = (None if tensor is None else tensor.detach().clone() for tensor in layer.folded())
    assert weight is not None
    if keep_lift:
        return LiftLinear(layer.projection().clone(), layer.dim, weight, bias, layer.activation).eval()
    settings: dict[str, Any] = {"bias": bias is not None, "device": weight.device, "dtype": weight.dtype}
    plain: nn.Module
    if isinstance(layer, nn.Linear):
        plain, name = nn.Linear(layer.in_features, layer.out_features, **settings), "linear"
    else:
        kind = next(kind for kind in (nn.Conv1d, nn.Conv2d, nn.Conv3d) if isinstance(layer, kind))
        geometry = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
        settings |= {key: getattr(layer, key) for key in geometry}
        plain, name = kind(layer.in_channels, layer.out_channels, **settings), "conv"
    _set(plain, weight, bias)
    if layer.activation is None:
        return plain.eval()
    activation = layer.activation
    if name == "linear" and not type(activation).__module__.startswith("torch."):
        activation = OnRows(activation)
    return nn.Sequential(OrderedDict([(name, plain), ("activation", activation)])).eval()


def _set(plain: Any, weight: Tensor, bias: Tensor | None) -> None:
    with torch.no_grad():
        plain.weight.copy_(weight)
        if bias is not None:
            plain.bias.copy_(bias)
