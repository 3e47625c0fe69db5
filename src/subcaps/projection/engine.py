"""The engines: ways from A = W^T W to its root H and to the X of H X + X H = S, and what they share.

Shared are the products with W, the precision and the scale. The root is taken in float64 (a float32 Gram matrix is too
coarse from a condition number of 100 on), in float32 only where a device has nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subcaps.projection import closed, quintic, spectral
from subcaps.projection.gradient import gradient

# Singular values below this share of the largest count as zero.
CUTOFF = {torch.float32: 1e-6, torch.float64: 1e-13}

# Up to this condition number the root of a Gram matrix summed in float32 is exact to 1e-5.
WELL_CONDITIONED = 10.0


class Engine(NamedTuple):
    """A root is two small tensors, (n, c, c) and (n, *second(c)); what they hold is the engine's business."""

    root: Callable[[Tensor, float], tuple[Tensor, Tensor]]
    inverse: Callable[[Tensor, Tensor], Tensor]
    solve: Callable[[Tensor, Tensor, Tensor], Tensor]
    second: Callable[[int], tuple[int, int]]
    # what the CPU tries first on a float32 Gram matrix
    well_conditioned_root: Callable[[Tensor, float], tuple[Tensor, Tensor] | None] | None = None


ENGINES = {
    "closed": Engine(closed.root, closed.inverse, closed.solve, lambda c: (1, 1), closed.well_conditioned_root),
    "eigh": Engine(spectral.root, spectral.inverse, spectral.solve, lambda c: (1, c), spectral.well_conditioned_root),
    "svd": Engine(spectral.root_by_svd, spectral.inverse, spectral.solve, lambda c: (1, c)),
    "quintic": Engine(quintic.root, quintic.inverse, quintic.solve, lambda c: (c, c)),
}


def root_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def factor(W: Tensor, engine: Engine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, the root of W / scale, and the scale."""
    cutoff, wide = CUTOFF[W.dtype], root_dtype(W.device)
    if W.is_cpu and W.dtype == torch.float32 and engine.well_conditioned_root:
        A = (W.mT @ W).to(wide)
        squares = A.diagonal(dim1=-2, dim2=-1)
        # no square has lost digits to underflow, and none is infinite or NaN
        if squares.amin().item() > 1e-30 and squares.amax().item() < 1e30:
            root = engine.well_conditioned_root(A, WELL_CONDITIONED)
            if root is not None:
                P = engine.inverse(*root).to(W.dtype) @ W.mT  # P_c = (W^T W)^(-1/2) W^T
                return P.mT, *root, A.new_ones((len(A), 1, 1))
    W_wide = W.to(wide)
    scale = W_wide.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale == 0, 1.0, scale)
    W_wide = W_wide / scale
    root = engine.root(W_wide, cutoff)
    P = engine.inverse(*root) @ W_wide.mT  # P_c = (W^T W)^(-1/2) W^T
    if wide == torch.float32:
        P = 1.5 * P - 0.5 * (P @ P.mT) @ P  # one Newton step mends the orthonormality that a float32 root leaves
    return P.mT.to(W.dtype), *root, scale


def differentiate(engine: Engine, G: Tensor, Q: Tensor, first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """dL/dW, finite wherever dL/dQ is."""
    dW = gradient(G, Q, engine.inverse(first, second), lambda S: engine.solve(S, first, second))
    if scale.is_cpu and bool((scale == 1).all()):
        return dW
    largest = torch.finfo(G.dtype).max
    return (dW / scale).clamp(-largest, largest).to(G.dtype)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products of float32 in float32: no autocast, no TF32, no bfloat16 under `set_float32_matmul_precision`."""
    backend: Any = torch.backends.cuda.matmul if device.type == "cuda" else torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
    before = backend.fp32_precision
    backend.fp32_precision = "ieee"
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        backend.fp32_precision = before
