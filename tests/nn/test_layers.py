"""The layers: each is the plain layer with weight P_c, and gain, bias and norm are what they say."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from projection.reference import seeds
from torch import nn

from subcaps.nn import CapsuleLength, Spark, Squash, SubspaceConv1d, SubspaceConv2d, SubspaceConv3d, SubspaceLinear
from subcaps.nn.functional import as_capsules

from .reference import BATCH, KINDS, ROUNDING, as_written, assert_near, layers, randomise

# torch says so of any convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

close = torch.testing.assert_close

BATCH_NORMS = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d]  # by rank

some_rows = st.sampled_from([None, slice(0, 2), slice(1, None, 2), torch.tensor([3, 1, 1]), torch.arange(BATCH) != 2])


@settings(max_examples=100)
@given(drawn=layers(), training=st.booleans(), rows=some_rows)
def test_a_layer_is_the_plain_layer_with_weight_P_c(drawn, training, rows):
    layer, x = drawn
    layer.train(training)
    # a norm that is folded subtracts the mean last, which costs digits where the mean is many deviations
    assert_near(layer(x, rows), as_written(layer, x, rows), 10 * ROUNDING[x.dtype])


@settings(max_examples=50)
@given(drawn=layers(dtype=torch.float64), training=st.booleans(), rows=some_rows)
def test_its_gradients_are_those_of_what_is_written_out(drawn, training, rows):
    """Through the statistics of the batch, too."""
    layer, x = drawn
    layer.train(training)
    inputs = [x.requires_grad_(), *layer.parameters()]
    u = layer(x, rows)
    G = torch.randn_like(u)
    for result, expected in zip(
        torch.autograd.grad(u, inputs, G), torch.autograd.grad(as_written(layer, x, rows), inputs, G), strict=True
    ):
        close(result, expected, atol=1e-9, rtol=1e-9)


@given(drawn=layers(), init_std=st.sampled_from([None, 0.05, 1.0]))
def test_W_starts_orthonormal_with_the_deviation_asked_for(drawn, init_std):
    layer, _ = drawn
    layer.init_std = init_std
    layer.reset_parameters()
    W = layer.weight.detach().reshape(layer.types, layer.dim, -1)  # (types, dim, d)
    size = 1.0 if init_std is None else init_std**2 * W.shape[-1]
    close(W @ W.mT, size * torch.eye(layer.dim).to(W).expand(layer.types, -1, -1), atol=1e-5 * size, rtol=0)
    if init_std is not None:
        close(W.square().mean().sqrt().item(), init_std)
    assert layer.gain is None or bool((layer.gain == 1).all())
    assert layer.bias is None or bool((layer.bias == 0).all())
    assert layer.norm is None or bool((layer.norm.running_var == 1).all() and layer.norm.num_batches_tracked == 0)


@given(drawn=layers(dtype=torch.float64), factor=st.floats(1e-3, 1e3))
def test_the_size_of_a_types_W_changes_nothing(drawn, factor):
    """So the gradient is orthogonal to W: it turns the subspace, and the size only sets how fast."""
    layer, x = drawn
    before = layer(x)
    (dW,) = torch.autograd.grad(before.square().sum(), layer.weight)
    along = (dW * layer.weight).reshape(layer.types, -1).sum(1)
    assert along.abs().max() <= 1e-10 * (dW.norm() * layer.weight.norm() + 1)
    factors = torch.linspace(1, factor, layer.types, dtype=x.dtype).repeat_interleave(layer.dim)
    with torch.no_grad():
        layer.weight.mul_(factors.view(-1, *[1] * (x.ndim - 1)))
    assert_near(layer(x), before, 1e-9)


@given(drawn=layers(norm=False, gain=False, bias=False))
def test_the_subspaces_are_orthonormal_and_their_capsules_type_major(drawn):
    layer, x = drawn
    Q = layer.subspaces()
    close(Q.mT @ Q, torch.eye(layer.dim).to(Q).expand(layer.types, -1, -1), atol=1e-5, rtol=0)
    u = layer(x)
    with torch.no_grad():
        layer.weight[: layer.dim].normal_()  # the first type's
    close(as_capsules(layer(x), layer.dim)[:, 1:], as_capsules(u, layer.dim)[:, 1:])


@given(drawn=layers(norm=True), momentum=st.sampled_from([0.1, 0.5, None]), batches=st.integers(1, 3))
def test_the_running_averages_are_those_of_a_batch_norm(drawn, momentum, batches):
    layer, x = drawn
    layer.norm.reset_running_stats()
    layer.norm.momentum = momentum
    batch_norm = BATCH_NORMS[x.ndim - 2](x.shape[1], affine=False, momentum=momentum).to(x.dtype)
    for i in range(batches):
        layer((i + 1) * x + i)
        batch_norm((i + 1) * x + i)
    close(layer.norm.state_dict(), batch_norm.state_dict())


@given(drawn=layers(norm=True), rows=some_rows)
def test_the_running_averages_are_of_the_rows_asked_for(drawn, rows):
    layer, x = drawn
    layer.norm.momentum = 1.0
    layer(x, rows)
    seen = (x if rows is None else x[rows]).transpose(0, 1).flatten(1)
    close(layer.norm.running_mean, seen.mean(1))
    close(layer.norm.running_var, seen.var(1))


def norm_within_and_in_front(drawn):
    """A layer with a norm, and the same without it behind a batch norm."""
    layer, x = drawn
    plain = KINDS[x.ndim - 2](**constructor(layer), norm=False)
    plain.load_state_dict(layer.state_dict(), strict=False)
    batch_norm = BATCH_NORMS[x.ndim - 2](x.shape[1], affine=False)
    batch_norm.load_state_dict(layer.norm.state_dict())
    return layer, nn.Sequential(batch_norm, plain).to(x.dtype), x


def constructor(layer):
    options = dict(types=layer.types, dim=layer.dim, gain=layer.gain is not None)
    options["bias"] = layer.bias is not None and (True if len(layer.bias) == layer.types * layer.dim else "type")
    if isinstance(layer, nn.Linear):
        return options | dict(in_features=layer.in_features)
    names = ("in_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
    return options | {name: getattr(layer, name) for name in names}


@given(drawn=layers(norm=True, padding=0, dtype=torch.float64), training=st.booleans())
def test_without_padding_the_norm_is_a_batch_norm_in_front(drawn, training):
    layer, in_front, x = norm_within_and_in_front(drawn)
    close(layer.train(training)(x), in_front.train(training)(x))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_with_zero_padding_it_differs_from_one_at_the_border_only(rank, training):
    """A batch norm's output is padded with zeros, which stand for the mean; here the zeros are normalised too."""
    torch.manual_seed(rank)
    layer = randomise(KINDS[rank](2, types=3, dim=2, kernel_size=3, padding=1, norm=True)).double()
    layer, in_front, x = norm_within_and_in_front((layer, 2 + torch.randn(BATCH, 2, *[5] * rank, dtype=torch.float64)))
    difference = (layer.train(training)(x) - in_front.train(training)(x)).abs()
    inside = difference[(..., *[slice(1, -1)] * rank)]
    assert inside.max() < 1e-12
    assert (difference > 1e-12).sum() == difference.numel() - inside.numel()


@given(drawn=layers(), types_on=st.booleans())
def test_an_activation_is_the_last_step_and_a_submodule(drawn, types_on):
    layer, x = drawn
    u = layer.eval()(x)
    layer.activation = Spark(layer.types, layer.dim, leak=0.2) if types_on else Squash(layer.dim)
    close(layer(x), layer.activation(u))
    close(layer.capsules(x), u)
    assert ("activation.b" in layer.state_dict()) == types_on


@given(drawn=layers(rank=0), leading=st.lists(st.integers(1, 3), max_size=3), spark=st.booleans())
def test_a_linear_layer_takes_any_leading_dimensions(drawn, leading, spark):
    layer, x = drawn
    layer.activation = Spark(layer.types, layer.dim, leak=0.5) if spark else None
    layer.eval()
    x = torch.randn(*leading, x.shape[-1], dtype=x.dtype)
    rows = x.reshape(-1, x.shape[-1])
    close(layer(x), layer(rows).view(*leading, -1))
    if len(rows) > 1 and leading:
        layer.train()
        close(layer(x), layer(rows).view(*leading, -1))


@given(drawn=layers(rank=0, norm=True, dtype=torch.float64), seed=seeds)
def test_rows_of_a_linear_layer_are_those_of_the_first_dimension(drawn, seed):
    layer, x = drawn
    x = torch.randn(BATCH, 3, x.shape[-1], dtype=x.dtype, generator=torch.Generator().manual_seed(seed))
    close(layer(x, slice(0, 2)).flatten(0, 1), layer(x.flatten(0, 1), slice(0, 6)))


def test_a_head_of_lengths_takes_any_leading_dimensions():
    layer = SubspaceLinear(6, types=3, dim=2, activation=CapsuleLength(3, 2))
    x = torch.randn(2, 5, 6)
    close(layer(x), layer(x.flatten(0, 1)).view(2, 5, 3))


@given(drawn=layers(rank=0, norm=False, gain=False, bias=False, dtype=torch.float64), seed=seeds)
def test_lift_is_P_d(drawn, seed):
    """A capsule keeps its length on the way back and is found again there by its type."""
    layer, _ = drawn
    u = torch.randn(3, 2, layer.types * layer.dim, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    lifted = layer.lift(u)  # (3, 2, types, in_features)
    by_type = u.unflatten(-1, (layer.types, layer.dim))
    close(lifted, torch.einsum("tdc,...tc->...td", layer.subspaces(), by_type))
    close(lifted.norm(dim=-1), by_type.norm(dim=-1))
    again = layer(lifted).unflatten(-1, (layer.types, layer.dim)).diagonal(dim1=2, dim2=3).movedim(-1, 2)
    close(again, by_type)
    index = torch.arange(5) % layer.types
    chosen = by_type.flatten(0, 1)[:5].take_along_dim(index[:, None, None], 1).squeeze(1)
    close(layer.lift(chosen, index), lifted.flatten(0, 1)[torch.arange(5), index])


@pytest.mark.parametrize(
    ("u", "index", "message"),
    [
        ((3, 5), None, "lift: without an index u is (..., 6), types * dim; got (3, 5)"),
        ((3, 3), (3,), "lift: with an index u is (N, 2) and index (N,); got (3, 3), (3,)"),
        ((3, 2), (4,), "lift: with an index u is (N, 2) and index (N,); got (3, 2), (4,)"),
        ((1, 3, 2), (1,), "lift: with an index u is (N, 2) and index (N,); got (1, 3, 2), (1,)"),
    ],
)
def test_lift_says_what_it_takes(u, index, message):
    layer = SubspaceLinear(8, types=3, dim=2)
    with pytest.raises(ValueError, match=re.escape(message)):
        layer.lift(torch.zeros(u), None if index is None else torch.zeros(index, dtype=torch.long))


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: SubspaceConv2d(3, 1, 40, 3),
            ValueError,
            "SubspaceConv2d: dim=40 is larger than in_channels*kernel area=27; a subspace cannot have more dimensions than the",
        ),
        (
            lambda: SubspaceConv2d(4, 2, 3, 1, groups=2),
            ValueError,
            "dim=3 is larger than in_channels/groups*kernel area=2",
        ),
        (lambda: SubspaceLinear(8, 1, 9), ValueError, "SubspaceLinear: dim=9 is larger than in_features=8"),
        (lambda: SubspaceConv1d(3, 2, 0, 3), ValueError, "SubspaceConv1d: types=2, dim=0; both are at least 1"),
        (lambda: SubspaceConv3d(3, 0, 2, 3), ValueError, "SubspaceConv3d: types=0, dim=2; both are at least 1"),
        (lambda: SubspaceConv2d(4, 3, 2, 3, groups=2), ValueError, "groups=2 must divide in_channels=4 and types=3"),
        (lambda: SubspaceConv2d(3, 4, 2, 3, groups=2), ValueError, "groups=2 must divide in_channels=3 and types=4"),
        (lambda: SubspaceLinear(8, 2, 2, bias="types"), ValueError, "bias='types'; choose False, True"),
        (
            lambda: SubspaceLinear(8, 2, 2, activation=Spark),
            TypeError,
            "give a module such as Spark(types, dim), or None",
        ),
    ],
)
def test_an_error_says_what_was_given_and_what_is_allowed(make, error, message):
    with pytest.raises(error, match=re.escape(message)):
        make()


@pytest.mark.parametrize(("rank", "shape"), [(0, (1, 4)), (1, (1, 4, 1)), (0, (4,))])
def test_a_norm_refuses_statistics_of_one_value(rank, shape):
    layer = KINDS[rank](4, types=2, dim=2, **({"kernel_size": 1} if rank else {}), norm=True)
    with pytest.raises(ValueError, match="1 value per channel, which has no deviation"):
        layer(torch.zeros(shape))


@pytest.mark.parametrize("options", [dict(norm=True), dict(activation=Squash(2))])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_a_convolution_refuses_an_image_without_its_batch(rank, options):
    """Torch's take one; statistics and capsules would silently be those of the wrong axis."""
    with pytest.raises(ValueError, match="batch"):
        KINDS[rank](4, types=2, dim=2, kernel_size=1, **options)(torch.randn(4, *[4] * rank))


def test_a_layer_prints_what_makes_it_one():
    layer = SubspaceConv2d(3, 4, 2, 3, gain=True, norm=True, init_std=0.05, activation=Spark(4, 2))
    text = str(layer)
    for part in ("types=4, dim=2", "kernel_size=(3, 3)", "gain=True", "init_std=0.05", "InputNorm(3)", "Spark(4, 2)"):
        assert part in text
