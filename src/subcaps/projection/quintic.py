"""Any c: the root of A = W^T W in matrix products alone, and the solve likewise. No host synchronisation.

A fixed number of steps, each the odd quintic that is best for where the last one left off (`remez.py` computes them).
Exact to a condition number of 1000 at c = 128; beyond it the smallest singular values of Q stay below 1.

A root is kept as H^-1 and H.
"""

from __future__ import annotations

import torch
from torch import Tensor

# p(x) = a x + b x^3 + c x^5
QUINTICS = (
    (8.510397961244514, -25.266329094702915, 18.755178913462224),
    (4.250451676821573, -3.155584159198974, 0.585954097123238),
    (4.228810646500814, -3.140600225806385, 0.584244971563876),
    (4.139672856001212, -3.078672112978095, 0.577182043743791),
    (3.808116303907485, -2.845069759295665, 0.550559549594207),
    (2.948703041480124, -2.206789437919384, 0.478266154650685),
    (2.060490511271146, -1.443532398911587, 0.394820041328646),
    (1.876721316695838, -1.251911246966397, 0.375191176064924),
    (1.875000000000000, -1.250000000000000, 0.375000000000000),
)


def factor(W: Tensor, cutoff: float) -> tuple[Tensor, Tensor, Tensor]:
    """P_c, H^-1 and H, by the coupled form of x <- p(x): Y -> A^(1/2) and Z -> A^(-1/2), with A divided by its trace."""
    A = W.mT @ W
    I = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    tr = A.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    tr = torch.where(tr == 0, 1.0, tr)
    Y, Z = A / tr, I.expand_as(A)
    for a, b, c in QUINTICS:
        R = Z @ Y
        T = a * I + b * R + c * (R @ R)
        Y, Z = Y @ T, T @ Z
    H_inv, H = Z * tr.rsqrt(), Y * tr.sqrt()
    return H_inv @ W.mT, H_inv, H  # P_c = (W^T W)^(-1/2) W^T


def inverse(H_inv: Tensor, H: Tensor) -> Tensor:
    return H_inv


def solve(S: Tensor, H_inv: Tensor, H: Tensor) -> Tensor:
    """X of H X + X H = S: the same steps send [[N, E], [0, -N]] to its sign [[I, 2 X], [0, -I]]."""
    I = torch.eye(H.shape[-1], dtype=H.dtype, device=H.device)
    norm = torch.linalg.matrix_norm(H, keepdim=True)
    norm = torch.where(norm == 0, 1.0, norm)
    N, E = H / norm, S / norm
    for a, b, c in QUINTICS:
        NE, N2 = N @ E, N @ N
        F = NE + NE.mT  # N E - E N, since N is symmetric and E skew: the corner of the square
        N2F = N2 @ F
        T = a * I + b * N2 + c * (N2 @ N2)
        N, E = N @ T, N @ (b * F + c * (N2F + N2F.mT)) + E @ T
    return E / 2
