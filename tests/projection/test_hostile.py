"""What training, or a user, may hand to `polar`: degenerate, tiny, huge and broken matrices, and no matrices at all."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from subcaps import polar

from .reference import (
    BASELINES,
    CUTOFF,
    differentiate,
    dims,
    engines,
    excesses,
    gaussian,
    gradient_of_Q,
    partial_isometry_engines,
    reference,
    seeds,
    weight,
)

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@st.composite
def any_finite_matrix(draw):
    """Entries of every size that float64 has, zeros and repetitions among them."""
    c = draw(st.integers(1, 4))
    rows = st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=c, max_size=c)
    return torch.tensor(draw(st.lists(rows, min_size=c, max_size=6)), dtype=torch.float64)


def finite(W, dtype):
    largest = torch.finfo(dtype).max
    return W.clamp(-largest, largest).to(dtype)


@dtypes
@given(W=any_finite_matrix(), seed=seeds)
def test_Q_and_its_gradient_are_finite_for_every_finite_W(device, dtype, W, seed):
    W = finite(W, dtype).to(device)
    for method in ["auto", *engines(W.shape[-1])]:
        Q, dW = differentiate(W, gradient_of_Q(W, seed), method)
        assert Q.isfinite().all(), method
        assert dW.isfinite().all(), method
        assert torch.linalg.matrix_norm(Q.double(), 2) <= 1.01, method


def cut_off_exactly(c, dtype):
    """Of a float64 W, `eigh` sees the Gram matrix, which resolves singular values to 1e-8 of the largest."""
    return [name for name in partial_isometry_engines(c) if dtype == torch.float32 or name != "eigh"]


HOSTILE = {
    "zero": lambda W: 0 * W,
    "equal columns": lambda W: W[..., :1].expand_as(W).clone(),
    "opposite columns": lambda W: W[..., :1] * torch.tensor([1.0, -1.0] * W.shape[-1])[: W.shape[-1]].to(W),
    "a zero column": lambda W: torch.cat([0 * W[..., :1], W[..., 1:]], -1),
    "one row": lambda W: torch.cat([W[..., :1, :], 0 * W[..., 1:, :]], -2),
    "orthonormal": lambda W: torch.linalg.qr(W)[0],
    "columns of the identity": lambda W: torch.eye(*W.shape[-2:]).to(W).expand_as(W).clone(),
    "columns of different size": lambda W: torch.linalg.qr(W)[0] * torch.logspace(-2, 2, W.shape[-1]).to(W),
    "one entry far larger": lambda W: torch.cat([1e30 * W[..., :1, :], W[..., 1:, :]], -2),
}


@pytest.mark.parametrize("hostile", HOSTILE)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(c=dims, excess=excesses, scale=st.sampled_from([1e-40, 1e-30, 1.0, 1e7]), seed=seeds)
def test_degenerate_W_gives_the_partial_isometry_and_its_gradient(device, dtype, hostile, c, excess, scale, seed):
    W = (scale * HOSTILE[hostile](gaussian(2, c + excess, c, seed=seed))).to(dtype)
    G = gradient_of_Q(W, seed)
    Q_true, dW_true = reference(W, G)
    dW_true = dW_true.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    for method in cut_off_exactly(c, dtype):
        Q, dW = differentiate(W.to(device), G.to(device), method)
        torch.testing.assert_close(Q.cpu().double(), Q_true, atol=1e-5, rtol=0)
        torch.testing.assert_close(dW.cpu().double(), dW_true, atol=1e-4 * dW_true.abs().max().item(), rtol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(c=st.integers(2, 16), excess=excesses, small=st.integers(1, 15), seed=seeds)
@example(c=2, excess=4606, small=1, seed=0)
@example(c=16, excess=4592, small=1, seed=0)
def test_the_cutoff_of_singular_values_stands_where_it_is_said_to(device, dtype, c, excess, small, seed):
    """A tenth of it counts as zero, ten times it does not."""
    for factor in (0.1, 10):
        h = torch.ones(c, dtype=torch.float64)
        h[-small:] = factor * CUTOFF[dtype]
        h[0] = 1
        W = weight(2, c + excess, c, h, seed=seed).to(dtype)
        G = gradient_of_Q(W, seed)
        rank = (c if factor > 1 else c - min(small, c - 1)) * torch.ones(2, dtype=torch.float64)
        truth = reference(W, G)
        for method in cut_off_exactly(c, dtype):
            Q, dW = (result.cpu().double() for result in differentiate(W.to(device), G.to(device), method))
            torch.testing.assert_close(Q.square().sum((-2, -1)), rank, atol=0.1, rtol=0)
            torch.testing.assert_close(Q, truth[0], atol=1e-2, rtol=0)
            torch.testing.assert_close(dW, truth[1], atol=1e-2 * truth[1].abs().max().item(), rtol=0)


@given(c=st.integers(2, 8), excess=excesses, rank=st.integers(1, 7), seed=seeds)
def test_eigh_of_float64_gives_no_gradient_to_null_directions_either(device, c, excess, rank, seed):
    h = (torch.arange(c) < min(rank, c - 1)).double()
    W = weight(2, c + excess, c, h, seed=seed).to(device)
    Q, dW = differentiate(W, gradient_of_Q(W, seed), "eigh")
    Q_true, dW_true = reference(W, gradient_of_Q(W, seed))
    torch.testing.assert_close(Q.cpu(), Q_true, atol=1e-5, rtol=0)
    torch.testing.assert_close(dW.cpu(), dW_true, atol=1e-5, rtol=1e-5)


@dtypes
@given(c=dims, excess=st.integers(1, 24), seed=seeds)
def test_a_gradient_too_large_for_its_precision_is_the_largest_number(device, dtype, c, excess, seed):
    """|dL/dW| goes with 1 / |W|, and W may be as small as the smallest number there is."""
    limits = torch.finfo(dtype)
    signs = gaussian(2, c + excess, c, seed=seed).sign()
    W = (8 * limits.smallest_normal * limits.eps * signs).to(dtype)  # a few of the smallest numbers
    W[..., torch.arange(c), torch.arange(c)] *= 4  # of full rank
    G = gradient_of_Q(W, seed)
    truth = reference(W.double(), G)[1].clamp(-limits.max, limits.max)
    for method in engines(c):
        dW = differentiate(W.to(device), G.to(device), method)[1].cpu().double()
        torch.testing.assert_close(dW, truth, atol=1e-3 * truth.abs().max().item(), rtol=max(1e-3, 4 * limits.eps))


@given(c=dims, excess=st.integers(1, 24), size=st.sampled_from([1e-10, 1.0, 1e10]), seed=seeds)
def test_a_large_dL_dQ_gives_no_infinity_or_NaN(device, c, excess, size, seed):
    W = (size * weight(2, c + excess, c, seed=seed)).float()
    G = 1e35 * gradient_of_Q(W, seed).float()
    largest = torch.finfo(torch.float32).max
    truth = reference(W, G)[1].clamp(-largest, largest)
    for method in engines(c):
        dW = differentiate(W.to(device), G.to(device), method)[1].cpu().double()
        torch.testing.assert_close(dW, truth, atol=1e-3 * truth.abs().max().item(), rtol=1e-3)


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(c=dims, excess=excesses, where=st.tuples(st.integers(0, 2), st.integers(0, 7), st.integers(0, 7)), seed=seeds)
def test_a_broken_matrix_is_NaN_and_leaves_the_others_alone(device, dtype, broken, c, excess, where, seed):
    """Without an exception: `eigh` and `svd` would raise."""
    W = weight(3, c + excess, c, seed=seed).to(device, dtype)
    G = gradient_of_Q(W, seed)
    i, row, column = where[0], where[1] % W.shape[1], where[2] % c
    others = [other for other in range(3) if other != i]
    broken_W = W.clone()
    broken_W[i, row, column] = broken
    for method in ["auto", *engines(c), *BASELINES]:
        Q, dW = differentiate(broken_W, G, method)
        Q_others, dW_others = differentiate(W[others], G[others], method)
        assert Q[i].isnan().all(), method
        assert dW[i].isnan().all() or method in BASELINES, method
        torch.testing.assert_close(Q[others], Q_others, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(dW[others], dW_others, atol=1e-4, rtol=1e-4)


def matrix(*shape, dtype=torch.float32):
    return torch.ones(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("W", "method", "error", "given_", "what_to_do"),
    [
        ([[1.0]], "auto", TypeError, "list", "give a torch.Tensor of shape (..., d, c)"),
        (matrix(3, 2, dtype=torch.int64), "auto", TypeError, "torch.int64", "`W.float()`"),
        (matrix(3, 2, dtype=torch.bool), "auto", TypeError, "torch.bool", "give float32, float64, float16 or bfloat16"),
        (matrix(3, 2, dtype=torch.complex64), "auto", TypeError, "torch.complex64", "give float32, float64"),
        (matrix(), "auto", ValueError, "()", "give a matrix or a batch of them, (..., d, c)"),
        (matrix(7), "auto", ValueError, "(7,)", "give a matrix or a batch of them, (..., d, c)"),
        (matrix(0, 3, 2), "auto", ValueError, "(0, 3, 2)", "give at least one matrix, row and column"),
        (matrix(3, 0), "auto", ValueError, "(3, 0)", "give at least one matrix, row and column"),
        (matrix(0, 0), "paper", ValueError, "(0, 0)", "give at least one matrix, row and column"),
        (matrix(5, 2, 3), "auto", ValueError, "c=3 columns in d=2 dimensions", "Is W transposed? `W.mT`"),
        (matrix(2, 3), "paper", ValueError, "(2, 3)", "a subspace cannot have more dimensions than the space"),
        (
            matrix(3, 2),
            "newton",
            ValueError,
            "'newton'",
            "choose one of 'auto', 'closed', 'eigh', 'svd', 'quintic', 'paper'",
        ),
        (matrix(3, 2), None, ValueError, "None", "choose one of 'auto'"),
        (matrix(3, 3), "closed", ValueError, "c=3", "choose 'auto', 'eigh' or 'quintic'"),
    ],
)
def test_wrong_input_is_named_with_what_is_allowed_and_what_to_do(W, method, error, given_, what_to_do):
    with pytest.raises(error, match="^polar: .*" + re.escape(given_) + ".*" + re.escape(what_to_do)):
        polar(W, method)


@given(c=dims, excess=excesses, seed=seeds)
def test_W_is_left_as_it_was(device, c, excess, seed):
    W = gaussian(2, c + excess, c, seed=seed).to(device)
    for method in [*engines(c), *BASELINES]:
        before = W.clone()
        Q = polar(W, method)
        assert torch.equal(W, before)
        assert Q.data_ptr() != W.data_ptr()
