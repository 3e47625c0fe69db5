"""`health` against what it measures, computed the long way."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from projection.reference import orthonormal, seeds, singular_values, weight
from torch import nn

import subcaps
from subcaps.nn import CapsuleLength, Spark, SubspaceConv2d, SubspaceLinear
from subcaps.nn.functional import lengths

close = torch.testing.assert_close


def with_weight(W):
    """A linear layer of the types whose W are given, (types, d, dim)."""
    types, d, dim = W.shape
    layer = SubspaceLinear(d, types, dim)
    with torch.no_grad():
        layer.weight.copy_(W.mT.reshape(types * dim, d))
    return layer


def only(model, batch=None):
    (layer,) = subcaps.health(model, batch).layers
    return layer


@given(types=st.integers(1, 4), dim=st.integers(2, 5), kappa=st.floats(1, 1e3), seed=seeds)
def test_the_condition_is_the_worst_of_any_type(types, dim, kappa, seed):
    W = weight(types, dim + 3, dim, seed=seed)
    W[-1] = weight(1, dim + 3, dim, singular_values(dim, max(2.0, kappa)), seed=seed)[0]
    layer = only(with_weight(W))
    assert layer.condition == pytest.approx(max(2.0, kappa), rel=1e-2)
    assert layer.orthonormality < 1e-4
    assert (layer.types, layer.dim, layer.random_overlap) == (types, dim, dim / (dim + 3))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_type_of_deficient_rank_has_no_condition(rank):
    W = orthonormal(3, 6, 2, seed=0)
    W[1, :, rank:] = 0
    assert only(with_weight(W)).condition == math.inf
    assert "inf" in str(subcaps.health(with_weight(W)))


@given(dim=st.integers(1, 4), d=st.integers(8, 12), seed=seeds)
def test_overlap_is_one_for_equal_and_none_for_orthogonal_subspaces(dim, d, seed):
    basis = orthonormal(1, d, 2 * dim, seed=seed)[0]
    first, second = basis[:, :dim], basis[:, dim:]
    turned = first @ orthonormal(1, dim, dim, seed=seed)[0]
    assert only(with_weight(torch.stack([first, turned]))).overlap == pytest.approx(1, abs=1e-5)
    assert only(with_weight(torch.stack([first, second]))).overlap == pytest.approx(0, abs=1e-5)
    assert only(with_weight(torch.stack([first, second, second]))).overlap == pytest.approx(1 / 3, abs=1e-5)


@given(seed=seeds)
def test_random_subspaces_overlap_as_they_should(seed):
    layer = only(with_weight(orthonormal(40, 24, 3, seed=seed)))
    assert layer.overlap == pytest.approx(layer.random_overlap, rel=0.1)
    assert layer.random_overlap == 3 / 24


def test_one_type_overlaps_with_none():
    assert only(SubspaceLinear(6, 1, 2)).overlap == 0


def layers_of_every_rank():
    spark = Spark(4, 2)
    with torch.no_grad():
        spark.b.copy_(torch.tensor([0.1, 0.8, 1.0, 100.0]))  # the last is dead
    return [
        (SubspaceConv2d(3, 4, 2, 3, norm=True, activation=spark), torch.randn(5, 3, 6, 6)),
        (SubspaceLinear(6, 4, 2, activation=spark), torch.randn(20, 6)),
        (SubspaceLinear(6, 4, 2, activation=spark), torch.randn(4, 5, 6)),
    ]


@pytest.mark.parametrize(("layer", "x"), layers_of_every_rank())
def test_a_batch_shows_lengths_and_which_capsules_are_on(layer, x):
    layer.eval()
    u = layer.capsules(x)
    u = u.flatten(0, -2) if isinstance(layer, nn.Linear) else u
    length = lengths(u, 2).transpose(0, 1).flatten(1)  # (types, all positions)
    on = length > layer.activation.b.square()[:, None]
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    found = only(layer, x)
    assert found.length == pytest.approx(length.mean().item())
    assert found.on == pytest.approx(on.float().mean().item())
    assert found.dead == 1
    close(layer.state_dict(), state, atol=0, rtol=0)


def test_without_a_batch_or_a_spark_nothing_is_said_of_them():
    head = SubspaceLinear(6, 4, 2, activation=CapsuleLength(4, 2))
    for batch, has_length in ((None, False), (torch.randn(3, 6), True)):
        layer = only(head, batch)
        assert (layer.length is not None) == has_length
        assert layer.on is None
        assert layer.dead is None


def test_it_prints_as_a_table_of_layers():
    model = nn.Sequential(SubspaceLinear(6, 4, 2, activation=Spark(4, 2)), nn.ReLU(), SubspaceLinear(8, 3, 2))
    assert [layer.name for layer in subcaps.health(model).layers] == ["0", "2"]
    head, first, second = str(subcaps.health(model, torch.randn(9, 6))).splitlines()
    for column in ("layer", "types x dim", "condition", "overlap (random)", "length", "on", "dead types"):
        assert column in head
    assert first.split()[:4] == ["0", "4", "x", "2"]
    assert "%" in first
    assert second.split()[-2:] == ["-", "-"]  # no Spark


def test_the_mode_and_the_gradients_are_left():
    model = nn.Sequential(SubspaceLinear(6, 4, 2), nn.Dropout(0.5)).eval()
    subcaps.health(model, torch.randn(3, 6))
    assert not model.training
    assert all(p.grad is None for p in model.parameters())


def test_a_parametrised_layer_is_measured_too():
    layer = nn.utils.parametrizations.weight_norm(SubspaceLinear(6, 4, 2))
    assert only(layer).condition < 10


def test_a_model_without_capsules_has_no_health():
    with pytest.raises(ValueError, match="health: the model has no capsule layer"):
        subcaps.health(nn.Linear(3, 3))
