"""`projected`: one projection per layer and block, the same gradients, and an error wherever they would be others."""

from __future__ import annotations

import copy
import io
import os
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import subcaps
from subcaps.nn import Squash, SubspaceLinear

from .reference import CNN, Capsules, images

close = torch.testing.assert_close


def network():
    torch.manual_seed(0)
    return Capsules().double()


def x(seed=0):
    return images(seed=seed).double()


def loss(model, seed=0):
    return model(x(seed)).logsumexp(1).sum()


def once(model):
    loss(model).backward()


def called_several_times(model):
    sum(loss(model, seed) for seed in range(3)).backward()


def first_under_no_grad(model):
    with torch.no_grad():
        model(x())
    with torch.inference_mode():
        model(x())
    once(model)


def partly_frozen(model):
    model.conv.weight.requires_grad_(False)
    model.head.requires_grad_(False)
    called_several_times(model)


def checkpointed(model):
    (
        checkpoint(model, x(), use_reentrant=False).sum() + checkpoint(model.conv, x(1), use_reentrant=False).square().sum()
    ).backward()


def penalised(model):
    """A gradient penalty with respect to the input, beside the loss."""
    inputs = x().requires_grad_()
    scores = model(inputs)
    (dx,) = torch.autograd.grad(scores.sum(), inputs, create_graph=True)
    (scores.logsumexp(1).sum() + (dx.flatten(1).norm(dim=1) - 1).square().sum()).backward()


def twice_through_a_kept_graph(model):
    first, second = loss(model), loss(model, 1)
    first.backward(retain_graph=True)
    second.backward()


def through_the_lift(model):
    u = model.head.capsules(torch.ones(2, 8).double())
    model.head.lift(u).pow(3).sum().backward()


def nested(model):
    with subcaps.projected(model):
        first = loss(model)
        with subcaps.projected(model.conv):
            second = loss(model, 1)
    (first + second + loss(model, 2)).backward()


def in_evaluation_mode(model):
    model.eval()
    called_several_times(model)


WAYS = [
    once, called_several_times, first_under_no_grad, partly_frozen, checkpointed, penalised, twice_through_a_kept_graph,
    through_the_lift, nested, in_evaluation_mode,
]  # fmt: skip


def gradients(model):
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(model, expected):
    ours, expected = gradients(model), gradients(expected)
    present = {name for name, gradient in expected.items() if gradient is not None}
    assert present == {name for name, gradient in ours.items() if gradient is not None}
    assert present
    close([ours[name] for name in present], [expected[name] for name in present], atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_the_gradients_are_those_without_it(way):
    plain, model = network(), network()
    way(plain)
    with subcaps.projected(model):
        way(model)
    assert_same_gradients(model, plain)
    close(model.state_dict(), plain.state_dict())  # running averages too


def test_gradients_accumulate_over_a_block_per_micro_batch():
    plain, model = network(), network()
    for seed in range(3):
        loss(plain, seed).backward()
        with subcaps.projected(model):
            loss(model, seed).backward()
    assert_same_gradients(model, plain)


def test_training_goes_the_same_way():
    plain, model = network(), network()
    for net in (plain, model):
        optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
        for seed in range(3):
            optimizer.zero_grad()
            with subcaps.projected(net) if net is model else ExitStack():
                loss(net, seed).backward()
            optimizer.step()
    close(model.state_dict(), plain.state_dict(), atol=1e-7, rtol=1e-7)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_entered_under_no_grad_it_still_trains(mode):
    plain, model = network(), network()
    once(plain)
    with ExitStack() as stack:
        with mode():
            stack.enter_context(subcaps.projected(model))
        once(model)
    assert_same_gradients(model, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_evaluation_loop_is_a_block(mode):
    model = network().eval()
    expected = [model(x(seed)) for seed in range(3)]
    with mode(), subcaps.projected(model):
        close([model(x(seed)) for seed in range(3)], expected)


class Calls(TorchDispatchMode):
    """Counts operators."""

    def __init__(self):
        super().__init__()
        self.of = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.of[func] += 1
        return func(*args, **(kwargs or {}))


def projections(calls):
    return calls.of[torch.ops.subcaps.polar.default], calls.of[torch.ops.subcaps.polar_gradient.default]


def test_every_layer_is_projected_once_there_and_once_back():
    model, layers = network(), 3
    with Calls() as calls, subcaps.projected(model):
        assert projections(calls) == (layers, 0)  # on entry
        called_several_times(model)
    assert projections(calls) == (layers, layers)
    with Calls() as calls:
        model(x())
    assert projections(calls) == (layers + 1, 0)  # outside there is none to be stale


def test_a_model_without_capsules_is_left_alone():
    model = CNN()
    with subcaps.projected(model):
        model(images()).sum().backward()


# what must be an error


def test_a_second_backward_pass_says_what_to_do():
    model = network()
    with subcaps.projected(model):
        once(model)
        with pytest.raises(
            RuntimeError, match=r"sum the losses .* open a block for every backward pass, or give retain_graph=True"
        ):
            once(model)


def by_step(make):
    def change(model):
        optimizer = make(model.parameters())
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    return change


def by_hand(model):
    with torch.no_grad():
        model.head.weight[0] += 1


def by_replacing_it(model):
    model.head.weight = nn.Parameter(model.head.weight.detach().clone())


CHANGES = {
    "SGD": by_step(lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    "Adam, one by one": by_step(lambda parameters: torch.optim.Adam(parameters, foreach=False)),
    "Adam, all at once": by_step(lambda parameters: torch.optim.Adam(parameters, foreach=True)),
    "Adam, fused": by_step(lambda parameters: torch.optim.Adam(parameters, fused=True)),
    "load_state_dict": lambda model: model.load_state_dict(network().state_dict()),
    "reset_parameters": lambda model: model.head.reset_parameters(),
    "by hand": by_hand,
    "replaced": by_replacing_it,
}


@pytest.mark.parametrize("use_it", [True, False])
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_W_inside_is_an_error(change, use_it):
    """Where the layer is used, or else at the end of the block."""
    model = network()

    def change_inside():
        with subcaps.projected(model):
            CHANGES[change](model)
            if use_it:
                model(x())
                pytest.fail("used with a stale projection")

    with pytest.raises(RuntimeError, match=r"changed inside the block.* leave the block before `optimizer.step\(\)`"):
        change_inside()
    once(model)


def test_reentrant_checkpointing_is_refused_with_advice():
    model = network()
    with subcaps.projected(model):
        scores = checkpoint(model, x().requires_grad_(), use_reentrant=True)
        with pytest.raises(RuntimeError, match="use_reentrant=False"):
            scores.sum().backward()


def test_an_exception_inside_leaves_the_model_as_before():
    plain, model = network(), network()
    state = copy.deepcopy(model.state_dict())

    def interrupted():
        with subcaps.projected(model), subcaps.projected(model.conv):
            raise InterruptedError

    with pytest.raises(InterruptedError):
        interrupted()
    close(model.state_dict(), state)
    for net in (plain, model):  # a stale projection would show
        by_hand(net)
        once(net)
    assert_same_gradients(model, plain)


# copies


def test_a_copy_made_inside_stands_outside():
    model = network()
    with subcaps.projected(model):
        copied = copy.deepcopy(model)
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        for net in (copied, loaded):
            by_hand(net)  # no error: it has a W of its own
            once(net)
        once(model)
    plain = network()
    by_hand(plain)
    once(plain)
    for net in (copied, loaded):
        assert_same_gradients(net, plain)


def test_a_copy_of_a_parametrised_layer_made_inside_stands_outside():
    layer = nn.utils.parametrizations.weight_norm(SubspaceLinear(8, 2, 2, activation=Squash(2)))
    inputs = torch.randn(3, 8)
    with subcaps.projected(layer):
        copied = copy.deepcopy(layer)
        close(copied(inputs), layer(inputs))
    with torch.no_grad():
        copied.parametrizations.weight.original1.normal_()
    assert not copied(inputs).allclose(layer(inputs))


# two processes


def train_in_company(child, folder, rank):
    """A step on the rank's half of the data."""
    meeting = dict(init_method=f"file://{folder}/meeting", rank=rank, world_size=2, timeout=timedelta(seconds=60))
    torch.distributed.init_process_group("gloo", **meeting)
    model = DistributedDataParallel(network())
    with subcaps.projected(model):
        loss(model, seed=rank).backward()
    torch.save(gradients(model.module), f"{folder}/{rank}")
    torch.distributed.destroy_process_group()


def test_two_processes_average_their_gradients(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "GLOO_SOCKET_IFNAME", "lo")
    other = torch.multiprocessing.spawn(train_in_company, (tmp_path, 1), nprocs=1, join=False)
    train_in_company(None, tmp_path, 0)
    assert other.join(timeout=60)
    plain = network()
    (sum(loss(plain, seed) for seed in range(2)) / 2).backward()
    for rank in range(2):
        close(torch.load(tmp_path / str(rank)), gradients(plain), atol=1e-9, rtol=1e-9)


def test_a_gain_may_be_parametrised():
    class Positive(nn.Module):
        def forward(self, gain):
            return gain.exp()

    layer = subcaps.nn.SubspaceLinear(6, types=2, dim=2, gain=True)
    nn.utils.parametrize.register_parametrization(layer, "gain", Positive())
    with subcaps.projected(layer):
        layer(torch.randn(3, 6)).sum().backward()
    assert layer.parametrizations.gain.original.grad is not None
    assert [group["name"] for group in subcaps.param_groups(layer)] == ["subspaces", "scalars"]
