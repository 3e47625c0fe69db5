"""Subspace capsule layers on vectors."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subcaps.nn._layer import Bias, Rows, SubspaceLayer, check


class SubspaceLinear(SubspaceLayer, nn.Linear):
    """A fully connected subspace capsule layer, the paper's SC-Fc: (..., in_features) -> (..., types * dim), type-major.

    Args:
        in_features: Length of the input vectors.
        types: Number of capsule types.
        dim: Dimension of a capsule and of its subspace, at most in_features.
        bias, gain, norm, init_std: As in `SubspaceConv2d`.
        activation: A module applied to the capsules as (rows, types * dim), for instance `Spark(types, dim)`, or
            `CapsuleLength(types, dim)`, which makes the layer a classifier.

    Example:
        >>> SubspaceLinear(64, types=10, dim=4)(torch.zeros(5, 64)).shape
        torch.Size([5, 40])
    """

    def __init__(
        self, in_features: int, types: int, dim: int, bias: Bias = False, gain: bool = False, norm: bool = False,
        init_std: float | None = None, activation: nn.Module | None = None,
    ) -> None:  # fmt: skip
        check(type(self).__name__, types, dim, in_features, "in_features", bias, activation)
        super().__init__(in_features, types * dim, bias=False)
        self._set_up(types, dim, bias, gain, norm, init_std, activation, in_features)

    def capsules(self, x: Tensor, rows: Rows = None) -> Tensor:
        """What the layer answers before its activation."""
        seen = self._statistics_from(x)
        if seen is not None and seen.ndim != 2:
            seen, rows = (seen if rows is None else seen[rows]).reshape(-1, self.in_features), None
        weight, bias = self.folded(seen, rows)
        return nn.functional.linear(x, weight, bias)

    def forward(self, x: Tensor, rows: Rows = None) -> Tensor:
        """`rows`: the rows of the batch that the norm's statistics are taken from; None: all."""
        u = self.capsules(x, rows)
        return u if self.activation is None else on_rows(self.activation, u)

    def lift(self, u: Tensor, index: Tensor | None = None) -> Tensor:
        """P_d: capsules back to the input space, where their lengths and angles are the same.

        With `index` (N,), capsules (N, dim) of the types it names -> (N, in_features); without it, the capsules of all types
        (..., types * dim) -> (..., types, in_features).
        """
        return lift(self.projection(), self.dim, u, index)


def on_rows(activation: nn.Module, u: Tensor) -> Tensor:
    """An activation of (rows, channels), on (..., channels)."""
    if u.ndim == 2:
        return activation(u)
    v = activation(u.reshape(-1, u.shape[-1]))
    return v.reshape(*u.shape[:-1], v.shape[-1])


class OnRows(nn.Module):
    """The activation of a fused `SubspaceLinear`: what it takes is (rows, channels), what it gets (..., channels)."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, u: Tensor) -> Tensor:
        return on_rows(self.activation, u)


def lift(projection: Tensor, dim: int, u: Tensor, index: Tensor | None = None) -> Tensor:
    """`u` through P_d = P_c^T, where `projection` holds the rows of every P_c, (types * dim, d)."""
    P_c = projection.unflatten(0, (-1, dim))  # (types, dim, d)
    if index is not None:
        if u.ndim != 2 or u.shape[1] != dim or index.shape != u.shape[:1]:
            raise ValueError(f"lift: with an index u is (N, {dim}) and index (N,); got {tuple(u.shape)}, {tuple(index.shape)}")
        return torch.einsum("nc,ncd->nd", u, P_c[index])
    if u.shape[-1] != len(projection):
        raise ValueError(f"lift: without an index u is (..., {len(projection)}), types * dim; got {tuple(u.shape)}")
    return torch.einsum("...tc,tcd->...td", u.unflatten(-1, (-1, dim)), P_c)
