"""What every capsule layer shares: the stored W, its projection P_c as the weight of a plain layer, gain, bias and norm."""

from __future__ import annotations

import math
import sys
from typing import Any, Literal

import torch
from torch import Tensor, nn

from subcaps.nn._norm import InputNorm
from subcaps.projection import polar

Bias = bool | Literal["type"]
Rows = slice | Tensor | None


class SubspaceLayer(nn.Module):
    """The part of a capsule layer that does not depend on its shape. Comes before a plain torch layer in the class's bases.

    `weight` holds W in the shape of the plain layer's weight, (types * dim, ...): a type's W^T is its `dim` rows, flattened.
    """

    weight: Tensor
    types: int
    dim: int
    _shared: SharedProjection | None = None  # while inside `projected`

    def _set_up(
        self, types: int, dim: int, bias: Bias, gain: bool, norm: bool, init_std: float | None,
        activation: nn.Module | None, in_channels: int,
    ) -> None:  # fmt: skip
        self.types, self.dim, self.init_std = types, dim, init_std
        self._weight_shape = self.weight.shape
        self.gain = nn.Parameter(torch.ones(types)) if gain else None
        channels = types if bias == "type" else types * dim
        self.register_parameter("bias", nn.Parameter(torch.zeros(channels)) if bias else None)
        self.norm = InputNorm(in_channels) if norm else None
        self.activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """W with orthonormal columns, scaled to a deviation of `init_std` per entry if that is given."""
        if not hasattr(self, "types"):
            return  # called by the plain layer's constructor, before there is anything to set
        W = self._matrices(torch.empty_like(self.weight, dtype=torch.float32)).normal_().mT
        Q = torch.linalg.qr(W)[0]
        scale = 1.0 if self.init_std is None else self.init_std * math.sqrt(W.shape[-2])
        with torch.no_grad():
            self.weight.copy_((Q * scale).mT.reshape(self._weight_shape))
            if self.gain is not None:
                self.gain.fill_(1)
            if (bias := self._parameters.get("bias")) is not None:
                bias.zero_()
        if self.norm is not None:
            self.norm.reset_running_stats()

    def _matrices(self, weight: Tensor) -> Tensor:
        """A weight as (types, dim, d)."""
        return weight.reshape(self.types, self.dim, -1)  # a copy under channels-last

    def subspaces(self) -> Tensor:
        """Q of every type, (types, d, dim): orthonormal columns that span what the type answers to."""
        return polar(self._matrices(self.weight).mT)

    def projection(self) -> Tensor:
        """P_c of every type, stacked, in the shape of the plain layer's weight."""
        Q = self.subspaces() if self._shared is None else self._shared.of(self)
        return Q.mT.reshape(self._weight_shape)

    def folded(self, x: Tensor | None = None, rows: Rows = None) -> tuple[Tensor, Tensor | None]:
        """Weight and bias of the plain layer that does the same: projection, gain, norm and bias together.

        The norm's statistics are those of `x` where it is given, else the running averages.
        """
        weight: Tensor = self.projection()
        bias: Tensor | None = getattr(self, "bias")  # noqa: B009  (the plain layer's, to the type checker)
        if self.gain is not None:
            weight = weight * self.gain.repeat_interleave(self.dim).view(-1, *[1] * (weight.ndim - 1))
        if bias is not None and len(bias) == self.types:
            bias = bias.repeat_interleave(self.dim)
        if self.norm is not None:
            mean, std = self.norm(x, rows)
            weight, shift = _normalised(weight, mean, std)
            bias = shift if bias is None else bias + shift
        dtype = self.weight.dtype  # a norm's statistics are float32 in a network of 16 bits
        return weight.to(dtype), None if bias is None else bias.to(dtype)

    def _statistics_from(self, x: Tensor) -> Tensor | None:
        return x if self.training and self.norm is not None else None

    def extra_repr(self) -> str:
        """The plain layer's, then what makes it a capsule layer."""
        text = f"types={self.types}, dim={self.dim}, " + super().extra_repr()
        text += ", gain=True" if self.gain is not None else ""
        return text + (f", init_std={self.init_std}" if self.init_std is not None else "")


class SharedProjection:
    """The Q of one layer inside a `projected` block, and the W it was made from."""

    def __init__(self, layer: SubspaceLayer) -> None:
        self.Q = layer.subspaces()
        self._made_from = _versions(layer)
        self.stepped = False  # an optimizer changed W: fused ones do it where `_version` does not see it

    def of(self, layer: SubspaceLayer) -> Tensor:
        """Q, unless it would be wrong here."""
        if not torch.compiler.is_compiling():
            self.check(layer)
            if torch._C._current_graph_task_id() != -1 and _in_reentrant_checkpoint():
                raise RuntimeError(
                    "projected: reentrant checkpointing runs a backward pass of its own for every segment; use "
                    "checkpoint(..., use_reentrant=False)"
                )
        if torch.is_grad_enabled() and layer.weight.requires_grad and not self.Q.requires_grad:
            return layer.subspaces()  # the block was entered under no_grad
        return self.Q

    def check(self, layer: SubspaceLayer) -> None:
        """That W is what it was on entry."""
        if self.stepped or _versions(layer) != self._made_from:
            raise RuntimeError(
                f"projected: the weight of a {type(layer).__name__} changed inside the block, so its projection is stale; "
                "leave the block before `optimizer.step()` or any other change, and open a new one after it"
            )

    def __deepcopy__(self, memo: object) -> None:
        """A copy of a layer stands outside the block."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def leaves(layer: SubspaceLayer) -> list[Tensor]:
    """The parameters that W is made from: itself, unless it is parametrised."""
    parametrizations = getattr(layer, "parametrizations", None)
    if parametrizations is None or "weight" not in parametrizations:
        return [layer.weight]
    return list(parametrizations["weight"].parameters())


def _versions(layer: SubspaceLayer) -> list[tuple[int, int]]:
    return [(id(leaf), leaf._version) for leaf in leaves(layer) if not leaf.is_inference()]


def _in_reentrant_checkpoint() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "backward" and type(frame.f_locals.get("ctx")).__name__ == "CheckpointFunctionBackward":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def _normalised(weight: Tensor, mean: Tensor, std: Tensor) -> tuple[Tensor, Tensor]:
    """weight (x - mean) / std as a weight and a bias. `mean` and `std` are per input channel, over all groups."""
    out, per_group = weight.shape[:2]
    groups = len(std) // per_group
    grouped = weight.view(groups, out // groups, per_group, -1)  # (g, out / g, in / g, taps)
    scaled = grouped / std.view(groups, 1, per_group, 1)
    shift = -(scaled * mean.view(groups, 1, per_group, 1)).sum((2, 3))
    return scaled.view(weight.shape), shift.flatten()


def check(name: str, types: int, dim: int, d: int, d_is: str, bias: Bias, activation: nn.Module | None) -> None:
    """Errors that say what would be right."""
    if types < 1 or dim < 1:
        raise ValueError(f"{name}: types={types}, dim={dim}; both are at least 1")
    if dim > d:
        raise ValueError(f"{name}: dim={dim} is larger than {d_is}={d}; a subspace cannot have more dimensions than the space")
    if bias not in (True, False, "type"):
        raise ValueError(f"{name}: bias={bias!r}; choose False, True (one number per channel) or 'type' (one per type)")
    if activation is not None and not isinstance(activation, nn.Module):
        raise TypeError(f"{name}: activation={activation!r}; give a module such as Spark(types, dim), or None")
