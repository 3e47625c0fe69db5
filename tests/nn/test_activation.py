"""Spark, Squash and lengths: the formulas, their gradients everywhere, and what they cost."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from projection.reference import gaussian, seeds

from subcaps.nn import AppendLengths, Spark, Squash
from subcaps.nn import functional as F

from .reference import torch_compiles

close = torch.testing.assert_close

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
LARGE = (3, 8, 200, 200)  # more than the CPU works on at a time, with a remainder


def length_of(u, dim, mean=False):
    square = u.unflatten(1, (-1, dim)).square()
    return (square.mean(2) if mean else square.sum(2)).sqrt()


def radial(u, dim, factor):
    """Each capsule of u times its number in `factor`."""
    return (u.unflatten(1, (-1, dim)) * factor.unsqueeze(2)).flatten(1, 2)


def sparked(u, b, leak=0.0):
    """(leaky(|u| - b^2) + leak b^2) u / |u|."""
    dim = u.shape[1] // len(b)
    length, b2 = length_of(u, dim), b.square().view(-1, *[1] * (u.ndim - 2))
    return radial(u, dim, (torch.nn.functional.leaky_relu(length - b2, leak) + leak * b2) / length)


def squashed(u, dim, mean=False):
    length = length_of(u, dim, mean)
    if mean:  # the authors' code: x sqrt(s) / (1 + s), s the mean of the squares
        return radial(u, dim, length / (1 + length.square()))
    return radial(u, dim, length.square() / (1 + length.square()) / length)


spaces = st.lists(st.integers(1, 4), max_size=3)


@st.composite
def capsules(draw, max_size=4, space=spaces):
    """u (N, types * dim, ...) in float64, and one b and the number of dimensions for its types."""
    types, dim, seed = draw(st.integers(1, max_size)), draw(st.integers(1, max_size)), draw(seeds)
    u = gaussian(draw(st.integers(1, 3)), types * dim, *draw(space), seed=seed)
    return u, gaussian(types, seed=seed + 1), dim


leaks = st.sampled_from([0.0, 0.2, 1.0])

# each is (as it is, as written), of (u, b, dim)
FUNCTIONS = {
    "spark": (lambda u, b, dim: F.spark(u, b), lambda u, b, dim: sparked(u, b)),
    "leaky spark": (lambda u, b, dim: F.spark(u, b, 0.2), lambda u, b, dim: sparked(u, b, 0.2)),
    "squash": (lambda u, b, dim: F.squash(u, dim), lambda u, b, dim: squashed(u, dim)),
    "mean squash": (lambda u, b, dim: F.squash(u, dim, mean=True), lambda u, b, dim: squashed(u, dim, mean=True)),
    "lengths": (lambda u, b, dim: F.lengths(u, dim), lambda u, b, dim: length_of(u, dim)),
}
every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_activation = pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "lengths"])


@every_function
@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=15)
@given(drawn=capsules(), size=st.sampled_from([1e-2, 1.0, 1e2]))
def test_it_is_the_formula_in_every_precision(name, dtype, drawn, size):
    u, b, dim = drawn
    u, b = (size * u).to(dtype), (b * size**0.5).to(dtype)
    ours, written = FUNCTIONS[name]
    result = ours(u, b, dim)
    assert result.dtype == dtype
    close(result.double(), written(u.double(), b.double(), dim), atol=size * 8 * torch.finfo(dtype).eps, rtol=1e-6)


@every_function
@pytest.mark.parametrize(("dtype", "dtype_of_b"), [(half, b) for half in DTYPES[2:] for b in (half, torch.float32)])
@settings(max_examples=5)
@given(drawn=capsules())
def test_lower_precisions_are_float32_inside(name, dtype, dtype_of_b, drawn):
    """Under autocast, where b is float32, and in a network that is of lower precision itself."""
    u, b, dim = drawn
    ours, _ = FUNCTIONS[name]
    u, b = u.to(dtype).requires_grad_(), b.to(dtype_of_b)
    result, in_float32 = ours(u, b, dim), ours(u.float(), b.float(), dim)
    close(result, in_float32.to(dtype), atol=0, rtol=0)
    G = torch.ones_like(result)
    close(torch.autograd.grad(result, u, G), torch.autograd.grad(in_float32, u, G.float()), atol=0, rtol=0)


def away_from_kinks(u, b, dim):
    assume((length_of(u, dim) - b.square().view(-1, *[1] * (u.ndim - 2))).abs().min() > 1e-3)
    assume(length_of(u, dim).min() > 1e-2)


@every_function
@given(drawn=capsules())
def test_the_gradient_is_that_of_the_formula(name, drawn):
    u, b, dim = drawn
    away_from_kinks(*drawn)
    inputs = (u.requires_grad_(), b.requires_grad_())
    results = [function(u, b, dim) for function in FUNCTIONS[name]]
    G = torch.randn_like(results[0])
    ours, written = (torch.autograd.grad(result, inputs, G, allow_unused=True) for result in results)
    close(ours, written)


@every_function
@settings(max_examples=5)
@given(drawn=capsules(max_size=2, space=st.just([2])))
def test_both_derivatives_agree_with_finite_differences(name, drawn):
    u, b, dim = drawn
    away_from_kinks(*drawn)
    ours, _ = FUNCTIONS[name]
    inputs = [u.requires_grad_(), *[b.requires_grad_()] * ("spark" in name)]

    def function(u, b=b):
        return ours(u, b, dim)

    assert torch.autograd.gradcheck(function, inputs)
    assert torch.autograd.gradgradcheck(function, inputs)


# what a factor of the gradient is at u = 0
AT_ZERO = {"spark": 0.0, "leaky spark": 0.2, "squash": 0.0, "mean squash": 0.0}


@every_activation
@pytest.mark.parametrize("dtype", DTYPES)
@given(drawn=capsules())
def test_at_zero_value_and_gradient_are_exact_and_finite(name, dtype, drawn):
    u, b, dim = drawn
    ours, _ = FUNCTIONS[name]
    u = torch.zeros_like(u, dtype=dtype).requires_grad_()
    b = (b.abs() + 0.1).float().requires_grad_()
    v = ours(u, b, dim)
    G = torch.randn_like(v)
    used = [u, *[b] * ("spark" in name)]
    du, *db = torch.autograd.grad(v, used, G, create_graph=True)
    assert not v.any()
    close(du, AT_ZERO[name] * G)
    assert not any(gradient.any() for gradient in db)
    if du.requires_grad:
        second = torch.autograd.grad((du * torch.randn_like(du)).sum(), used, allow_unused=True)
        assert all(gradient is None or gradient.isfinite().all() for gradient in second)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lengths_have_no_gradient_at_zero(dtype):
    """The length is not differentiable there: of its subgradients, the zero."""
    u = torch.zeros(2, 6, dtype=dtype, requires_grad=True)
    length = F.lengths(u, 3)
    assert not length.any()
    assert not torch.autograd.grad(length.sum(), u)[0].any()


@every_activation
@given(drawn=capsules())
def test_a_zero_among_others_disturbs_nothing(name, drawn):
    u, b, dim = drawn
    ours, written = FUNCTIONS[name]
    u[0, :dim] = 0
    u.requires_grad_()
    v = ours(u, b, dim)
    (du,) = torch.autograd.grad(v.sum(), u)
    assert v.isfinite().all()
    assert du.isfinite().all()
    close(v[1:], written(u[1:], b, dim))


@given(drawn=capsules())
def test_a_threshold_of_zero_is_the_identity(drawn):
    u, b, _ = drawn
    u[:, 0] = 0
    u.requires_grad_()
    v = F.spark(u, torch.zeros_like(b))
    close(v, u)
    close(torch.autograd.grad(v.sum(), u)[0], torch.ones_like(u))


@every_activation
@given(drawn=capsules())
def test_it_is_odd_and_keeps_directions(name, drawn):
    u, b, dim = drawn
    ours, _ = FUNCTIONS[name]
    v = ours(u, b, dim)
    close(ours(-u, b, dim), -v)
    close(radial(u, dim, F.lengths(v, dim)), radial(v, dim, F.lengths(u, dim)))


@given(drawn=capsules(), leak=leaks)
def test_spark_takes_the_threshold_from_the_length(drawn, leak):
    u, b, dim = drawn
    length, b2 = F.lengths(u, dim), b.square().view(-1, *[1] * (u.ndim - 2))
    close(F.lengths(F.spark(u, b, leak), dim), torch.where(length > b2, length - (1 - leak) * b2, leak * length))


@given(drawn=capsules(), mean=st.booleans())
def test_squash_maps_lengths_below_one(drawn, mean):
    u, _, dim = drawn
    m = length_of(u, dim, mean)
    expected = m / (1 + m.square()) * length_of(u, dim)
    close(F.lengths(F.squash(u, dim, mean), dim), expected)
    assert mean or bool((expected < 1).all())


def test_the_threshold_starts_at_a_quarter_of_each_type():
    spark = Spark(types=3, dim=2)
    close(spark.b.square(), torch.full((3,), 0.25))
    assert spark.leak == 0


@given(drawn=capsules(), leak=leaks)
def test_the_modules_are_the_functions(drawn, leak):
    u, b, dim = drawn
    spark = Spark(len(b), dim, leak).double()
    with torch.no_grad():
        spark.b.copy_(b)
    close(spark(u), F.spark(u, b, leak))
    close(Squash(dim)(u), F.squash(u, dim))
    close(Squash(dim, mean=True)(u), F.squash(u, dim, mean=True))
    close(AppendLengths(len(b), dim)(u), torch.cat([u, F.lengths(u, dim)], 1))


@given(drawn=capsules())
def test_capsules_are_a_view(drawn):
    u, b, dim = drawn
    by_type = F.as_capsules(u, dim)
    assert by_type.shape == (len(u), len(b), dim, *u.shape[2:])
    assert by_type.data_ptr() == u.data_ptr()
    close(by_type.flatten(1, 2), u)


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_worked_on_in_slices_is_its_images_one_by_one(name, dtype, layout):
    ours, _ = FUNCTIONS[name]
    b = torch.linspace(0.5, 1, 4).requires_grad_()
    u, G = (gaussian(*LARGE, seed=seed).to(dtype).to(memory_format=layout) for seed in (0, 1))
    u.requires_grad_()
    used = [u, *[b] * ("spark" in name)]

    def run(u, G):
        v = ours(u, b, 2)
        return v, torch.autograd.grad(v, used, G)

    v, gradients = run(u, G)
    assert v.stride() == gradients[0].stride() == u.stride()
    parts = [run(u[i : i + 1], G[i : i + 1]) for i in range(len(u))]
    close(v, torch.cat([part for part, _ in parts]), atol=0, rtol=0)
    for i, gradient in enumerate(gradients):
        close(gradient, sum(of_part[i] for _, of_part in parts), atol=1e-2 * i, rtol=1e-4 * i)  # b's is a sum over all of u


@every_activation
@given(drawn=capsules(space=st.tuples(st.integers(2, 4), st.integers(2, 4))))
def test_channels_last_stays_so(name, drawn):
    u, b, dim = drawn
    assume(u.shape[1] > 1)
    u = u.to(memory_format=torch.channels_last).requires_grad_()
    ours, _ = FUNCTIONS[name]
    v = ours(u, b, dim)
    assert v.is_contiguous(memory_format=torch.channels_last)
    (du,) = torch.autograd.grad(v, u, torch.ones_like(v))
    assert du.is_contiguous(memory_format=torch.channels_last)


@every_function
def test_a_batch_may_be_empty(name):
    ours, _ = FUNCTIONS[name]
    u = torch.zeros(0, 6, 4, 4, requires_grad=True)
    v = ours(u, torch.ones(3), 2)
    assert torch.autograd.grad(v.sum(), u)[0].shape == u.shape


@every_activation
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), LARGE])
def test_nothing_but_u_is_kept_for_the_backward_pass(name, dtype, shape):
    ours, _ = FUNCTIONS[name]
    u, b = torch.randn(shape).to(dtype).requires_grad_(), torch.ones(4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        ours(u, b, 2)
    assert {tensor.data_ptr() for tensor in kept} <= {u.data_ptr(), b.data_ptr()}


@every_function
@pytest.mark.parametrize("shape", [(2, 8, 3, 3), LARGE])
def test_what_follows_may_work_in_place(name, shape):
    """As torchvision's ReLUs do."""
    ours, _ = FUNCTIONS[name]
    u, b = torch.randn(shape, requires_grad=True), torch.ones(4, requires_grad=True)
    used = [u, *[b] * ("spark" in name)]
    in_place, apart = (relu(ours(u, b, 2)) for relu in (torch.relu_, torch.relu))
    close(in_place, apart)
    close(torch.autograd.grad(in_place.sum(), used), torch.autograd.grad(apart.sum(), used))


@every_function
@pytest.mark.parametrize("of_b", [False, True])
@settings(max_examples=5)
@given(drawn=capsules(space=st.just([3])))
def test_func_grad_mapped_over_examples(name, of_b, drawn):
    u, b, dim = drawn
    ours, _ = FUNCTIONS[name]

    def loss(u, b):
        return ours(u[None], b, dim).pow(3).sum()

    gradient = torch.func.grad(loss, argnums=int(of_b))
    mapped = torch.func.vmap(gradient, in_dims=(0, None))(u, b)
    close(mapped, torch.stack([gradient(example, b) for example in u]))


@every_function
@pytest.mark.parametrize("space", [(3, 3), LARGE[2:]])
@pytest.mark.parametrize("in_dims", [(0, None), (1, None), (None, 0), (0, 0)])
def test_vmap_is_a_loop(name, space, in_dims):
    ours, _ = FUNCTIONS[name]
    u_dim, b_dim = in_dims
    u = torch.randn(*[2] * (u_dim is not None), 2, 4, *space)
    b = torch.rand(*[2] * (b_dim is not None), 2)
    u_in = u if u_dim is None else u.movedim(0, u_dim)
    mapped = torch.func.vmap(lambda u, b: ours(u, b, 2), in_dims)(u_in, b)
    looped = [ours(u if u_dim is None else u[i], b if b_dim is None else b[i], 2) for i in range(2)]
    close(mapped, torch.stack(looped))


@every_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.filterwarnings(torch_compiles)
def test_it_compiles_without_a_break(name, dtype):
    torch.compiler.reset()
    ours, _ = FUNCTIONS[name]
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    b = torch.rand(3, requires_grad=True)
    for shape in ((2, 6, 3, 3), (5, 6)):
        u = torch.randn(shape, dtype=dtype, requires_grad=True)
        used = [u, *[b] * ("spark" in name)]
        v = ours(u, b, 2)
        close(compiled(u, b, 2), v)
        G = torch.randn_like(v)
        close(torch.autograd.grad(compiled(u, b, 2), used, G), torch.autograd.grad(v, used, G))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Spark(2, 2, leak=-0.1), "Spark: leak=-0.1; the slope below the threshold is at least 0 and at most 1"),
        (lambda: Spark(2, 2, leak=1.1), "Spark: leak=1.1"),
        (lambda: Spark(2, 2)(torch.zeros(3, 6)), "Spark(2, 2) takes (N, 4, ...), types * dim channels; got (3, 6)"),
        (lambda: AppendLengths(2, 2)(torch.zeros(4)), "AppendLengths(2, 2) takes (N, 4, ...), types * dim channels; got (4,)"),
        (lambda: Squash(4)(torch.zeros(3, 6)), "(3, 6) has no channels that split into capsules of dim=4"),
        (lambda: F.lengths(torch.zeros(6), 2), "(6,) has no channels that split into capsules of dim=2"),
        (lambda: F.spark(torch.zeros(3, 5), torch.ones(2)), "(3, 5) has no channels that split into 2 types"),
    ],
)
def test_an_error_says_what_does_not_fit(call, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        call()


def test_they_print_their_arguments():
    assert str(Spark(2, 3, leak=0.1)) == "Spark(2, 3, leak=0.1)"
    assert str(Squash(3, mean=True)) == "Squash(3, mean=True)"
    assert str(AppendLengths(2, 3)) == "AppendLengths(2, 3)"
