"""c = 1 and c = 2: the root of A = W^T W in closed form. No host synchronisation.

For c = 2, with s = sqrt(det A) and t = tr H = sqrt(tr A + 2 s):

    H = (A + s I) / t        H^-1 = (adj(A) + s I) / (s t)        H X + X H = S (skew)  =>  X = S / t

A root is kept as H^-1 and 1 / t.
"""

from __future__ import annotations

import torch
from torch import Tensor


def factor(W: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """P_c, H^-1 and 1 / t."""
    H_inv, t_inv = _root_of_one(W) if W.shape[-1] == 1 else _root_of_two(W, cutoff)
    return H_inv @ W.mT, H_inv, t_inv  # P_c = (W^T W)^(-1/2) W^T


def _root_of_one(W: Tensor) -> tuple[Tensor, Tensor]:
    A = W.mT @ W
    return torch.where(A == 0, 0.0, A.rsqrt()), torch.zeros_like(A)  # X is zero: there is no skew 1 x 1 matrix


def _root_of_two(W: Tensor, cutoff: float) -> tuple[Tensor, Tensor]:
    """The determinant comes from the columns, since in A it cancels for ill-conditioned W."""
    A = W.mT @ W
    squares = A.diagonal(dim1=-2, dim2=-1)  # |w_1|^2, |w_2|^2
    longer = squares.argmax(-1, keepdim=True)
    w = W.take_along_dim(longer.unsqueeze(-1), -1)
    w_squared = squares.take_along_dim(longer, -1).unsqueeze(-1)
    other = W.take_along_dim(1 - longer.unsqueeze(-1), -1)
    other = other - w * (A[..., :1, 1:] / torch.where(w_squared == 0, 1.0, w_squared))  # what w does not explain
    s = w_squared.sqrt() * torch.linalg.vector_norm(other, dim=-2, keepdim=True)
    tr = squares.sum(-1)[..., None, None]
    tr = torch.where(tr == 0, 1.0, tr)
    t = (tr + 2 * s).sqrt()
    deficient = s <= cutoff * tr  # s / tr is the smaller singular value over the larger, where it is small
    H_inv = _adjugate_plus(A, s) / (s * t)
    return torch.where(deficient, A * tr**-1.5, H_inv), torch.where(deficient, 0.0, 1 / t)


def well_conditioned_root(A: Tensor, kappa: float) -> tuple[Tensor, Tensor] | None:
    """The root of A if every condition number is at most kappa, on the CPU."""
    if A.shape[-1] == 1:
        return A.rsqrt(), torch.zeros_like(A)
    tr = A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    s = (A[..., :1, :1] * A[..., 1:, 1:] - A[..., :1, 1:] ** 2).sqrt()
    if not (s / tr).amin().item() * (kappa + 1 / kappa) >= 1:  # s / tr = 1 / (k + 1 / k); "not", for a NaN
        return None
    t = (tr + 2 * s).sqrt()
    return _adjugate_plus(A, s) / (s * t), 1 / t


def _adjugate_plus(A: Tensor, s: Tensor) -> Tensor:
    """adj(A) + s I of a symmetric A."""
    return torch.cat([A[..., 1:, 1:] + s, -A[..., :1, 1:], -A[..., :1, 1:], A[..., :1, :1] + s], -1).view(A.shape)


def inverse(H_inv: Tensor, t_inv: Tensor) -> Tensor:
    """H^-1, or the pseudo-inverse where singular values are zero."""
    return H_inv


def solve(S: Tensor, H_inv: Tensor, t_inv: Tensor) -> Tensor:
    """X of H X + X H = S."""
    return S * t_inv
