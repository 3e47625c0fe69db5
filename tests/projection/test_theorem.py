"""What the paper states of its projection, and what follows from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from subcaps import polar

from .reference import (
    BASELINES,
    differentiate,
    dims,
    engines,
    excesses,
    gaussian,
    gradient_of_Q,
    orthonormal,
    seeds,
    singular_values,
    weight,
)

close = torch.testing.assert_close


def projection(W, method="auto"):
    """P_d and P_c of the paper."""
    Q = polar(W, method)
    return Q, Q.mT


@given(c=dims, excess=excesses, seed=seeds)
def test_P_c_and_P_d_are_the_equations_of_the_paper(device, c, excess, seed):
    """Equations 3a, 3b: P_d = W (W^T W)^(-1/2), P_c = (W^T W)^(-1/2) W^T. 1 and 2: P = P_d P_c = W (W^T W)^-1 W^T."""
    W = weight(2, c + excess, c, seed=seed).to(device)
    A = W.mT @ W
    squares, V = torch.linalg.eigh(A)
    root = V @ torch.diag_embed(squares.rsqrt()) @ V.mT  # (W^T W)^(-1/2)
    for method in [*engines(c), "paper"]:
        P_d, P_c = projection(W, method)
        close(P_d, W @ root)
        close(P_c, root @ W.mT)
        close(P_d @ P_c, W @ torch.linalg.inv(A) @ W.mT)


@given(c=dims, excess=excesses, seed=seeds)
def test_P_is_an_orthogonal_projection(device, c, excess, seed):
    """P = P^T and P^2 = P; what it projects on is the span of the columns of W."""
    W = weight(2, c + excess, c, seed=seed).to(device)
    P_d, P_c = projection(W)
    P = P_d @ P_c
    close(P, P.mT)
    close(P @ P, P)
    close(P @ W, W)
    close(P_c @ P_d, torch.eye(c, dtype=W.dtype, device=device).expand(2, c, c))


@given(c=dims, excess=excesses, seed=seeds)
def test_theorem_1_capsules_have_the_lengths_and_angles_of_the_projections(device, c, excess, seed):
    """Theorem 1: |u| = |P_d u| for all u. So capsules u = P_c x have the lengths and inner products of y = P x."""
    W = weight(2, c + excess, c, seed=seed).to(device)
    P_d, P_c = projection(W)
    any_u = gaussian(c, 5, seed=seed).to(device)
    close((P_d @ any_u).norm(dim=-2), any_u.norm(dim=-2).expand(2, 5))
    x = gaussian(c + excess, 5, seed=seed + 1).to(device)
    u, y = P_c @ x, P_d @ P_c @ x
    close(u.norm(dim=-2), y.norm(dim=-2))
    close(u.mT @ u, y.mT @ y)


@given(c=st.integers(2, 8), rank=st.integers(1, 7), excess=excesses, seed=seeds)
def test_footnote_capsules_of_a_rank_deficient_W_span_its_right_singular_vectors(device, c, rank, excess, seed):
    """The footnote to equation 3: capsules live in the span of W's right singular vectors, those of the null space aside."""
    rank = min(rank, c - 1)
    V = orthonormal(c, rank, seed=seed)
    W = (orthonormal(c + excess, rank, seed=seed + 1) * singular_values(rank, 10) @ V.mT).to(device)
    P_d, P_c = projection(W)
    close((P_c @ P_d).cpu(), V @ V.mT)
    close(P_d @ P_c @ W, W)


@given(c=dims, excess=excesses, factor=st.floats(1e-12, 1e12), seed=seeds)
def test_the_length_of_W_does_not_matter(device, c, excess, factor, seed):
    W = weight(2, c + excess, c, seed=seed).to(device)
    for method in engines(c):
        close(polar(factor * W, method), polar(W, method))
        close(polar(-factor * W, method), -polar(W, method))


@given(c=dims, excess=excesses, seed=seeds)
def test_turning_the_basis_of_W_turns_the_capsule(device, c, excess, seed):
    """polar(W R) = polar(W) R, and polar(O W) = O polar(W): the basis is free, the subspace is not."""
    W = weight(2, c + excess, c, seed=seed).to(device)
    R = orthonormal(c, c, seed=seed).to(device)
    O = orthonormal(c + excess, c + excess, seed=seed).to(device)
    for method in [*engines(c), "paper"]:
        close(polar(W @ R, method), polar(W, method) @ R)
        close(polar(O @ W, method), O @ polar(W, method))


@given(c=dims, excess=excesses, seed=seeds)
def test_the_gradient_is_orthogonal_to_W(device, c, excess, seed):
    """It follows from polar(a W) = polar(W): plain gradient descent never shortens W."""
    W = weight(2, c + excess, c, seed=seed).to(device)
    for method in [*engines(c), "paper"]:
        _, dW = differentiate(W, gradient_of_Q(W, seed), method)
        close((dW * W).sum((-2, -1)), torch.zeros_like(W[:, 0, 0]), atol=1e-10, rtol=0)


@given(excess=excesses, length=st.floats(0.1, 10), seed=seeds)
def test_for_c_1_the_gradient_is_the_formula_of_the_paper(device, excess, length, seed):
    """Section "Gradient Analysis", c = 1: dL/dW = (I - P) dL/dP_c / |W|."""
    W = length * weight(2, 1 + excess, 1, seed=seed).to(device)
    G = gradient_of_Q(W, seed)
    for method in engines(1):
        Q, dW = differentiate(W, G, method)
        close(dW, (G - Q @ Q.mT @ G) / W.norm(dim=-2, keepdim=True))


@given(c=st.integers(2, 8), excess=excesses, seed=seeds)
def test_for_larger_c_the_formula_of_the_paper_misses_Q_X(device, c, excess, seed):
    """Section "Gradient Analysis", c > 1: dL/dW = (I - P) dL/dP_c (W^T W)^(-1/2). It misses Q X, the turn in the
    subspace: H X + X H = K - K^T, K = Q^T dL/dQ. A step of W along that changes L; by the paper's formula it does not."""
    W = weight(1, c + excess, c, seed=seed)[0].to(device)
    G = gradient_of_Q(W, seed)
    Q, dW = differentiate(W, G)
    H, K = Q.mT @ W, Q.mT @ G
    papers = (G - Q @ K) @ torch.linalg.inv(H)
    missing = dW - papers
    X = Q.mT @ missing
    close(missing, Q @ X)
    close(X, -X.mT)
    close(H @ X + X @ H, K - K.mT)

    step = 1e-4 * missing / missing.norm()
    slope = ((polar(W + step) - polar(W - step)) * G).sum() / (2 * step.norm())
    close(slope, missing.norm(), atol=0, rtol=1e-4)
    close((papers * step).sum(), torch.zeros_like(slope), atol=1e-10, rtol=0)


@pytest.mark.parametrize("method", BASELINES)
@given(c=st.integers(2, 8), excess=excesses, kappa=st.floats(2, 1e5), size=st.floats(0.01, 10), seed=seeds)
def test_baselines_take_the_steps_of_the_paper_or_of_its_code(device, method, c, excess, kappa, size, seed):
    """A step of equation 9 takes each singular value x of Q to (3 x - x^3) / 2: 20 steps in the paper, from
    h / sqrt(|A|_F), and 10 in its code, from h / sqrt(max(1, 2 |A|_F)), A = W^T W. Ill-conditioned W end far from 1."""
    h = size * singular_values(c, kappa)
    norm = (h**4).sum().sqrt()
    x, steps = (h / norm.sqrt(), 20) if method == "paper" else (h / (2 * norm).clamp(min=1).sqrt(), 10)
    for _ in range(steps):
        x = (3 * x - x**3) / 2
    Q = polar(weight(1, c + excess, c, h, seed=seed).to(device), method)
    close(torch.linalg.svdvals(Q).cpu()[0], x.sort(descending=True).values, atol=1e-6, rtol=1e-6)
