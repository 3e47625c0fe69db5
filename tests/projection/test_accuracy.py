"""`polar` is right to the digits that are promised, whatever the shape, scale, layout and precision of W."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from subcaps import polar
from subcaps.projection import engine

from .reference import (
    BASELINES,
    Errors,
    assert_within,
    differentiate,
    dims,
    engines,
    excesses,
    gaussian,
    gradient_of_Q,
    seeds,
    singular_values,
    weight,
)

# The promise, by the largest condition number of W.
BOUNDS = {
    100: Errors(orthonormality=1e-5, Q=1e-4, gradient=1e-4),
    1000: Errors(orthonormality=1e-4, Q=1e-3, gradient=2e-3),
}

columns = pytest.mark.parametrize("c", [1, 2, 3, 4, 8, 16, 32, 64, 128])
spectra = st.sampled_from(["even", "one small", "one large"])
scales = [1e-15, 1.0, 1e15]


def drawn(c, d, kappa, spectrum, scale, seed, mean=0.0):
    """A batch, larger where it costs little, so that its gradient is not small by chance."""
    h = singular_values(c, kappa, spectrum)
    return weight(4 if c * d < 50_000 else 1, max(c, d), c, h, seed=seed, mean=mean) * scale


@columns
@pytest.mark.parametrize("kappa", BOUNDS)
@given(
    d=st.integers(1, 4608),
    share=st.floats(0, 1),  # of log kappa
    spectrum=spectra,
    scale=st.sampled_from(scales),
    mean=st.sampled_from([0.0, 1.0]),
    seed=seeds,
)
@example(d=1, share=1, spectrum="even", scale=1e-15, mean=0, seed=0)
@example(d=512, share=0.499, spectrum="one small", scale=1, mean=1, seed=43)
@example(d=1, share=1, spectrum="one small", scale=1e15, mean=0, seed=1)
@example(d=4608, share=1, spectrum="even", scale=1, mean=0, seed=2)
@example(d=4608, share=1, spectrum="one small", scale=1e-15, mean=1, seed=3)
@example(d=4608, share=1, spectrum="one large", scale=1e15, mean=0, seed=4)
def test_every_engine_is_within_the_bounds(device, c, kappa, d, share, spectrum, scale, mean, seed):
    W = drawn(c, d, kappa**share, spectrum, scale, seed, mean)
    assert_within(BOUNDS[kappa], W.float().to(device), engines(c), seed)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 8, 16])
@given(d=st.integers(512, 4608), magnitude=st.floats(0.1, 10), by_rows=st.booleans(), seed=seeds)
@example(d=4608, magnitude=0.3, by_rows=False, seed=0)
@example(d=4608, magnitude=0.3, by_rows=True, seed=0)
def test_bounds_hold_for_entries_of_equal_magnitude(device, c, d, magnitude, by_rows, seed):
    """As after a constant initialisation: every square is the same, so the roundings of their sum add up."""
    signs = gaussian(8, d, c, seed=seed).sign()
    W = (signs.mT.contiguous().mT if by_rows else signs) * magnitude
    assert_within(BOUNDS[100], W.float().to(device), engines(c), seed)


@columns
@given(excess=st.integers(0, 500), kappa=st.floats(1, 1000), spectrum=spectra, scale=st.sampled_from(scales), seed=seeds)
@example(excess=0, kappa=1000, spectrum="one small", scale=1, seed=0)
@example(excess=0, kappa=556, spectrum="one large", scale=1e-15, seed=36698)
@example(excess=1, kappa=1000, spectrum="one small", scale=1, seed=6)
@example(excess=500, kappa=1000, spectrum="even", scale=1e15, seed=1)
def test_float64_is_right_to_1e_12(device, c, excess, kappa, spectrum, scale, seed):
    W = drawn(c, c + excess, kappa, spectrum, scale, seed).to(device)
    # another SVD on CUDA: its V is off by more where one dimension more than c makes the gradient small
    assert_within(Errors(1e-12, 1e-12, 1e-12 if device == "cpu" else 1e-11), W, ["auto", *["closed"] * (c <= 2), "svd"], seed)
    assert_within(Errors(1e-8, 1e-8, 1e-7), W, ["eigh", "quintic"], seed)  # a Gram matrix squares the condition number


@pytest.mark.parametrize(
    ("method", "kappa", "bounds"),
    [
        ("paper", 10, Errors(1e-5, 1e-5, 1e-5)),
        ("paper", 100, Errors(2e-3, 1e-3, 1e-3)),
        ("paper", 1000, Errors(2e-1, 1e-1, 1e-1)),
        ("authors", 1.4, Errors(1e-5, 1e-5, 1e-5)),
    ],
)
@given(c=st.integers(1, 64), times=st.integers(2, 9), seed=seeds)
@example(c=64, times=9, seed=0)
def test_baselines_are_as_exact_as_their_steps_allow(device, method, kappa, bounds, c, times, seed):
    W = drawn(c, c * times, kappa, "even", 1, seed)
    assert_within(bounds, W.float().to(device), [method], seed)


@given(c=st.integers(1, 16), excess=excesses, kappa=st.floats(1, 100), scale=st.sampled_from(scales), seed=seeds)
@example(c=3, excess=4605, kappa=100, scale=1, seed=0)
def test_a_device_without_float64_has_looser_bounds(c, excess, kappa, scale, seed):
    """Apple GPUs: the root is taken in float32, and one more step mends the orthonormality."""
    W = drawn(c, c + excess, kappa, "even", scale, seed).float()
    bounds = Errors(1e-5, 1e-4, 1e-3) if kappa <= 10 else Errors(2e-4, 5e-4, 1e-2)
    with without_float64():
        assert_within(bounds, W, ["closed" if c <= 2 else "quintic"], seed)


@given(c=st.integers(1, 16), excess=excesses, kappa=st.floats(100, 1e8), seed=seeds)
@example(c=8, excess=4600, kappa=1000, seed=0)
@example(c=8, excess=0, kappa=1e8, seed=0)
def test_a_device_without_float64_stays_finite(c, excess, kappa, seed):
    W = drawn(c, c + excess, kappa, "one small", 1, seed).float()
    with without_float64():
        Q, dW = differentiate(W, gradient_of_Q(W, seed), "closed" if c <= 2 else "quintic")
    assert Q.isfinite().all()
    assert dW.isfinite().all()
    assert torch.linalg.matrix_norm(Q, 2).max() <= 1.001


def without_float64():
    """What "auto" picks on such a device, here; the CPU's own first try is left out."""
    closed = engine.ENGINES["closed"]._replace(well_conditioned_root=None)
    return mock.patch.multiple(engine, root_dtype=lambda device: torch.float32, ENGINES=engine.ENGINES | {"closed": closed})


@given(batch=st.lists(st.integers(1, 3), max_size=3), c=dims, excess=excesses, seed=seeds)
def test_any_batch_is_its_matrices_one_by_one(device, batch, c, excess, seed):
    W = gaussian(*batch, c + excess, c, seed=seed).to(device)
    for method in [*engines(c), *BASELINES]:
        Q = polar(W, method)
        assert Q.shape == W.shape
        one_by_one = [polar(matrix, method) for matrix in W.reshape(-1, *W.shape[-2:])]
        torch.testing.assert_close(Q, torch.stack(one_by_one).reshape(W.shape))


@given(c=dims, excess=excesses, seed=seeds)
def test_matrices_of_a_batch_do_not_share_their_scale_or_condition(device, c, excess, seed):
    W = weight(9, c + excess, c, seed=seed)
    W = torch.stack([torch.as_tensor(scales, dtype=W.dtype).repeat(3)]).view(9, 1, 1) * W
    W[3:6] = drawn(c, c + excess, 100, "one small", 1, seed)[:1]
    for matrix in W.float().to(device):
        assert_within(BOUNDS[100], matrix[None], engines(c), seed)
    Q = polar(W.float().to(device))
    torch.testing.assert_close(Q, torch.stack([polar(matrix) for matrix in W.float().to(device)]), atol=1e-5, rtol=1e-4)


class Engines(TorchDispatchMode):
    """The engines that `polar` calls."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if operator is torch.ops.subcaps.polar.default:
            self.called.append(args[1])
        return operator(*args, **kwargs or {})


@given(c=dims, excess=excesses, seed=seeds)
def test_auto_is_the_closed_form_or_the_best_engine_of_the_device(device, c, excess, seed):
    W = gaussian(2, c + excess, c, seed=seed).to(device)
    with Engines() as engines:
        polar(W.float())
        polar(W)
    float32 = "eigh" if device == "cpu" else "quintic"
    assert engines.called == (["closed", "closed"] if c <= 2 else [float32, "svd"])


LAYOUTS = {
    "contiguous": lambda W: W,
    "contiguous rows of P_c": lambda W: W.mT.contiguous().mT,
    "types innermost": lambda W: W.permute(1, 2, 0).contiguous().permute(2, 0, 1),
    "a slice": lambda W: torch.nn.functional.pad(W, (1, 1, 1, 1))[..., 1:-1, 1:-1],
    "one matrix seen many times": lambda W: W[:1].expand_as(W),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@given(c=dims, excess=excesses, seed=seeds)
def test_strides_are_kept(device, layout, c, excess, seed):
    """As elementwise operations keep them: a W with gaps or overlaps gives a dense Q in the same order."""
    W = LAYOUTS[layout](weight(3, c + excess, c, seed=seed).float().to(device))
    assert_within(BOUNDS[100], W, [*engines(c), "paper"], seed)
    for method in engines(c):
        kept = [
            (stride, wanted)
            for size, stride, wanted in zip(W.shape, polar(W, method).stride(), torch.empty_like(W).stride(), strict=True)
            if size > 1
        ]
        assert all(stride == wanted for stride, wanted in kept), (method, kept)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@given(c=dims, excess=excesses, seed=seeds)
def test_lower_precisions_are_computed_in_float32_and_cast_back(device, dtype, c, excess, seed):
    W = weight(2, c + excess, c, seed=seed).to(device, dtype)
    G = gradient_of_Q(W, seed)
    for method in ["auto", *engines(c), *BASELINES]:
        Q, dW = differentiate(W, G, method)
        Q_float, dW_float = differentiate(W.float(), G.float(), method)
        assert Q.dtype == dW.dtype == dtype
        assert torch.equal(Q, Q_float.to(dtype))
        assert torch.equal(dW, dW_float.to(dtype))
