"""The quintics of `quintic.py`: `python -m subcaps.projection.remez` prints them.

Each step wants the odd polynomial p(x) = a x + b x^3 + c x^5 whose largest distance from 1 on [l, u] is smallest. It
touches 1 - E and 1 + E in turn at l < q < r < u; Remez' exchange finds it. It maps [l, u] onto [1 - E, 1 + E], which is
the interval of the next step, so the steps together send every singular value in [l, 1] to 1 ("Polar Express",
Amsel et al. 2025).
"""

from __future__ import annotations

import math

import torch

LARGEST_CONDITION = 1000.0
LARGEST_DIM = 128
STEPS = 9  # one less leaves 4e-5 at the ends of the range, nine leave 2e-13


def minimax(low: float, high: float) -> tuple[tuple[float, float, float], float]:
    """Coefficients (a, b, c) of the best quintic on [low, high], and its error E."""
    if high - low < 1e-3:  # E is below rounding: the limit, which has p(1) = 1 and p'(1) = p''(1) = 0
        return (15 / 8, -10 / 8, 3 / 8), 0.0
    inner = (0.75 * low + 0.25 * high, 0.25 * low + 0.75 * high)
    a = b = c = error = 0.0
    for _ in range(100):
        points = torch.tensor([low, *inner, high], dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
        system = torch.stack([points, points**3, points**5, signs], dim=1)
        a, b, c, error = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64)).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)  # p'(x) = a + 3 b x^2 + 5 c x^4 = 0
        moved = (math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c)))
        if max(abs(new - old) for new, old in zip(moved, inner, strict=True)) < 1e-14:
            break
        inner = moved
    return (a, b, c), error


def schedule(low: float, steps: int) -> list[tuple[float, float, float]]:
    """The polynomials that together send [low, 1] to 1, each the best for where the last one left off."""
    coefficients, high = [], 1.0
    for _ in range(steps):
        step, error = minimax(low, high)
        coefficients.append(step)
        low, high = 1 - error, 1 + error
    return coefficients


def quintics() -> list[tuple[float, float, float]]:
    """Divided by its Frobenius norm, W has its singular values in [1 / (kappa sqrt(c)), 1]."""
    return schedule(1 / (LARGEST_CONDITION * math.sqrt(LARGEST_DIM)), STEPS)


if __name__ == "__main__":
    for a, b, c in quintics():
        print(f"    ({a:.15f}, {b:.15f}, {c:.15f}),")
