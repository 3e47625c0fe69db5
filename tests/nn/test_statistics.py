"""`calibrate` sets thresholds so that a share of capsules is on, `update_norms` takes running statistics again."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.optim.swa_utils import update_bn

import subcaps
from subcaps.nn import Spark, SubspaceConv2d, SubspaceLinear
from subcaps.nn.functional import lengths

from .reference import CNN, images

close = torch.testing.assert_close


def network(dropout=0.5):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, bias=False),
        nn.BatchNorm2d(6),
        nn.Dropout(dropout),
        SubspaceConv2d(6, 4, 2, 3, norm=True, gain=True, activation=Spark(4, 2, leak=0.2)),
        nn.Dropout2d(dropout),
        SubspaceConv2d(8, 3, 3, 3, norm=True),
        Spark(3, 3),
        nn.Flatten(),
        SubspaceLinear(36, 5, 2, norm=True, bias=True, activation=Spark(5, 2)),
    )


def sparks(model):
    return [module for module in model.modules() if isinstance(module, Spark)]


def state_but_thresholds(model):
    return {name: value.clone() for name, value in model.state_dict().items() if not name.endswith(".b")}


def modes(model):
    return [module.training for module in model.modules()]


def mixed_modes(model):
    """A batch norm that was frozen by hand stays so."""
    model.train()
    model[1].eval()
    return model


class Interrupting(nn.Module):
    def forward(self, x):
        raise InterruptedError


# calibrate


@settings(max_examples=10)
@given(active=st.floats(0.05, 0.95), batch=st.integers(8, 32))
def test_that_share_of_each_types_capsules_is_on(active, batch):
    """On the batch, as each layer sees it once those before it are set."""
    model = network(dropout=0.0)
    x = images(batch)
    subcaps.calibrate(model, x, active)
    seen = {}
    for spark in sparks(model):
        spark.register_forward_hook(lambda spark, args, _: seen.update({spark: args[0]}))
    model(x)  # in training mode: the norms take the batch's own statistics
    assert len(seen) == 3
    for spark, u in seen.items():
        length = lengths(u, spark.dim).transpose(0, 1).flatten(1)  # (types, all positions)
        on = (length > spark.b.square()[:, None]).float().mean(1)
        close(on, torch.full_like(on, active), atol=1.5 / length.shape[1] + 1e-6, rtol=0)


def test_thresholds_are_set_without_dropout():
    with_dropout, without = network(0.5), network(0.0)
    for model in (with_dropout, without):
        subcaps.calibrate(model, images(16))
    close([spark.b for spark in sparks(with_dropout)], [spark.b for spark in sparks(without)])


@pytest.mark.parametrize("prepare", [nn.Module.train, nn.Module.eval, mixed_modes])
def test_calibrating_changes_thresholds_only(prepare):
    model = network()
    prepare(model)
    subcaps.update_norms(model, [images(8)])
    state, modes_before = state_but_thresholds(model), modes(model)
    subcaps.calibrate(model, images(16))
    close(state_but_thresholds(model), state, atol=0, rtol=0)
    assert modes(model) == modes_before
    assert all(spark.b.requires_grad and spark.b.grad is None and spark.b.is_leaf for spark in sparks(model))
    before = [spark.b.clone() for spark in sparks(model)]
    model(3 + images(16))  # no hook is left
    close([spark.b for spark in sparks(model)], before)


def test_an_exception_leaves_modes_statistics_and_no_hooks():
    model = nn.Sequential(*network(), Interrupting())
    state, modes_before = state_but_thresholds(model), modes(model)
    with pytest.raises(InterruptedError):
        subcaps.calibrate(model, images(16))
    close(state_but_thresholds(model), state, atol=0, rtol=0)
    assert modes(model) == modes_before
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("active", [0, 1, -0.5, 50])
def test_a_share_is_between_none_and_all(active):
    with pytest.raises(ValueError, match=f"active={active}; the share of capsules that are on is between 0 and 1"):
        subcaps.calibrate(network(), images(16), active)


def test_a_model_without_thresholds_cannot_be_calibrated():
    with pytest.raises(ValueError, match="no Spark, so there is no threshold to set"):
        subcaps.calibrate(CNN(), images())


def test_a_spark_that_is_not_used_is_named():
    model = CNN()
    model.spare = Spark(4, 2)
    with pytest.raises(RuntimeError, match="spare took no part in the forward pass"):
        subcaps.calibrate(model, images())


# update_norms


def norms(model):
    return [module for module in model.modules() if hasattr(module, "running_mean")]


def statistics(model):
    return [{name: buffer.clone() for name, buffer in norm.named_buffers()} for norm in norms(model)]


@settings(max_examples=5)
@given(batches=st.integers(1, 4))
def test_it_is_torchs_update_bn_for_our_norms_as_well(batches):
    """The plain mean over the batches, each layer behind those before it."""
    ours, torchs = network(0.0), network(0.0)
    for model in (ours, torchs):
        model(5 * images())  # to be forgotten
    data = [images(8, seed=seed) for seed in range(batches)]
    subcaps.update_norms(ours, data)
    for norm in norms(torchs):  # what update_bn does, of every norm
        norm.reset_running_stats()
        norm.momentum = None
    for x in data:
        torchs(x)
    close(statistics(ours), statistics(torchs))
    assert all(norm.num_batches_tracked == batches for norm in norms(ours))


def test_of_a_cnn_it_is_update_bn():
    ours = CNN()
    torchs = copy.deepcopy(ours)
    data = [images(seed=seed) for seed in range(3)]
    subcaps.update_norms(ours, data)
    update_bn(data, torchs)
    close(statistics(ours), statistics(torchs))


def test_statistics_are_those_of_the_batch_without_dropout():
    model = network(0.5)
    x = images(16)
    subcaps.update_norms(model, [x])
    for norm, seen in ((model[1], model[0](x)), (model[3].norm, nn.Sequential(*model[:2]).train()(x))):
        close(norm.running_mean, seen.mean((0, 2, 3)))
        close(norm.running_var, seen.transpose(0, 1).flatten(1).var(1))


@pytest.mark.parametrize("prepare", [nn.Module.train, nn.Module.eval, mixed_modes])
def test_updating_changes_statistics_only(prepare):
    model = prepare(network())
    model[1].momentum, model[3].norm.momentum = 0.3, 0.4
    parameters, modes_before = copy.deepcopy(dict(model.named_parameters())), modes(model)
    subcaps.update_norms(model, iter([(images(8), torch.zeros(8)), [images(8, seed=1)]]))  # inputs come first
    close(dict(model.named_parameters()), parameters, atol=0, rtol=0)
    assert all(p.grad is None for p in model.parameters())
    assert modes(model) == modes_before
    assert [norm.momentum for norm in norms(model)] == [0.3, 0.4, 0.1, 0.1]


def test_an_exception_restores_modes_and_momentum():
    model = nn.Sequential(*network(), Interrupting()).eval()
    with pytest.raises(InterruptedError):
        subcaps.update_norms(model, [images(16)])
    assert not any(modes(model))
    assert [norm.momentum for norm in norms(model)] == [0.1] * 4


def test_without_batches_the_statistics_stay():
    model = network()
    model(images())
    before = statistics(model)
    with pytest.raises(ValueError, match="no batches, so there are no statistics"):
        subcaps.update_norms(model, [])
    close(statistics(model), before)


def test_a_batch_norm_without_running_statistics_is_left_alone():
    model = nn.Sequential(nn.BatchNorm2d(3, track_running_stats=False), SubspaceConv2d(3, 2, 2, 3, norm=True))
    subcaps.update_norms(model, [images()])
    assert model[0].running_mean is None
    assert model[1].norm.num_batches_tracked == 1
