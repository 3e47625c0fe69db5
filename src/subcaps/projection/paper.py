"""The paper's own way: coupled Newton-Schulz steps for A^(1/2) and A^(-1/2), with autograd through all of them.

    Y_0 = A,  Z_0 = I,  Y_{k+1} = Y_k (3 I - Z_k Y_k) / 2,  Z_{k+1} = (3 I - Z_k Y_k) Z_k / 2

The faithful baseline. The paper takes 20 steps and does not say that A must be divided by a norm for them to converge; the
authors' published code takes 10 and divides by max(1, 2 |A|_F). Neither is made safe for zero or ill-conditioned W.
"""

from __future__ import annotations

import torch
from torch import Tensor


def paper(W: Tensor) -> Tensor:
    A = W.mT @ W
    return _coupled(W, A, torch.linalg.matrix_norm(A, keepdim=True), steps=20)


def authors(W: Tensor) -> Tensor:
    A = W.mT @ W
    return _coupled(W, A, (2 * torch.linalg.matrix_norm(A, keepdim=True)).clamp(min=1), steps=10)


def _coupled(W: Tensor, A: Tensor, norm: Tensor, steps: int) -> Tensor:
    I = torch.eye(A.shape[-1], dtype=A.dtype, device=A.device)
    Y, Z = A / norm, I.expand_as(A)
    for _ in range(steps):
        T = (3 * I - Z @ Y) / 2
        Y, Z = Y @ T, T @ Z
    return ((Z * norm.rsqrt()) @ W.mT).mT  # rows of P_c = A^(-1/2) W^T
