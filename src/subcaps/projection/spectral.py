"""Any c: the root of A = W^T W from its eigenvectors, A = V diag(h^2) V^T.

Two ways there: `eigh` of the Gram matrix, which squares the condition number, and an SVD of W, which does not. Torch's
eigh and svd synchronise with the host on CUDA. With V the solve of H X + X H = S is a division by h_i + h_j.

A root is kept as V and h (a row). Singular values below `cutoff` times the largest are zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def factor(W: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """P_c, V and h, by `eigh`."""
    A = W.mT @ W
    bad = ~A.isfinite().all(-1).all(-1)[..., None, None]  # eigh would raise, for all types because of one
    squares, V = torch.linalg.eigh(torch.where(bad, torch.eye(A.shape[-1], dtype=A.dtype, device=A.device), A))
    resolved = (A.shape[-1] * torch.finfo(A.dtype).eps) ** 0.5  # a square below A's rounding is not one
    h = _without_small(squares.clamp(min=0).sqrt(), bad, max(cutoff, resolved))
    V = V.contiguous()
    return inverse(V, h) @ W.mT, V, h  # P_c = (W^T W)^(-1/2) W^T


def factor_by_svd(W: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """P_c, V and h, from W = U diag(h) V^T."""
    bad = ~W.isfinite().all(-1).all(-1)[..., None, None]
    U, h, Vh = torch.linalg.svd(torch.where(bad, 0.0, W), full_matrices=False)
    h = _without_small(h, bad, cutoff)
    V = Vh.mT.contiguous()
    return (V * torch.where(h == 0, 0.0, h / h)) @ U.mT, V, h  # h / h keeps a NaN


def _without_small(h: Tensor, bad: Tensor, cutoff: float) -> Tensor:
    h = torch.where(h > cutoff * h.amax(-1, keepdim=True), h, 0.0).unsqueeze(-2)
    return torch.where(bad, torch.nan, h)


def well_conditioned_root(A: Tensor, kappa: float) -> tuple[Tensor, Tensor] | None:
    """The root of A if every condition number is at most kappa, on the CPU."""
    squares, V = torch.linalg.eigh(A)
    if (squares[..., 0] / squares[..., -1]).amin().item() * kappa**2 < 1:  # in ascending order
        return None
    return V.contiguous(), squares.sqrt().unsqueeze(-2)


def inverse(V: Tensor, h: Tensor) -> Tensor:
    """H^-1, or the pseudo-inverse where singular values are zero."""
    return (V * torch.where(h == 0, 0.0, 1 / h)) @ V.mT


def solve(S: Tensor, V: Tensor, h: Tensor) -> Tensor:
    """X of H X + X H = S, zero on null directions."""
    X = torch.where(h * h.mT == 0, 0.0, V.mT @ S @ V / (h + h.mT))
    return V @ X @ V.mT
