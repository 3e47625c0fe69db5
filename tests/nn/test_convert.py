"""`convert`: what becomes of the chosen layers, and that a refusal changes nothing."""

from __future__ import annotations

import copy
import re

import pytest
import timm
import torch
import torchvision
from hypothesis import assume, given
from hypothesis import strategies as st
from projection.reference import gaussian, orthonormal, seeds
from torch import nn
from torch.nn.parameter import is_lazy

import subcaps
from subcaps.nn import (
    AppendLengths,
    CapsuleLength,
    Spark,
    Squash,
    SubspaceConv1d,
    SubspaceConv2d,
    SubspaceConv3d,
    SubspaceLayer,
    SubspaceLinear,
)

from .reference import CNN, assert_near, images

close = torch.testing.assert_close

GEOMETRY = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")

PLAIN = {
    "Conv1d": (lambda: nn.Conv1d(4, 12, 3, stride=2, padding="valid", groups=2, padding_mode="circular"), SubspaceConv1d),
    "Conv2d": (lambda: nn.Conv2d(4, 12, (3, 2), padding=(1, 0), dilation=2, bias=False), SubspaceConv2d),
    "Conv3d": (lambda: nn.Conv3d(2, 12, 2, padding=1), SubspaceConv3d),
    "Linear": (lambda: nn.Linear(8, 12), SubspaceLinear),
}
every_plain_layer = pytest.mark.parametrize(("make", "becomes"), PLAIN.values(), ids=PLAIN)


def an_input(layer):
    channels = layer.in_features if isinstance(layer, nn.Linear) else layer.in_channels
    return torch.randn(4, channels, *[6] * (layer.weight.ndim - 2)).to(layer.weight.dtype)


def matrices(layer, dim):
    """W of every type, (types, d, dim), in float64."""
    return layer.weight.detach().double().reshape(len(layer.weight) // dim, dim, -1).mT


def span(W):
    """The orthogonal projections onto what the columns span."""
    U, h, _ = torch.linalg.svd(W, full_matrices=False)
    U = U * (h > 1e-6 * h[..., :1])[..., None, :]
    return U @ U.mT


# what a layer becomes


@every_plain_layer
@pytest.mark.parametrize("option", [dict(dim=3), dict(types=4), dict(types=4, dim=3)])
def test_a_layer_keeps_its_name_shape_weight_and_subspaces(make, becomes, option):
    model = nn.Sequential(make())
    plain, weight = copy.deepcopy(model[0]), model[0].weight
    subcaps.convert(model, {"0": option})
    layer = model[0]
    assert type(layer) is becomes
    assert (layer.types, layer.dim) == (4, 3)
    assert layer.weight is weight  # an optimizer made before still has it
    close(layer.weight, plain.weight)
    for name in GEOMETRY:
        assert getattr(layer, name, None) == getattr(plain, name, None)
    x = an_input(plain)
    assert layer(x).shape == plain(x).shape
    Q = layer.subspaces().double()
    close(Q @ Q.mT, span(matrices(plain, 3)), atol=1e-5, rtol=0)


@every_plain_layer
@given(seed=seeds)
def test_types_that_are_orthonormal_keep_their_outputs(make, becomes, seed):
    """With a gain up to their size too: the plain layer is the capsule layer."""
    plain = make()
    Q = orthonormal(4, plain.weight[0].numel(), 3, seed=seed).float()
    sizes = 0.1 + gaussian(4, 1, 1, seed=seed).abs().float()
    for W, options in ((Q, dict(dim=3)), (sizes * Q, dict(dim=3, gain=True))):
        model = nn.Sequential(copy.deepcopy(plain))
        with torch.no_grad():
            model[0].weight.copy_(W.mT.reshape(plain.weight.shape))
        x = an_input(plain)
        expected = model(x)
        subcaps.convert(model, {"0": options})
        assert_near(model(x), expected)


@every_plain_layer
def test_the_gain_keeps_the_size_of_what_is_answered_to_white_noise(make, becomes):
    model = nn.Sequential(make())
    W = matrices(model[0], 3)
    subcaps.convert(model, {"0": dict(dim=3, gain=True)})
    # E|gain P_c x|^2 = gain^2 dim, E|W^T x|^2 = |W|^2
    close(model[0].gain.detach().double().square() * 3, W.square().sum((1, 2)), atol=0, rtol=1e-5)


@pytest.mark.parametrize("had_one", [True, False])
@pytest.mark.parametrize("bias", [None, True, False, "type"])
@every_plain_layer
def test_a_bias_stays_unless_told(make, becomes, bias, had_one):
    model = nn.Sequential(make())
    model[0].bias = nn.Parameter(torch.randn(12)) if had_one else None
    old = model[0].bias
    subcaps.convert(model, {"0": dict(dim=3) | ({} if bias is None else dict(bias=bias))})
    ours = model[0].bias
    if bias is False or (bias is None and not had_one):
        assert ours is None
    elif bias == "type":
        close(ours.detach(), old.detach().view(4, 3).mean(1) if had_one else torch.zeros(4))
    else:
        close(ours.detach(), old.detach() if had_one else torch.zeros(12))


def test_parameters_that_stay_are_the_same_ones():
    """So an optimizer made before the conversion goes on, and what was frozen is frozen."""
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    before = dict(model.named_parameters())
    subcaps.convert(model, {nn.Linear: dict(dim=2)})
    after = dict(model.named_parameters())
    assert after.keys() == before.keys()
    assert [name for name in after if after[name] is not before[name]] == []
    assert [parameter.requires_grad for parameter in after.values()] == [False, False, True, True]


@pytest.mark.parametrize("fresh", [False, True])
def test_init_std_is_the_deviation_of_W_and_its_subspaces_stay(fresh):
    model = nn.Sequential(nn.Linear(16, 6))
    before = span(matrices(model[0], 2))
    head = dict(types=6, dim=2, activation=CapsuleLength)
    subcaps.convert(model, {"0": (head if fresh else dict(dim=2)) | dict(init_std=0.05)})
    W = matrices(model[0], 2)
    close(W.square().mean((1, 2)).sqrt(), torch.full((len(W),), 0.05).double(), atol=1e-6, rtol=1e-5)
    if not fresh:
        close(span(W), before, atol=1e-5, rtol=0)


def test_norm_and_activation_are_the_layers_own():
    model = CNN()
    made = []

    def squash(types, dim):
        made.append((types, dim))
        return Squash(dim, mean=True)

    subcaps.convert(
        model,
        {
            "conv1": dict(dim=2, norm=True, activation=Spark),
            "conv2": dict(types=4, activation=squash),
            "fc": dict(dim=5, activation=lambda types, dim: nn.Tanh()),
        },
    )
    assert made == [(4, 4)]
    assert (model.conv1.activation.types, model.conv1.activation.dim) == (4, 2)
    assert {"conv1.weight", "conv1.activation.b", "conv1.norm.running_mean"} <= model.state_dict().keys()
    assert model.conv2.norm is None
    assert model(images()).abs().max() <= 1


def test_an_activation_is_made_for_each_layer():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    subcaps.convert(model, {"*": dict(dim=2, activation=Spark)})
    assert model[0].activation is not model[1].activation


def test_a_classifier_becomes_a_head_of_capsule_lengths():
    """SC-Fc (10, 4)."""
    model = CNN()
    report = subcaps.convert(model, {"fc": dict(types=10, dim=4, bias=False, activation=CapsuleLength)})
    assert model.fc.weight.shape == (40, 16)
    W = matrices(model.fc, 4)
    close(W.mT @ W, torch.eye(4).double().expand(10, 4, 4), atol=1e-5, rtol=0)
    scores = model(images())
    assert scores.shape == (4, 10)
    assert (scores >= 0).all()
    assert report.rows[0].parameters == 30 * 16 - 10
    scaled = CNN()
    subcaps.convert(scaled, {"fc": dict(types=10, dim=1, activation=lambda types, dim: CapsuleLength(types, dim, scale=4.0))})
    assert scaled(images()).shape == (4, 10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_precision_and_mode_are_taken_over(dtype, training):
    model = CNN().to(dtype).train(training)
    subcaps.convert(model, {"conv1": dict(dim=2, gain=True, norm=True, activation=Spark), "conv2": dict(dim=2, gain=True)})
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert {module.training for module in model.modules()} == {training}
    assert model(images().to(dtype)).dtype == dtype


def test_drop_makes_an_identity():
    model = CNN()
    report = subcaps.convert(model, {"conv1": dict(dim=2), "bn1": "drop", nn.ReLU: "drop"})
    assert [type(module) for module in (model.bn1, model.relu1, model.relu2)] == [nn.Identity] * 3
    assert isinstance(model.bn2, nn.BatchNorm2d)
    assert not any(key.startswith("bn1") for key in model.state_dict())
    assert report.rows[1].parameters == -16


def test_what_is_dropped_goes_as_a_whole():
    model = nested()
    subcaps.convert(model, {"0*": "drop", "1.1": dict(dim=2)})
    assert str(model[0]) == "Identity()"
    assert converted(model) == {"1.1"}


# which layers


def converted(model):
    return {name for name, module in model.named_modules() if isinstance(module, SubspaceLayer)}


def nested():
    return nn.Sequential(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), nn.Sequential(nn.Conv2d(8, 8, 3), nn.Linear(8, 8)))


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"0.0": dict(dim=2)}, {"0.0"}),
        ({"1.*": dict(dim=2)}, {"1.0", "1.1"}),
        ({"*": dict(dim=2)}, {"0.0", "1.0", "1.1"}),  # not the norm
        ({nn.Conv2d: dict(dim=2)}, {"0.0", "1.0"}),
        ({nn.Linear: dict(dim=2), "0.?": dict(dim=4)}, {"0.0", "1.1"}),
        ({"0*": dict(dim=2), "0.0": dict(dim=4)}, {"0.0"}),
    ],
)
def test_layers_are_chosen_by_name_glob_or_type(patterns, expected):
    model = nested()
    report = subcaps.convert(model, patterns)
    assert converted(model) == {row.name for row in report.rows} == expected


def test_the_first_pattern_that_fits_counts():
    model = nested()
    subcaps.convert(model, {"0.0": dict(dim=4), nn.Conv2d: dict(dim=2)})
    assert (model[0][0].dim, model[1][0].dim) == (4, 2)


def test_what_is_converted_already_is_left_alone():
    model = nested()
    subcaps.convert(model, {"0.0": dict(dim=4)})
    subcaps.convert(model, {"*": dict(dim=2)})
    assert (model[0][0].dim, model[1][0].dim) == (4, 2)


def test_a_layer_with_two_names_is_converted_once():
    layer = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": layer, "b": nn.Sequential(layer)})
    report = subcaps.convert(model, {"b.0": dict(dim=2)})
    assert model["a"] is model["b"][0]
    assert isinstance(model["a"], SubspaceLinear)
    assert len(report.rows) == 1


def test_a_weight_shared_by_converted_layers_stays_shared():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    model[1].weight = model[0].weight
    subcaps.convert(model, {"*": dict(dim=2, init_std=0.1)})
    assert model[0].weight is model[1].weight


def test_a_subclass_that_changes_nothing_but_its_constructor_is_converted():
    class Square(nn.Linear):
        def __init__(self, width):
            super().__init__(width, width)

    model = nn.Sequential(Square(8))
    subcaps.convert(model, {"0": dict(dim=2)})
    assert converted(model) == {"0"}


def test_the_report_prints_as_a_table():
    model = CNN()
    before = sum(p.numel() for p in model.parameters())
    report = subcaps.convert(model, {"conv?": dict(dim=2, gain=True, norm=True, activation=Spark), "bn?": "drop"})
    head, rule, *lines = str(report).splitlines()
    assert head.split() == ["layer", "before", "after", "parameters"]
    assert set(rule) == {"-", " "}
    assert [line.split()[0] for line in lines] == ["conv1", "bn1", "conv2", "bn2"]
    assert re.split("  +", lines[0])[-2:] == ["SubspaceConv2d(3, types=4, dim=2, gain=True, norm=True) + Spark", "+8"]
    assert sum(row.parameters for row in report.rows) == sum(p.numel() for p in model.parameters()) - before


# types of deficient rank


@st.composite
def deficient(draw):
    """A linear layer of types of 3 in 6 dimensions, some of deficient rank, and which."""
    seed = draw(seeds)
    W = gaussian(4, 6, 3, seed=seed)
    ranks = draw(st.lists(st.integers(0, 3), min_size=4, max_size=4))
    assume(min(ranks) < 3)
    for i, rank in enumerate(ranks):
        U, h, Vh = torch.linalg.svd(W[i], full_matrices=False)
        W[i] = U[:, :rank] * h[:rank] @ Vh[:rank]
    layer = nn.Linear(6, 12).to(draw(st.sampled_from([torch.float32, torch.float64])))
    with torch.no_grad():
        layer.weight.copy_(W.mT.reshape(12, 6))
    return layer, ranks


@given(drawn=deficient())
def test_types_of_deficient_rank_are_named_or_filled(drawn):
    layer, ranks = drawn
    model = nn.Sequential(layer)
    before = matrices(layer, 3)
    named = ", ".join(str(i) for i, rank in enumerate(ranks) if rank < 3)
    message = f"'0': the weights of {sum(rank < 3 for rank in ranks)} of 4 types span fewer than dim=3 dimensions (types {named})"
    with pytest.raises(ValueError, match=re.escape(message) + ".*fill=True"):
        subcaps.convert(model, {"0": dict(dim=3)})
    subcaps.convert(model, {"0": dict(dim=3, fill=True, gain=True)})
    after = matrices(model[0], 3)
    h = torch.linalg.svdvals(after)
    old = torch.linalg.svdvals(before)
    for i, rank in enumerate(ranks):
        if rank == 3:
            close(after[i], before[i], atol=0, rtol=0)
        assert h[i, -1] > 0.99 * min([1.0, *old[i, :rank]])
        close(span(after[i]) @ before[i], before[i], atol=1e-5, rtol=1e-5)  # what was there still is
        close(after[i] @ torch.linalg.pinv(before[i], rtol=1e-5) @ before[i], before[i], atol=1e-5, rtol=1e-5)
    Q = model[0].subspaces()
    close(Q.mT @ Q, torch.eye(3).to(Q).expand(4, 3, 3), atol=1e-5, rtol=0)


# refusals


class WithItsOwnForward(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.abs())


class WithItsOwnConvolution(nn.Conv2d):
    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, weight / weight.norm(), bias)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(8, 8), nn.Linear(8, 8)
        self.decoder.weight = self.encoder.weight


def hooked(layer):
    layer.register_forward_hook(lambda *_: None)
    return layer


def with_a_zero_row(layer):
    with torch.no_grad():
        layer.weight[1] = 0
    return layer


def conv(*args, **options):
    return lambda: nn.Conv2d(*args, **options)


HEAD = dict(activation=CapsuleLength)

# what is asked of the module "bad", and the error
REFUSED = {
    "dim larger than the space": (conv(1, 8, 1), dict(dim=2), "'bad': dim=2 is larger than the 1 weights of an output channel"),
    "dim does not divide": (conv(3, 8, 3), dict(dim=3), "'bad': dim=3 does not divide the layer's 8 output channels"),
    "types do not divide": (conv(3, 8, 3), dict(types=3), "'bad': types=3 does not divide the layer's 8 output channels"),
    "types not over groups": (conv(8, 8, 3, groups=8), dict(dim=2), r"'bad'.*groups=8 must divide in_channels=8 and types=4"),
    "neither": (conv(3, 8, 3), dict(gain=True), "'bad': give `types` or `dim`; the layer has 8 output channels"),
    "no dim": (conv(3, 8, 3), dict(dim=0), "'bad': dim=0; give a whole number of at least 1"),
    "half a dim": (conv(3, 8, 3), dict(dim=2.0), "'bad': dim=2.0; give a whole number"),
    "another width": (conv(3, 8, 3), dict(types=8, dim=2), "'bad': types=8 times dim=2 is not the layer's width of 8"),
    "another width without lengths": (lambda: nn.Linear(6, 8), dict(types=8, dim=2), r"activation=CapsuleLength\)"),
    "a wide convolution with lengths": (conv(3, 8, 3), dict(types=8, dim=2) | HEAD, "Only a Linear that becomes a classifier"),
    "another number of classes": (lambda: nn.Linear(6, 8), dict(types=5, dim=2) | HEAD, "'bad': types=5 times dim=2 is not"),
    "lengths of fewer types": (lambda: nn.Linear(6, 8), dict(dim=2) | HEAD, "CapsuleLength answers 4 numbers where .*types=8"),
    "lengths of a convolution": (conv(3, 8, 3), dict(dim=2) | HEAD, "'bad': CapsuleLength makes 4 channels of 8"),
    "a wide layer without lengths": (
        lambda: nn.Linear(6, 8),
        dict(types=8, dim=2, activation=Spark),
        "'bad': Spark makes 16 channels of 16, and what follows expects 8",
    ),
    "more channels": (conv(3, 8, 3), dict(dim=2, activation=AppendLengths), "'bad': AppendLengths makes 12 channels of 8"),
    "an instance": (conv(3, 8, 3), dict(dim=2, activation=Spark(4, 2)), r"'bad': activation is an instance.*function of \(types"),
    "of other arguments": (conv(3, 8, 3), dict(dim=2, activation=Squash), r"'bad': activation is called with \(types, dim\) and"),
    "makes no module": (conv(3, 8, 3), dict(dim=2, activation=lambda types, dim: 3), "'bad': activation made 3; it must make a"),
    "an unknown option": (conv(3, 8, 3), dict(dims=2), "'bad': unknown option 'dims'; did you mean 'dim'?"),
    "no options": (conv(3, 8, 3), "dorp", "'bad': options are a dict or 'drop', not 'dorp'"),
    "an unknown bias": (conv(3, 8, 3), dict(dim=2, bias="types"), "'bad'.*bias='types'; choose False, True"),
    "deficient rank": (lambda: with_a_zero_row(nn.Linear(6, 8)), dict(dim=2), r"'bad': the weights of 1 of 4 .*\(types 0\)"),
    "a forward of its own": (lambda: WithItsOwnForward(3, 8, 3), dict(dim=2), "'bad' is a WithItsOwnForward, a Conv2d with a"),
    "a convolution of its own": (lambda: WithItsOwnConvolution(3, 8, 3), dict(dim=2), "'bad' is a WithItsOwnConvolution"),
    "parametrised": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)),
        dict(dim=2),
        "the weight of 'bad' is parametrised; convert first",
    ),
    "hooked": (lambda: hooked(nn.Linear(6, 8)), dict(dim=2), "'bad' has hooks, which would be lost; convert first"),
    "lazy": (lambda: nn.LazyConv2d(8, 3), dict(dim=2), "'bad' has no weight yet; run the model once on a batch first"),
    "transposed": (lambda: nn.ConvTranspose2d(3, 8, 3), dict(dim=2), "'bad' is a ConvTranspose2d; .* only some of its taps"),
    "a capsule layer": (lambda: SubspaceConv2d(3, 4, 2, 3), dict(dim=2), "'bad' is a SubspaceConv2d already"),
    "another module": (lambda: nn.BatchNorm2d(8), dict(dim=2), "'bad' is a BatchNorm2d; only Conv1d, Conv2d, Conv3d and Linear"),
}  # fmt: skip

# the same of patterns that name layers inside "bad"
REFUSED_INSIDE = {
    "no match": (CNN, {"bad.conv3": dict(dim=2)}, r"no layer fits the pattern 'bad.conv3'; the nearest names are .*'bad.conv"),
    "no match of a type": (CNN, {nn.Conv3d: dict(dim=2)}, "no layer fits the pattern .*Conv3d"),
    "a glob of norms only": (CNN, {"bad.bn*": dict(dim=2)}, r"no layer fits the pattern 'bad.bn\*'"),
    "one of two": (CNN, {"bad.conv1": dict(dim=2), "bad.nothing": "drop"}, "no layer fits the pattern 'bad.nothing'"),
    "no pattern at all": (CNN, {3: dict(dim=2)}, "pattern 3; give a name, a glob or a module class"),
    "transposed by type": (lambda: nn.ConvTranspose1d(3, 8, 3), {nn.ConvTranspose1d: dict(dim=2)}, "only some of its taps"),
    "transposed by glob": (lambda: nn.ConvTranspose3d(3, 8, 3), {"bad*": dict(dim=2)}, "only some of its taps"),
    "attention by name": (lambda: nn.MultiheadAttention(8, 2), {"bad.out_proj": dict(dim=2)}, "'bad.out_proj' stands in the"),
    "attention by glob": (lambda: nn.MultiheadAttention(8, 2), {"bad*": dict(dim=2)}, "reads the weights of its layers"),
    "attention by type": (lambda: nn.MultiheadAttention(8, 2), {nn.Linear: dict(dim=2)}, "reads the weights of its layers"),
    "transformer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        {"bad.linear1": dict(dim=2)},
        "'bad.linear1' stands in the TransformerEncoderLayer 'bad', which reads the weights",
    ),
    "a shared weight": (Tied, {"bad.encoder": dict(dim=2)}, "'bad.encoder' shares its weight with 'bad.decoder', which is not"),
    "the model itself": (CNN, {"*": "drop"}, "fits the model itself"),
    "inside what is dropped": (lambda: nn.Sequential(nn.Linear(8, 8)), {"bad": "drop", "bad.0": dict(dim=2)}, "'bad.0'.*'bad'"),
}  # fmt: skip


def everything(model):
    """What a refusal must leave: every module and parameter itself, every value, every mode."""
    return (
        {name: (module, type(module), module.training) for name, module in model.named_modules(remove_duplicate=False)},
        {name: (id(p), p.requires_grad) for name, p in model.named_parameters(remove_duplicate=False)},
        {name: value.clone() for name, value in model.state_dict().items() if not is_lazy(value)},
    )


def assert_refused(bad, patterns, message):
    """Though a layer before it can be converted."""
    model = nn.ModuleDict({"good": nn.Conv2d(3, 8, 3), "bad": bad})
    modules, parameters, values = everything(model)
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        subcaps.convert(model, {"good": dict(dim=2, init_std=0.1)} | patterns)
    assert str(caught.value).startswith("convert: ")
    modules_after, parameters_after, values_after = everything(model)
    assert (modules_after, parameters_after) == (modules, parameters)
    close(values_after, values, atol=0, rtol=0)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
@pytest.mark.parametrize(("make", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_is_refused_and_nothing_changes(make, options, message):
    assert_refused(make(), {"bad": options}, message)


@pytest.mark.parametrize(("make", "patterns", "message"), REFUSED_INSIDE.values(), ids=REFUSED_INSIDE)
def test_what_the_patterns_may_not_mean_is_refused_and_nothing_changes(make, patterns, message):
    assert_refused(make(), patterns, message)


def test_no_patterns_are_refused():
    with pytest.raises(ValueError, match="no patterns; give for instance"):
        subcaps.convert(CNN(), {})


@pytest.mark.parametrize("make", [lambda: nn.Linear(8, 8), lambda: nn.Conv2d(3, 8, 3)])
def test_a_layer_cannot_replace_itself(make):
    with pytest.raises(ValueError, match="fits the model itself, which cannot be replaced in place; wrap it"):
        subcaps.convert(layer := make(), {type(layer): dict(dim=2)})


# networks that others wrote


def resnet18():
    patterns = {
        "layer4.1.conv?": dict(dim=2, norm=True, activation=lambda types, dim: Spark(types, dim, leak=0.2)),
        "layer4.1.bn?": "drop",
        "fc": dict(types=10, dim=4, activation=CapsuleLength),
    }
    return torchvision.models.resnet18(num_classes=10), patterns, 64


def convnext():
    block = torchvision.models.convnext.CNBlockConfig
    patterns = {
        "features.0.0": dict(dim=4),
        "features.*.block.0": dict(dim=1),  # depthwise: a space of 49 dimensions for each channel
        "features.*.block.3": dict(dim=4, activation=lambda types, dim: Squash(dim)),
        "features.*.block.5": dict(types=4, gain=True),
    }
    return torchvision.models.ConvNeXt([block(16, 32, 1), block(32, None, 1)], num_classes=10, layer_scale=1.0), patterns, 32


def vit():
    patterns = {
        "blocks.*.attn.*": dict(dim=2, gain=True),
        "blocks.*.mlp.*": dict(dim=4, norm=True, activation=lambda types, dim: Spark(types, dim, leak=0.2)),
        "head": dict(types=10, dim=4, activation=CapsuleLength),
    }
    options = dict(img_size=32, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=10)
    return timm.create_model("vit_tiny_patch16_224", **options), patterns, 32


class UNet(nn.Module):
    """Down, across and up again, with a skip connection; one score per class, averaged over the positions."""

    def __init__(self):
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, stride=2, padding=1)
        self.up = nn.Upsample(scale_factor=2, mode="bilinear")
        self.across = nn.Conv2d(48, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 10, 1)

    def forward(self, x):
        skip = self.down1(x).relu()
        deep = self.up(self.down2(skip).relu())
        return self.out(self.across(torch.cat([skip, deep], 1)).relu()).mean((2, 3))


def unet():
    patterns = {
        "down2": dict(dim=4, norm=True, activation=lambda types, dim: Spark(types, dim, leak=0.2)),
        "across": dict(types=4, gain=True, activation=lambda types, dim: Squash(dim)),
    }
    return UNet(), patterns, 32


@pytest.mark.parametrize("make", [resnet18, convnext, vit, unet])
def test_a_network_of_others_is_converted_trained_a_step_and_fused(make):
    torch.manual_seed(0)
    model, patterns, size = make()
    plain = copy.deepcopy(model)
    report = subcaps.convert(model, patterns)
    assert {row.name for row in report.rows if "Subspace" in row.after} == converted(model)
    x, y = images(size=size), torch.tensor([0, 1, 2, 3])
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(subcaps.param_groups(model), lr=0.1)
    with subcaps.projected(model):
        nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    after = model.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    unmoved = [name for name, p in model.named_parameters() if name.endswith("weight") and torch.equal(p, before[name])]
    assert not unmoved
    subcaps.update_norms(model, [x])
    fused = subcaps.fuse(model)
    with torch.no_grad():
        assert_near(fused(x), model.eval()(x))
    assert not converted(fused)
    shapes = {name: value.shape for name, value in plain.state_dict().items()}
    assert all(value.shape == shapes[name] for name, value in fused.state_dict().items() if name in shapes and "head" not in name)


@pytest.mark.parametrize("other", [dict(dim=4), dict(types=8, dim=4, activation=CapsuleLength)])
def test_layers_that_share_a_weight_become_the_same_capsules_or_none(other):
    def tied():
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        model[1].weight = model[0].weight
        return model

    with pytest.raises(ValueError, match="'1' and '0' share a weight and would make different capsules of it"):
        subcaps.convert(tied(), {"0": dict(dim=2), "1": other})
    model = tied()
    subcaps.convert(model, {nn.Linear: dict(dim=2)})
    assert model[0].weight is model[1].weight
    subcaps.convert(model := tied(), {"0": dict(dim=2), "1": "drop"})
    assert isinstance(model[1], nn.Identity)


def test_an_activation_that_answers_no_tensor_is_refused():
    with pytest.raises(ValueError, match="'0': CapsuleSelect makes 0 channels of 8"):
        subcaps.convert(nn.Sequential(nn.Linear(8, 8)), {"0": dict(dim=2, activation=subcaps.nn.CapsuleSelect)})


def test_the_gain_of_a_float64_layer_is_float64():
    model = nn.Sequential(nn.Linear(6, 8)).double()
    W = model[0].weight.detach().clone()
    subcaps.convert(model, {"0": dict(dim=2, gain=True)})
    torch.testing.assert_close(model[0].gain, W.view(4, -1).norm(dim=1) / 2**0.5, atol=0, rtol=1e-14)
