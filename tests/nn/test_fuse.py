"""`fuse`: a network of plain torch layers that answers the same, here, exported and in onnxruntime."""

from __future__ import annotations

import copy
import io
import pickle
import sys

import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import subcaps
from subcaps.nn import (
    AppendLengths,
    CapsuleLength,
    CapsuleMeanPool2d,
    LiftLinear,
    Spark,
    Squash,
    SubspaceConv2d,
    SubspaceLayer,
    SubspaceLinear,
)

from .reference import CNN, Capsules, assert_near, images, layers, randomise

# torch says so of any convolution
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")

exports = pytest.mark.filterwarnings(  # torch 2.11's export and load, of themselves
    "ignore:.isinstance.treespec, LeafSpec.. is deprecated:FutureWarning", "ignore:The given buffer is not writable:UserWarning"
)

close = torch.testing.assert_close

PLAIN = [nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d]  # by rank


def every_module():
    """A network of all there is."""
    torch.manual_seed(0)
    return randomise(
        nn.Sequential(
            SubspaceConv2d(3, 4, 2, 3, bias="type", gain=True, norm=True, activation=Spark(4, 2, leak=0.2)),
            AppendLengths(4, 2),
            SubspaceConv2d(12, 6, 1, 3, bias=True, activation=Squash(1)),
            SubspaceConv2d(6, 4, 2, 1, activation=Squash(2, mean=True)),
            CapsuleMeanPool2d(2),
            nn.Flatten(),
            SubspaceLinear(32, 4, 3, norm=True, activation=Spark(4, 3)),
            SubspaceLinear(12, 5, 3, activation=CapsuleLength(5, 3, scale=4.0, offset=1.0)),
        )
    )


activations = st.sampled_from(
    [lambda types, dim: None, Spark, lambda types, dim: Spark(types, dim, leak=0.3), lambda types, dim: Squash(dim)]
)


@given(drawn=layers(), make=activations)
def test_a_layer_becomes_the_plain_layer_of_its_shape(drawn, make):
    layer, x = drawn
    layer.activation = make(layer.types, layer.dim)
    fused = subcaps.fuse(layer)
    (plain,) = (module for module in fused.modules() if hasattr(module, "weight"))
    assert isinstance(plain, PLAIN[x.ndim - 2])
    assert plain.weight.shape == layer.weight.shape
    assert not fused.training
    with torch.no_grad():
        assert_near(fused(x), layer.eval()(x))


@pytest.mark.parametrize("make", [Capsules, every_module])
def test_a_network_answers_the_same(make):
    model = randomise(make())
    fused = subcaps.fuse(model)
    assert not any(isinstance(module, SubspaceLayer) for module in fused.modules())
    assert_near(fused(images()), model.eval()(images()))


@given(shape=st.lists(st.integers(1, 3), max_size=3), make=activations, norm=st.booleans())
def test_vectors_keep_their_leading_dimensions(shape, make, norm):
    layer = randomise(SubspaceLinear(6, 2, 3, norm=norm, activation=make(2, 3)))
    model = nn.Sequential(nn.Identity(), layer).eval()
    x = torch.randn(*shape, 6)
    for fused in (subcaps.fuse(model), subcaps.fuse(layer), subcaps.fuse(model, lift=["1"])):
        assert_near(fused(x), model(x))


@pytest.mark.parametrize("norm", [False, True])
def test_the_layers_have_the_shapes_of_the_cnn(norm):
    """A norm folds into the bias, which a convolution before a batch norm has not."""
    cnn = CNN()
    model = copy.deepcopy(cnn)
    subcaps.convert(model, {"conv?": dict(dim=2, gain=True, norm=norm), "fc": dict(dim=5)})
    fused = subcaps.fuse(model)
    for name, module in cnn.named_modules():
        assert type(fused.get_submodule(name)) is type(module)
        if name:
            expected = str(module).replace(", bias=False", "") if norm else str(module)
            assert str(fused.get_submodule(name)) == expected
    shapes = {name: value.shape for name, value in fused.state_dict().items()}
    shift = {"conv1.bias": torch.Size([8])} if norm else {}
    assert shapes == {name: value.shape for name, value in cnn.state_dict().items()} | shift


def test_the_original_is_left_as_it_is():
    model = Capsules()
    state = copy.deepcopy(model.state_dict())
    with subcaps.projected(model):
        fused = subcaps.fuse(model)
    with torch.no_grad():
        for value in fused.state_dict().values():
            value.zero_()
    close(model.state_dict(), state)
    assert all(module.training for module in model.modules())
    assert isinstance(model.conv, SubspaceConv2d)


def test_a_shared_layer_stays_shared():
    fused = subcaps.fuse(Capsules())
    assert fused.pair is fused.again


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_precision_is_kept(dtype):
    model = every_module().to(dtype).eval()
    fused = subcaps.fuse(model)
    assert {p.dtype for p in fused.parameters()} == {dtype}
    x = images().to(dtype)
    assert_near(fused(x), model(x), {torch.float64: 1e-12, torch.bfloat16: 0.1}[dtype])


def test_a_parametrised_layer_is_fused_as_it_stands():
    model = nn.Sequential(nn.utils.parametrizations.weight_norm(SubspaceLinear(8, 2, 2))).eval()
    x = torch.randn(3, 8)
    assert type(subcaps.fuse(model)[0]) is nn.Linear
    assert_near(subcaps.fuse(model)(x), model(x))


# lift


@given(types=st.integers(1, 4), dim=st.integers(1, 4), spark=st.booleans(), norm=st.booleans())
def test_lift_is_kept_where_it_is_asked_for(types, dim, spark, norm):
    layer = randomise(SubspaceLinear(7, types, dim, norm=norm, gain=True, activation=Spark(types, dim) if spark else None))
    model = nn.Sequential(SubspaceLinear(5, 7, 1), layer).eval()
    fused = subcaps.fuse(model, lift=["1"])
    assert type(fused[0]) is nn.Linear
    assert type(fused[1]) is LiftLinear
    close(fused(torch.ones(3, 5)), model(torch.ones(3, 5)))
    u, index = torch.randn(2, 3, types * dim), torch.arange(3) % types
    close(fused[1].lift(u), layer.lift(u))
    close(fused[1].lift(u[0, :, :dim], index), layer.lift(u[0, :, :dim], index))
    again = copy.deepcopy(fused)
    nn.init.zeros_(again[1].P_c)
    again.load_state_dict(fused.state_dict())
    close(again[1].lift(u), layer.lift(u))


@pytest.mark.parametrize("name", ["conv", "nothing", "head.activation"])
def test_lift_of_another_layer_is_refused(name):
    with pytest.raises(ValueError, match=f"lift='{name}' names no SubspaceLinear of the model; it has 'head'"):
        subcaps.fuse(Capsules(), lift=[name])


# where subcaps is not installed


def plain_network():
    """Capsules without activations of ours."""
    model = CNN()
    leaky = dict(activation=lambda types, dim: nn.LeakyReLU(0.2))
    subcaps.convert(
        model, {"conv?": dict(dim=2, gain=True, norm=True) | leaky, "bn?": "drop", nn.ReLU: "drop", "fc": dict(dim=5) | leaky}
    )
    return randomise(model)


def test_without_our_activations_nothing_of_subcaps_is_left():
    assert b"subcaps" not in pickle.dumps(subcaps.fuse(plain_network()))


def test_of_subcaps_only_activations_are_left():
    for module in subcaps.fuse(every_module()).modules():
        if hasattr(module, "weight"):
            assert type(module).__module__.startswith("torch.nn")


@pytest.fixture
def without_subcaps(monkeypatch):
    """Forbids to import it. Call it when the network is exported."""

    def forbid():
        for name in [name for name in sys.modules if name.split(".")[0] == "subcaps"]:
            monkeypatch.setitem(sys.modules, name, None)

    return forbid


@exports
@pytest.mark.parametrize("make", [every_module, Capsules, plain_network])
def test_it_is_exported_for_any_batch_and_runs_without_subcaps(make, without_subcaps):
    fused = subcaps.fuse(randomise(make()))
    expected = fused(images(7))
    exported = torch.export.export(fused, (images(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    file = io.BytesIO()
    torch.export.save(exported, file)
    file.seek(0)
    without_subcaps()
    loaded = torch.export.load(file)
    for program in (loaded, loaded.run_decompositions()):
        assert not [node for node in program.graph.nodes if "subcaps" in str(node.target)]
        assert_near(program.module()(images(7)), expected)


@exports
@pytest.mark.parametrize("make", [every_module, Capsules])
def test_an_unfused_network_is_exported_too(make):
    model = randomise(make()).eval()
    exported = torch.export.export(model, (images(),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    assert_near(exported.module()(images(7)), model(images(7)))


@exports
@pytest.mark.parametrize("make", [every_module, plain_network])
def test_onnxruntime_gives_the_same_numbers(make, tmp_path):
    fused = subcaps.fuse(make())
    path = str(tmp_path / "network.onnx")
    torch.onnx.export(fused, (images(),), path, dynamo=True, dynamic_shapes=({0: torch.export.Dim("batch")},), verbose=False)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for batch in (4, 7):
        (result,) = session.run(None, {session.get_inputs()[0].name: images(batch).numpy()})
        assert_near(torch.from_numpy(result), fused(images(batch)).detach())
