"""`capsules` shows what layers answer, `param_groups` which parameters are which."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import subcaps
from subcaps.nn import CapsuleLength, Spark, SubspaceLinear

from .reference import CNN, Capsules, images, layers

# torch says so of any convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

close = torch.testing.assert_close


# capsules


@given(drawn=layers(), training=st.booleans())
def test_they_are_the_answer_before_the_activation(drawn, training):
    layer, x = drawn
    model = nn.Sequential(layer).train(training)
    expected = model(x)
    layer.activation = Spark(layer.types, layer.dim).to(x.dtype)
    (u,) = subcaps.capsules(model, x).values()
    assert u.shape[:3] == (len(x), layer.types, layer.dim)
    close(u.flatten(1, 2), expected)


@given(leading=st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_those_of_vectors_keep_their_leading_dimensions(leading):
    layer = SubspaceLinear(6, 3, 2, activation=CapsuleLength(3, 2))
    x = torch.randn(*leading, 6)
    (u,) = subcaps.capsules(layer, x).values()
    assert u.shape == (*leading, 3, 2)
    close(u.norm(dim=-1), layer(x))


def test_every_layer_answers_by_name_and_of_several_answers_the_last_stays():
    model = Capsules()
    model.spare = SubspaceLinear(8, 2, 2)  # is not called
    u = subcaps.capsules(model, images())
    assert {name: tuple(value.shape) for name, value in u.items()} == {
        "conv": (4, 4, 2, 8, 8),
        "pair": (4, 8, 1, 8, 8),
        "head": (4, 5, 3),
    }
    x = torch.relu(model.pair(model.conv(images())))
    close(u["pair"].flatten(1, 2), model.again(x))


def test_of_a_model_that_is_a_layer_the_name_is_empty():
    assert list(subcaps.capsules(SubspaceLinear(8, 2, 2), torch.randn(3, 8))) == [""]


def test_a_gradient_flows_through_them():
    model = Capsules()
    u = subcaps.capsules(model, images())
    sum(answer.square().sum() for answer in u.values()).backward()
    assert model.conv.weight.grad is not None


def test_looking_leaves_the_model_as_before():
    model = Capsules()
    attributes = [set(vars(module)) for module in model.modules()]
    with subcaps.projected(model):
        u = subcaps.capsules(model, images())
    with pytest.raises(RuntimeError):
        subcaps.capsules(model, torch.zeros(4, 5, 8, 8))  # five colours
    close(u["conv"], subcaps.capsules(model, images())["conv"])
    after = [set(vars(module)) - {"_shared"} for module in model.modules()]
    assert after == [names - {"_shared"} for names in attributes]


def test_a_network_without_capsules_has_none():
    assert subcaps.capsules(CNN(), images()) == {}


# param_groups


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.capsules = Capsules()
        self.norm = nn.LayerNorm(4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.tied = nn.Linear(4, 4)
        self.tied_too = nn.Linear(4, 4)
        self.tied_too.weight = self.tied.weight
        self.scores = CapsuleLength(5, 3, scale=1.0, offset=0.0, per_type=True)
        self.spark = Spark(4, 2)
        self.token = nn.Parameter(torch.zeros(1, 1, 4))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.parametrised = nn.utils.parametrizations.weight_norm(SubspaceLinear(4, 2, 2))


def by_group(model, **options):
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {group["name"]: {names[id(p)] for p in group["params"]} for group in subcaps.param_groups(model, **options)}


def test_every_parameter_that_is_trained_is_in_one_group():
    model = Everything()
    groups = by_group(model)
    assert groups["subspaces"] == {
        "capsules.conv.weight",
        "capsules.pair.weight",
        "capsules.head.weight",
        "parametrised.parametrizations.weight.original0",
        "parametrised.parametrizations.weight.original1",
    }
    assert groups["rest"] == {"conv.weight", "tied.weight", "token"}
    assert {"capsules.conv.gain", "capsules.conv.activation.b", "capsules.head.activation.scale"} <= groups["scalars"]
    assert {"norm.weight", "conv.bias", "spark.b", "scores.scale", "scores.offset"} <= groups["scalars"]
    assert sum(map(len, groups.values())) == len(set().union(*groups.values()))
    assert set().union(*groups.values()) == {name for name, p in model.named_parameters() if p.requires_grad}


@given(decay=st.floats(0, 1), of_subspaces=st.none() | st.floats(0, 1))
def test_scalars_do_not_decay_and_subspaces_as_they_are_told(decay, of_subspaces):
    groups = subcaps.param_groups(Everything(), weight_decay=decay, subspace_weight_decay=of_subspaces)
    assert {group["name"]: group["weight_decay"] for group in groups} == {
        "subspaces": decay if of_subspaces is None else of_subspaces,
        "scalars": 0.0,
        "rest": decay,
    }


def test_an_empty_group_is_left_out():
    assert [group["name"] for group in subcaps.param_groups(CNN())] == ["scalars", "rest"]
    assert [group["name"] for group in subcaps.param_groups(SubspaceLinear(8, 2, 2))] == ["subspaces"]


def test_torch_optimizes_the_groups():
    """The size of W is what its decay sets: the function stays."""
    model = Capsules().eval()
    before = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(subcaps.param_groups(model, subspace_weight_decay=0.5), lr=1.0).step()
    close(model.conv.weight, 0.5 * before.conv.weight)
    close(model(images()), before(images()))
