"""A network with capsules as torch treats any other: saved, loaded, copied, averaged, compiled, cast, laid out otherwise."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import safetensors.torch
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

import subcaps
from subcaps.nn import CapsuleLength, Spark, Squash, SubspaceConv2d, SubspaceLinear

from .reference import CNN, Capsules, assert_near, images, randomise, torch_compiles

close = torch.testing.assert_close

PATTERNS = {
    "conv1": dict(dim=2, gain=True, norm=True, activation=Spark),
    "bn1": "drop",
    "relu1": "drop",
    "conv2": dict(types=8, gain=True),
    "fc": dict(dim=5),
}


def converted():
    model = CNN()
    subcaps.convert(model, PATTERNS)
    return model


def loss(model, x=None):
    return model(images() if x is None else x).float().logsumexp(1).sum()


def gradients(model, x=None):
    return torch.autograd.grad(loss(model, x), list(model.parameters()))


# the state


def test_the_keys_are_readable():
    layer = SubspaceConv2d(3, 4, 2, 3, bias=True, gain=True, norm=True, activation=Spark(4, 2))
    norm = ["running_mean", "running_var", "num_batches_tracked"]
    assert layer.state_dict().keys() == {"weight", "bias", "gain", "activation.b", *(f"norm.{name}" for name in norm)}
    assert SubspaceLinear(8, 2, 2).state_dict().keys() == {"weight"}
    head = SubspaceLinear(8, 2, 2, bias="type", activation=CapsuleLength(2, 2, scale=1.0, offset=0.0))
    assert head.state_dict().keys() == {"weight", "bias", "activation.scale", "activation.offset"}


def test_the_state_of_a_cnn_loads_into_what_becomes_of_it():
    cnn, model = randomise(CNN()), converted()
    result = model.load_state_dict(cnn.state_dict(), strict=False)
    norm = {f"conv1.norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert set(result.missing_keys) == {"conv1.gain", "conv2.gain", "conv1.activation.b"} | norm
    bn1 = {f"bn1.{name}" for name in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")}
    assert set(result.unexpected_keys) == bn1
    for name, value in cnn.state_dict().items():
        if name not in bn1:
            close(model.state_dict()[name], value)


def test_loaded_then_converted_is_converted_then_loaded():
    cnn = randomise(CNN())
    patterns = {"conv?": dict(dim=2), "fc": dict(dim=5)}
    first, then = copy.deepcopy(cnn), CNN()
    subcaps.convert(first, patterns)
    subcaps.convert(then, patterns)
    then.load_state_dict(cnn.state_dict())  # strictly: there is nothing else
    close(then(images()), first(images()))


def test_strict_loading_names_what_does_not_fit():
    with pytest.raises(
        RuntimeError, match=r'(?s)Missing key\(s\) in state_dict: "conv1.gain".*Unexpected key\(s\).*"bn1.weight"'
    ) as error:
        converted().load_state_dict(CNN().state_dict())
    assert '"conv1.activation.b"' in str(error.value)
    model = CNN()
    subcaps.convert(model, {"conv2": dict(dim=2, bias="type"), "fc": dict(types=10, dim=4, bias=False, activation=CapsuleLength)})
    with pytest.raises(RuntimeError) as error:
        model.load_state_dict(CNN().state_dict(), strict=False)
    for name in ("conv2.bias", "fc.weight"):  # torch refuses other shapes even so
        assert f"size mismatch for {name}" in str(error.value)


def through_torch_save(model, path):
    torch.save(model.state_dict(), path)
    fresh = type(model)() if isinstance(model, Capsules) else converted()
    fresh.load_state_dict(torch.load(path, weights_only=True))
    return fresh


def through_the_whole_module(model, path):
    torch.save(model, path)
    return torch.load(path, weights_only=False)


def through_safetensors(model, path):
    safetensors.torch.save_model(model, path)  # also of shared layers
    fresh = type(model)() if isinstance(model, Capsules) else converted()
    safetensors.torch.load_model(fresh, path)
    return fresh


def through_deepcopy(model, path):
    return copy.deepcopy(model)


@pytest.mark.parametrize("make", [converted, Capsules])
@pytest.mark.parametrize("way", [through_torch_save, through_the_whole_module, through_safetensors, through_deepcopy])
def test_saved_and_loaded_it_is_the_same(way, make, tmp_path):
    model = randomise(make())
    loaded = way(model, tmp_path / "model")
    close(loaded.state_dict(), model.state_dict())
    close(gradients(loaded), gradients(model))
    close(loaded.eval()(images()), model.eval()(images()))
    assert not {p.data_ptr() for p in loaded.parameters()} & {p.data_ptr() for p in model.parameters()}


def test_an_average_of_weights_has_a_projection_of_its_own():
    """W is averaged, never Q: an average of projections is none."""
    model = Capsules()
    averaged = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averaged.update_parameters(model)
    first = model.conv.weight.detach().clone()
    randomise(model)
    averaged.update_parameters(model)
    close(averaged.module.conv.weight.detach(), (first + model.conv.weight.detach()) / 2)
    Q = averaged.module.conv.subspaces()
    close(Q.mT @ Q, torch.eye(2).expand(4, 2, 2), atol=1e-5, rtol=0)


# parametrisation


class Halved(nn.Module):
    def forward(self, weight):
        return torch.cat([weight[:2], weight[2:] * 0.5 + weight[:2]])


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("layer", [SubspaceLinear(6, 2, 2, gain=True), SubspaceConv2d(6, 2, 2, 1, norm=True)])
def test_a_parametrised_weight_is_the_W_that_is_projected(layer, inside):
    layer = copy.deepcopy(layer).double()
    x = torch.randn(4, 6, *[2] * (layer.weight.ndim - 2)).double()
    plain = copy.deepcopy(layer)
    with torch.no_grad():
        plain.weight.copy_(Halved()(plain.weight))
    nn.utils.parametrize.register_parametrization(layer, "weight", Halved())
    with subcaps.projected(layer) if inside else nullcontext():
        u = layer(x)
        (gradient,) = torch.autograd.grad(u.pow(3).sum(), layer.parametrizations.weight.original)
    close(u, plain(x))
    W = layer.parametrizations.weight.original
    (dW,) = torch.autograd.grad(plain(x).pow(3).sum(), plain.weight)
    close(gradient, torch.autograd.grad(Halved()(W), W, dW)[0])
    again = copy.deepcopy(layer)
    again.load_state_dict(layer.state_dict())
    close(again(x), u)
    nn.utils.parametrize.remove_parametrizations(layer, "weight")
    close(layer(x), u)


def test_a_change_of_a_parametrised_weight_inside_projected_is_an_error():
    layer = nn.utils.parametrizations.weight_norm(SubspaceLinear(6, 2, 2))

    def change():
        with subcaps.projected(layer), torch.no_grad():
            layer.parametrizations.weight.original1.mul_(2)

    with pytest.raises(RuntimeError, match="changed inside the block"):
        change()


# the compiler

compiles = pytest.mark.filterwarnings(torch_compiles)


@compiles
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("make", [converted, Capsules])
def test_it_compiles_without_a_break(make, training):
    torch.compiler.reset()
    model = randomise(make()).train(training)
    assert_compiled_equals_eager(model, "aot_eager")
    with torch.no_grad():
        close(torch.compile(model, fullgraph=True, backend="aot_eager")(images()), model(images()), atol=1e-5, rtol=1e-4)


@compiles
@pytest.mark.filterwarnings(
    "ignore:.torch.jit.script_method. is deprecated:DeprecationWarning"
)  # torch 2.11's inductor, of itself
def test_inductor_compiles_it():
    """An activation between convolutions: what inductor fuses there it may also compute in place, wrongly."""
    torch.compiler.reset()
    first = SubspaceConv2d(3, 4, 2, 3, norm=True, gain=True, activation=Spark(4, 2, leak=0.2))
    assert_compiled_equals_eager(nn.Sequential(first, SubspaceConv2d(8, 4, 2, 3, activation=Squash(2))), "inductor")


def assert_compiled_equals_eager(model, backend):
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    close(gradients(compiled), gradients(eager), atol=1e-4, rtol=1e-4)
    close(model.state_dict(), eager.state_dict())  # running averages


@compiles
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # the compiler asks Q for it
def test_inside_projected_it_is_compiled_once_for_all_blocks():
    torch.compiler.reset()
    model = Capsules()
    eager = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for step in range(3):
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            for net, called in ((model, compiled), (eager, eager)):
                optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
                with subcaps.projected(net):
                    loss(called, images(seed=step)).backward()
                optimizer.step()
                optimizer.zero_grad()
    close(model.state_dict(), eager.state_dict(), atol=1e-5, rtol=1e-4)


# precision and layout


@pytest.mark.parametrize("make", [converted, Capsules])
def test_autocast_leaves_the_projection_in_float32(make):
    model = randomise(make())
    layer = next(module for module in model.modules() if isinstance(module, SubspaceConv2d))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        close(layer.projection(), layer.projection().float(), atol=0, rtol=0)
        projection, u = layer.projection(), layer.capsules(images())
        scores = model(images())
        in_bfloat16 = gradients(model)
    close(projection, layer.projection(), atol=0, rtol=0)
    assert u.dtype == torch.bfloat16
    assert_near(u.float(), layer.capsules(images()), 0.02)
    assert_near(scores.float(), model(images()), 0.1)
    assert all(gradient.dtype == torch.float32 for gradient in in_bfloat16)
    assert all(gradient.isfinite().all() for gradient in in_bfloat16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_network_of_another_precision_trains(dtype):
    model = Capsules().to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with subcaps.projected(model):
        loss(model, images().to(dtype)).backward()
    optimizer.step()
    subcaps.update_norms(model, [images().to(dtype)])
    assert {p.dtype for p in model.parameters()} == {dtype}
    assert all(value.isfinite().all() for value in model.state_dict().values())
    assert all(p.grad.any() and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("make", [converted, Capsules])
def test_channels_last_changes_nothing_but_the_layout(make, inside):
    plain = randomise(make()).double()
    model = copy.deepcopy(plain).to(memory_format=torch.channels_last)
    x = images().double()
    x_last = x.to(memory_format=torch.channels_last)
    with subcaps.projected(model) if inside else nullcontext():
        close(gradients(model, x_last), gradients(plain, x))
    close(model.state_dict(), plain.state_dict())
    close(subcaps.fuse(model)(x_last), plain.eval()(x))
    layer = next(module for module in model.eval().modules() if isinstance(module, SubspaceConv2d))
    assert layer(x_last).is_contiguous(memory_format=torch.channels_last)
    assert subcaps.health(model, x_last).layers
    layer.reset_parameters()
