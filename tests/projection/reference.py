"""What the tests of `polar` compare with: W of known singular values, and its Q and dL/dW in float64 from an SVD."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor

from subcaps import polar

BASELINES = ["paper", "authors"]

# Singular values below this share of the largest count as zero.
CUTOFF = {torch.float32: 1e-6, torch.float64: 1e-13}

seeds = st.integers(0, 2**32 - 1)
dims = st.integers(1, 8)  # c
excesses = st.integers(0, 24)  # d - c: 0 is a square W


def engines(c: int) -> list[str]:
    """The methods with the exact gradient that take W of c columns."""
    return [*["closed"] * (c <= 2), "eigh", "svd", "quintic"]


def partial_isometry_engines(c: int) -> list[str]:
    """Those that also give the partial isometry of a rank-deficient W."""
    return [name for name in engines(c) if name != "quintic"]


def gaussian(*shape: int, seed: int, mean: float = 0.0) -> Tensor:
    return mean + torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def orthonormal(*shape: int, seed: int, mean: float = 0.0) -> Tensor:
    return torch.linalg.qr(gaussian(*shape, seed=seed, mean=mean))[0]


def gradient_of_Q(W: Tensor, seed: int) -> Tensor:
    """A Gaussian G = dL/dQ for W, and independent of the W that `weight` makes from the same seed."""
    return gaussian(*W.shape, seed=seed + 2).to(W)


def singular_values(c: int, kappa: float, spectrum: str = "even") -> Tensor:
    """From 1 to 1 / kappa: evenly in the logarithm, or all but one at one end."""
    h = torch.logspace(0, -math.log10(kappa), c, dtype=torch.float64)
    h[1:-1] = {"even": h[1:-1], "one small": 1, "one large": 1 / kappa}[spectrum]
    return h


def weight(n: int, d: int, c: int, h: Tensor | None = None, *, seed: int, mean: float = 0.0) -> Tensor:
    """n matrices W = U diag(h) V^T, U and V from Gaussians of that mean. Without h, singular values from 1 to 1/2."""
    h = singular_values(c, 2.0) if h is None else h
    return (orthonormal(n, d, c, seed=seed, mean=mean) * h) @ orthonormal(n, c, c, seed=seed + 1, mean=mean).mT


def reference(W: Tensor, G: Tensor) -> tuple[Tensor, Tensor]:
    """Q and dL/dW in float64, given G = dL/dQ. With W = U diag(h) V^T, Q = U V^T; null directions are left out."""
    cutoff, W, G = CUTOFF[W.dtype], W.detach().cpu().double(), G.cpu().double()
    scale = W.abs().amax((-2, -1), keepdim=True)
    scale = torch.where(scale == 0, 1.0, scale)
    V, h, Uh = torch.linalg.svd((W / scale).mT, full_matrices=False)  # of W^T: not the roundings of the engine "svd"
    kept = h > cutoff * h[..., :1]
    h_inv = torch.where(kept, 1 / h, 0.0)
    both = kept[..., None] & kept[..., None, :]
    Q, Vh = ((V * kept[..., None, :]) @ Uh).mT, V.mT
    K = Q.mT @ G
    X = V @ torch.where(both, V.mT @ (K - K.mT) @ V / (h[..., None] + h[..., None, :]), 0.0) @ Vh
    outside = (G - Q @ K) @ (V * h_inv[..., None, :]) @ Vh
    if W.shape[-1] == W.shape[-2]:
        outside = torch.where(kept.all(-1)[..., None, None], 0.0, outside)  # nothing is outside the whole space
    return Q, (outside + Q @ X) / scale


def differentiate(W: Tensor, G: Tensor, method: str = "auto") -> tuple[Tensor, Tensor]:
    """Q and dL/dW as `polar` has them. W keeps its strides."""
    W = W.detach().requires_grad_()
    Q = polar(W, method)
    (dW,) = torch.autograd.grad(Q, W, G)
    return Q.detach(), dW


class Errors(NamedTuple):
    """Of a batch, at full rank. The last two are relative, in the Frobenius norm."""

    orthonormality: float  # the worst entry of Q^T Q - I
    Q: float
    gradient: float


def assert_within(bounds: Errors, W: Tensor, methods: list[str], seed: int = 0) -> None:
    """Q and the gradient of every method are as close to float64 as `bounds` asks, for a Gaussian dL/dQ."""
    G = gradient_of_Q(W, seed)
    Q_true, dW_true = reference(W, G)
    for method in methods:
        Q, dW = (result.cpu().double() for result in differentiate(W, G, method))
        errors = Errors(
            (Q.mT @ Q - torch.eye(Q.shape[-1])).abs().max().item(),
            relative(Q, Q_true),
            relative(dW, dW_true),
        )
        within = all(error <= bound for error, bound in zip(errors, bounds, strict=True))
        assert within, f"{method}: {errors} exceeds {bounds}"


def relative(result: Tensor, truth: Tensor) -> float:
    """|result - truth| / |truth|; absolute where the truth is zero, as is the gradient for c = d = 1."""
    return ((result - truth).norm() / (truth.norm() or 1.0)).item()
