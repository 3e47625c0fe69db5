"""The polynomials of the "quintic" engine: where they come from, and that together they send singular values to 1."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from subcaps import polar
from subcaps.projection import quintic, remez

from .reference import differentiate, excesses, gaussian, gradient_of_Q, orthonormal, seeds, singular_values, weight

SMALLEST = 1 / (remez.LARGEST_CONDITION * remez.LARGEST_DIM**0.5)  # of the singular values of W / |W|


def polynomial(x, a, b, c):
    return a * x + b * x**3 + c * x**5


def all_steps(x):
    for coefficients in quintic.QUINTICS:
        x = polynomial(x, *coefficients)
    return x


def test_coefficients_are_what_remez_computes():
    torch.testing.assert_close(torch.tensor(quintic.QUINTICS), torch.tensor(remez.quintics()), atol=2e-15, rtol=0)


@given(low=st.floats(SMALLEST, 0.9))
@example(low=SMALLEST)
def test_a_step_is_the_best_odd_quintic_of_its_interval(low):
    """Chebyshev: its largest distance from 1 is reached at four points, in turn below and above: one more than a, b, c."""
    coefficients, error = remez.minimax(low, 1.0)
    off = polynomial(torch.linspace(low, 1, 100_001, dtype=torch.float64), *coefficients) - 1
    assert off.abs().max() <= error * (1 + 1e-9) + 1e-15
    at_extremes = off[off.abs() >= error * (1 - 1e-6) - 1e-15].sign()
    assert torch.unique_consecutive(at_extremes).tolist() == [-1, 1, -1, 1]


def test_the_steps_together_are_exact_to_the_condition_number_they_are_made_for():
    singular = torch.logspace(torch.tensor(SMALLEST).log10().item(), 0, 100_001, dtype=torch.float64)
    assert (all_steps(singular) - 1).abs().max() <= 1e-12


def test_the_steps_together_never_overshoot():
    singular = torch.logspace(-300, 0, 300_001, dtype=torch.float64)
    assert all_steps(singular).max() <= 1 + 1e-12
    assert all_steps(singular).min() >= 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@given(c=st.integers(1, 128), excess=excesses, kappa=st.floats(1000, 1e12), small=st.booleans(), seed=seeds)
@example(c=128, excess=0, kappa=1e3, small=True, seed=0)
@example(c=128, excess=24, kappa=1e12, small=False, seed=0)
def test_beyond_it_Q_is_finite_and_no_longer_than_1(device, dtype, c, excess, kappa, small, seed):
    h = singular_values(c, kappa, "one small" if small else "even")
    W = weight(1, c + excess, c, h, seed=seed).to(device, dtype)
    Q, dW = differentiate(W, gradient_of_Q(W, seed), "quintic")
    assert Q.isfinite().all()
    assert dW.isfinite().all()
    assert torch.linalg.matrix_norm(Q, 2).max() <= 1.001


@given(c=st.integers(1, 128), kappa=st.floats(1, 1000), size=st.floats(0.01, 100), seed=seeds)
@example(c=128, kappa=1000, size=1, seed=0)
def test_the_solve_solves(device, c, kappa, size, seed):
    """X of H X + X H = S is skew for a skew S."""
    V = orthonormal(c, c, seed=seed)
    H = (size * (V * singular_values(c, kappa)) @ V.mT).to(device)
    S = gaussian(c, c, seed=seed).to(device)
    S = S - S.mT
    X = quintic.solve(S, torch.linalg.inv(H), H)
    torch.testing.assert_close(H @ X + X @ H, S, atol=1e-7 * S.abs().max().item(), rtol=0)
    torch.testing.assert_close(X, -X.mT, atol=1e-7 * X.abs().max().item(), rtol=0)


@given(excess=excesses, c=st.integers(1, 16), seed=seeds)
def test_it_agrees_with_the_other_engines(device, c, excess, seed):
    W = gaussian(2, c + excess, c, seed=seed).float().to(device)
    torch.testing.assert_close(polar(W, "quintic"), polar(W, "svd"), atol=1e-4, rtol=1e-4)
