"""The exact gradient of the polar factor Q = W H^-1, H = (W^T W)^(1/2).

With G = dL/dQ and K = Q^T G, let the skew X solve  H X + X H = K - K^T.  Then

    dL/dW = (G - Q K) H^-1 + Q X = G H^-1 + Q (X - K H^-1)

It divides by h_i and h_i + h_j, never by h_i - h_j. The paper's formula for c > 1 is the first term alone: it leaves out
Q X, the turn inside the subspace.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def gradient(G: Tensor, Q: Tensor, H_inv: Tensor, solve: Callable[[Tensor], Tensor]) -> Tensor:
    """dL/dW, as (n, d, c). `solve` answers S with the X of H X + X H = S."""
    d, c = Q.shape[-2:]
    P = Q.mT  # the paper's P_c: contiguous rows, as a layer stores its weight
    K = (P @ G).to(H_inv.dtype)
    X = solve(K - K.mT)
    if d == c:
        # For a square W of full rank I - Q Q^T is zero, and so is the first term; computed, its rounding would be
        # larger than the gradient. |Q|^2 is the rank.
        full_rank = Q.square().sum((-2, -1), keepdim=True) > c - 0.5
        H_inv = torch.where(full_rank, 0.0, H_inv)
    M = X - K @ H_inv
    dP = M.mT.to(G.dtype) @ P
    return dP.baddbmm_(H_inv.to(G.dtype), G.mT).mT  # adds H^-1 G^T in place
