"""Activations and lengths of capsules, as functions of (N, types * dim, ...) tensors, type-major.

`spark` and `squash` are radial: v = r(|u|) u. Their backward pass reads u again instead of keeping lengths and copies, so they
keep what a ReLU keeps. On the CPU they work through slices that fit the cache: each tensor is then read and written once.
Lower precisions are computed in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_SMALLEST_SQUARE = 1e-30  # of a length: keeps 1 / |u| and its derivative finite at u = 0
_SLICE = 1 << 17  # elements of u that are worked on at a time on the CPU


def as_capsules(u: Tensor, dim: int) -> Tensor:
    """(N, types * dim, ...) -> (N, types, dim, ...), a view.

    Example:
        >>> as_capsules(torch.zeros(5, 6, 4, 4), dim=2).shape
        torch.Size([5, 3, 2, 4, 4])
    """
    if u.ndim < 2 or u.shape[1] % dim:
        raise ValueError(f"as_capsules: {tuple(u.shape)} has no channels that split into capsules of dim={dim}")
    return u.unflatten(1, (-1, dim))


def lengths(u: Tensor, dim: int) -> Tensor:
    """|u| of each capsule: (N, types * dim, ...) -> (N, types, ...). The gradient at u = 0 is 0.

    Example:
        >>> lengths(torch.tensor([[3.0, 4.0, 0.0, 0.0]]), dim=2)
        tensor([[5., 0.]])
    """
    x = as_capsules(u, dim)
    square = _dot(x.float() if is_half(u) else x, None).squeeze(2)
    return torch.where(square > 0, square.clamp(min=_SMALLEST_SQUARE).sqrt(), 0.0).to(u.dtype)


def spark(u: Tensor, b: Tensor, leak: float = 0.0) -> Tensor:
    """v = max(|u| - b^2, 0) u / |u|: capsules shorter than their type's threshold b^2 are off. `b` is (types,).

    With a leak the slope below the threshold is `leak` instead of 0: v = (leaky(|u| - b^2) + leak b^2) u / |u|.

    Example:
        >>> spark(torch.tensor([[3.0, 4.0, 0.1, 0.1]]), b=torch.tensor([1.0, 1.0]))
        tensor([[2.4000, 3.2000, 0.0000, 0.0000]])
    """
    if u.ndim < 2 or u.shape[1] % len(b):
        raise ValueError(f"spark: {tuple(u.shape)} has no channels that split into {len(b)} types, one for each threshold")
    return _Spark.apply(u, b, leak)


def squash(u: Tensor, dim: int, mean: bool = False) -> Tensor:
    """v = |u|^2 / (1 + |u|^2) u / |u|. With `mean`, |u|^2 is the mean of the squares (the authors' code), not their sum.

    Example:
        >>> squash(torch.tensor([[3.0, 4.0]]), dim=2)
        tensor([[0.5769, 0.7692]])
    """
    as_capsules(u, dim)
    return _Squash.apply(u, dim, float(dim) if mean else 1.0)


# With l = |u|, v = r(l) u and dL/du = r g + (r'(l) / l) (u . g) u. Each function below works on x = u as (N, types, dim, ...).


class _Spark(torch.autograd.Function):
    """r = 1 - (1 - leak) min(b^2 / l, 1)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, b: Tensor, leak: float) -> Tensor:
        def piece(x: Tensor) -> tuple[Tensor]:
            return (x * (1 - (1 - leak) * _share(_length(x), b)),)

        return _in_slices(piece, u.shape[1] // len(b), u)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        u, b, ctx.leak = inputs
        ctx.save_for_backward(u, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:
        u, b = ctx.saved_tensors

        def piece(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
            l = _length(x)
            share = _share(l, b)
            along = torch.where(share < 1, (1 - ctx.leak) * _dot(x, g) / l, 0.0)  # (u . g) / l where the capsule is on
            du = g * (1 - (1 - ctx.leak) * share) + x * (along * share / l)
            return du, -along.sum([i for i in range(along.ndim) if i != 1])  # dL/d(b^2)

        du, db2 = _in_slices(piece, u.shape[1] // len(b), u, g)
        return du, (2 * b.to(db2.dtype) * db2).to(b.dtype), None


def _share(l: Tensor, b: Tensor) -> Tensor:
    """The part of the length that the threshold takes, at most all of it."""
    b = b.float() if is_half(b) else b
    return ((b * b).view(-1, *[1] * (l.ndim - 2)) / l).clamp(max=1)


class _Squash(torch.autograd.Function):
    """r = m / (1 + m^2), m = l / sqrt(count)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(u: Tensor, dim: int, count: float) -> Tensor:
        def piece(x: Tensor) -> tuple[Tensor]:
            m = _length(x) / count**0.5
            return (x * (m / (1 + m * m)),)

        return _in_slices(piece, dim, u)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
        u, ctx.dim, ctx.count = inputs
        ctx.save_for_backward(u)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None]:
        def piece(x: Tensor, g: Tensor) -> tuple[Tensor]:
            m = _length(x) / ctx.count**0.5
            q = 1 / (1 + m * m)
            return (g * (m * q) + x * ((1 - m * m) * q * q / (ctx.count * m) * _dot(x, g)),)

        return _in_slices(piece, ctx.dim, *ctx.saved_tensors, g)[0], None, None


def _dot(x: Tensor, y: Tensor | None) -> Tensor:
    """The product of capsules over their entries, (N, types, 1, ...). Summed entry by entry: torch's reductions over a
    short inner dimension are ten times slower. (By `select`: of `unbind`, behind a convolution, torch 2.15 compiles a wrong
    gradient on the CPU.)"""
    y = x if y is None else y
    total = x.select(2, 0) * y.select(2, 0)
    for i in range(1, x.shape[2]):
        total = torch.addcmul(total, x.select(2, i), y.select(2, i))
    return total.unsqueeze(2)


def _length(x: Tensor) -> Tensor:
    return _dot(x, None).clamp(min=_SMALLEST_SQUARE).sqrt()


def is_half(u: Tensor) -> bool:
    """Whether u is of 16 bits, so that its lengths are taken in float32."""
    return u.dtype in (torch.bfloat16, torch.float16)


def _in_slices(piece: Callable[..., tuple[Tensor, ...]], dim: int, *tensors: Tensor) -> tuple[Tensor, ...]:
    """`piece` of the tensors as capsules: its first result in the shape and dtype of the first tensor, a second one summed."""
    u = tensors[0]
    views = [as_capsules(tensor, dim) for tensor in tensors]

    def of(parts: Sequence[Tensor]) -> tuple[Tensor, ...]:
        return piece(*(part.float() if is_half(part) else part for part in parts))

    if torch.compiler.is_compiling():
        # spelled out: of nested functions and of a `to` that does nothing torch 2.11 compiles a gradient of zero
        half = is_half(u)
        first, *sums = piece(*[view.float() for view in views] if half else views)
        flat = first.flatten(1, 2)
        return flat.to(u.dtype) if half else flat, *sums
    if torch.is_grad_enabled() or not u.is_cpu or u.numel() <= _SLICE:
        first, *sums = of(views)
        # flattened, but not as a view: what follows may work on it in place
        return torch.ops.aten._unsafe_view(first, u.shape).to(u.dtype), *sums
    rows = max(1, _SLICE * len(u) // u.numel())
    strides = torch.empty_like(u).stride()
    out: Tensor | None = None
    totals: list[Tensor] = []
    for start, *parts in zip(range(0, len(u), rows), *(view.split(rows) for view in views), strict=True):
        first, *sums = of(parts)
        out = first.new_empty_strided(u.shape, strides, dtype=u.dtype) if out is None else out
        as_capsules(out, dim)[start : start + rows].copy_(first)
        totals = [total + more for total, more in zip(totals, sums, strict=True)] if totals else sums
    assert out is not None
    return out, *totals
