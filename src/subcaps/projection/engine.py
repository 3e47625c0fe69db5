"""The engines: ways from A = W^T W to its root H and to the X of H X + X H = S, and what they share.

Shared are the products with W, the precision and the scale. The root is taken in float64 (a float32 Gram matrix is too
coarse from a condition number of 100 on), in float32 only where a device has nothing else.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from subcaps.projection import closed, quintic, spectral
from subcaps.projection.gradient import gradient

# Singular values below this share of the largest count as zero.
CUTOFF = {torch.float32: 1e-6, torch.float64: 1e-13}

# Up to this condition number the root of a Gram matrix of float32 products is exact to 1e-5.
WELL_CONDITIONED = 4.0


class Engine(NamedTuple):
    """A root is kept as two small tensors, (n, c, c) and (n, *second(c)), which only the engine reads:

    closed      H^-1, 1 / tr H
    eigh, svd   V, h (a row): A = V diag(h^2) V^T
    quintic     H^-1, H
    """

    factor: Callable[[Tensor, float], tuple[Tensor, Tensor, Tensor]]
    inverse: Callable[[Tensor, Tensor], Tensor]
    solve: Callable[[Tensor, Tensor, Tensor], Tensor]
    second: Callable[[int], tuple[int, int]]
    # what the CPU tries first on a float32 Gram matrix
    well_conditioned_root: Callable[[Tensor, float], tuple[Tensor, Tensor] | None] | None = None


ENGINES = {
    "closed": Engine(closed.factor, closed.inverse, closed.solve, lambda c: (1, 1), closed.well_conditioned_root),
    "eigh": Engine(spectral.factor, spectral.inverse, spectral.solve, lambda c: (1, c), spectral.well_conditioned_root),
    "svd": Engine(spectral.factor_by_svd, spectral.inverse, spectral.solve, lambda c: (1, c)),
    "quintic": Engine(quintic.factor, quintic.inverse, quintic.solve, lambda c: (c, c)),
}


def root_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def factor(W: Tensor, engine: Engine) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Q, the root of W / scale, and the scale."""
    cutoff, wide = CUTOFF[W.dtype], root_dtype(W.device)
    if W.is_cpu and W.dtype == torch.float32 and engine.well_conditioned_root:
        A = _gram(W)
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
    P, first, second = engine.factor(W_wide / scale, cutoff)
    if wide == torch.float32:
        size = torch.linalg.matrix_norm(P, keepdim=True)
        P = torch.where(size > 1.01 * P.shape[-2] ** 0.5, P / size, P)  # far too ill-conditioned for float32: kept bounded
        P = 1.5 * P - 0.5 * (P @ P.mT) @ P  # one Newton step mends the orthonormality that a float32 root leaves
    return P.mT.to(W.dtype), first, second, scale


def _gram(W: Tensor) -> Tensor:
    """W^T W in float64, of float32 products that are summed in float32 over 512 rows at most: where the terms are alike, as
    after a constant initialisation, the roundings of a longer sum add up."""
    blocks = W.split(512, dim=-2)
    A = (blocks[0].mT @ blocks[0]).double()
    for rows in blocks[1:]:
        A += rows.mT @ rows
    return A


def differentiate(engine: Engine, G: Tensor, Q: Tensor, first: Tensor, second: Tensor, scale: Tensor) -> Tensor:
    """dL/dW. An entry too large for its precision is the largest number."""
    H_inv = engine.inverse(first, second)

    def solve(S: Tensor) -> Tensor:
        return engine.solve(S, first, second)

    if G.is_cpu and bool((scale == 1).all()):
        # what the largest entry can become; 2-norms, since torch's largest absolute value is twenty times slower
        reach = torch.linalg.vector_norm(G).item() * torch.linalg.vector_norm(H_inv).item()
        if reach < 1e30:
            return gradient(G, Q, H_inv, solve)
    size = G.abs().amax((-2, -1), keepdim=True).to(scale.dtype)
    size = torch.where(size == 0, 1.0, size)
    dW = gradient((G / size).to(G.dtype), Q, H_inv, solve)
    root = (size.sqrt() / scale.sqrt()).clamp(max=torch.finfo(scale.dtype).max)  # size / scale itself may overflow
    largest = torch.finfo(G.dtype).max
    return (dW * root * root).clamp(-largest, largest).to(G.dtype)


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Matrix products of float32 in float32: no autocast, no TF32, no bfloat16 under `set_float32_matmul_precision`."""
    with _IEEE[device.type == "cuda"], torch.autocast(device.type, enabled=False):
        yield


class _FullFloat32:
    """Torch's setting is one for all threads: the first that enters keeps it, the last that leaves puts it back."""

    def __init__(self, backend: Any) -> None:
        self.backend, self.lock, self.inside, self.before = backend, threading.Lock(), 0, ""

    def __enter__(self) -> None:
        with self.lock:
            if self.inside == 0:
                self.before = self.backend.fp32_precision
                self.backend.fp32_precision = "ieee"
            self.inside += 1

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                self.backend.fp32_precision = self.before


_IEEE = {
    True: _FullFloat32(torch.backends.cuda.matmul),
    False: _FullFloat32(torch.backends.mkldnn.matmul),  # type: ignore[attr-defined]
}
