"""The gradient is exact, also where autograd through an eigendecomposition is not; a second derivative is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from subcaps import polar

from .reference import (
    BASELINES,
    differentiate,
    dims,
    engines,
    excesses,
    gradient_of_Q,
    orthonormal,
    partial_isometry_engines,
    reference,
    seeds,
    singular_values,
    weight,
)

close = torch.testing.assert_close
EXACT = engines(1)  # every engine


@given(c=dims, excess=excesses, seed=seeds)
def test_it_equals_autograd_through_an_eigendecomposition(device, c, excess, seed):
    W = weight(2, c + excess, c, singular_values(c, 10), seed=seed).to(device).requires_grad_()
    G = gradient_of_Q(W, seed)
    squares, V = torch.linalg.eigh(W.mT @ W)
    (truth,) = torch.autograd.grad(W @ (V * squares.rsqrt().unsqueeze(-2)) @ V.mT, W, G)
    for method in [*engines(c), "paper"]:
        close(differentiate(W, G, method)[1], truth, atol=1e-10, rtol=1e-10)


@settings(max_examples=5)
@given(c=st.integers(1, 4), excess=st.integers(0, 4), seed=seeds)
def test_it_equals_finite_differences(device, c, excess, seed):
    W = weight(2, c + excess, c, seed=seed).to(device).requires_grad_()
    for method in [*engines(c), *BASELINES]:
        assert torch.autograd.gradcheck(lambda W, method=method: polar(W, method), W)


@given(c=dims, excess=excesses, seed=seeds)
def test_it_is_finite_and_exact_where_all_singular_values_are_equal(device, c, excess, seed):
    """Where H = I the gradient is G - Q (K + K^T) / 2; through `eigh` it would be NaN or noise."""
    W = orthonormal(2, c + excess, c, seed=seed).to(device)
    exactly = torch.eye(c + excess, c, dtype=W.dtype, device=device).expand_as(W)
    for Q in (W, exactly):
        G = gradient_of_Q(Q, seed)
        K = Q.mT @ G
        for method in engines(c):
            close(differentiate(Q, G, method)[1], G - Q @ (K + K.mT) / 2)


@given(c=dims, kappa=st.floats(1, 1000), spectrum=st.sampled_from(["even", "one small"]), seed=seeds)
def test_for_square_W_it_is_the_turn_inside_alone(device, c, kappa, spectrum, seed):
    """(G - Q K) H^-1 is zero and is left out: its rounding grows with kappa, and for c = d = 1 it would be all there is."""
    W = weight(4, c, c, singular_values(c, kappa, spectrum), seed=seed).float().to(device)
    for method in engines(c):
        Q, dW = differentiate(W, gradient_of_Q(W, seed), method)
        X = Q.double().mT @ dW.double()
        close(X, -X.mT, atol=1e-5 * X.abs().max().item(), rtol=0)


@given(c=st.integers(2, 8), rank=st.integers(1, 7), excess=excesses, seed=seeds)
def test_for_rank_deficient_W_it_is_finite_and_zero_on_null_directions(device, c, rank, excess, seed):
    rank = min(rank, c - 1)
    h = torch.cat([singular_values(rank, 10), torch.zeros(c - rank, dtype=torch.float64)])
    W = weight(2, c + excess, c, h, seed=seed).to(device)
    null = orthonormal(2, c, c, seed=seed + 1)[..., rank:].to(device)
    for dtype, methods in ((torch.float32, partial_isometry_engines(c)), (torch.float64, ["auto", "svd"])):
        G = gradient_of_Q(W, seed)
        truth = reference(W.to(dtype), G)[1]
        for method in methods:
            dW = differentiate(W.to(dtype), G, method)[1]
            close(dW.cpu().double(), truth, atol=1e-5 * truth.abs().max().item(), rtol=0)
            assert (dW @ null.to(dtype)).abs().max() <= 1e-5 * truth.abs().max()


def loss(W, method):
    return (polar(W, method) ** 3).sum()


@pytest.mark.parametrize("method", EXACT)
@given(c=st.integers(1, 2), excess=excesses, seed=seeds)
def test_a_second_derivative_is_refused(device, method, c, excess, seed):
    """In every way there is to ask for it; H, which the gradient saves, is a constant to autograd."""
    W = weight(2, c + excess, c, seed=seed).to(device).requires_grad_()
    (dW,) = torch.autograd.grad(loss(W, method), W, create_graph=True)
    with pytest.raises(NotImplementedError, match=r"second derivative with respect to W.*method='paper'"):
        dW.sum().backward()
    with pytest.raises(NotImplementedError, match="second derivative with respect to W"):
        torch.func.jacrev(torch.func.grad(loss))(W.detach(), method)
    first = torch.func.grad(loss)(W.detach(), method)
    close(dW, first)


@pytest.mark.parametrize("method", EXACT)
@pytest.mark.filterwarnings("ignore:.*torch.jit.script:Warning")  # torch's own, on first use of forward mode
def test_a_forward_derivative_is_refused(device, method):
    W = weight(2, 5, 2, seed=0).to(device)
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(lambda W: polar(W, method), (W,), (W,))


@settings(max_examples=3)
@given(c=st.integers(1, 3), excess=st.integers(0, 2), seed=seeds)
def test_baselines_have_a_second_derivative(device, c, excess, seed):
    W = weight(1, c + excess, c, seed=seed).to(device).requires_grad_()
    for method in BASELINES:
        assert torch.autograd.gradgradcheck(lambda W, method=method: polar(W, method), W)
