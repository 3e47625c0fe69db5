"""What the tests of `nn` draw and compare with: layers of every kind, their answers written out, a small CNN."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st
from projection.reference import seeds
from torch import Tensor, nn

from subcaps import polar
from subcaps.nn import CapsuleLength, Spark, SubspaceConv1d, SubspaceConv2d, SubspaceConv3d, SubspaceLinear

KINDS = [SubspaceLinear, SubspaceConv1d, SubspaceConv2d, SubspaceConv3d]  # by the rank of their space
BATCH = 4

# Of the largest entry: what a different order of summation may change.
ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-12}

torch_compiles = "ignore:.*autograd.*Function.*should not be instantiated:DeprecationWarning"  # torch 2.11's compiler, of all


def assert_near(result: Tensor, expected: Tensor, share: float | None = None) -> None:
    """Within a share of the largest entry."""
    assert result.shape == expected.shape
    share = ROUNDING[expected.dtype] if share is None else share
    error, largest = (result - expected).abs().max().item(), expected.abs().max().item()
    assert error <= share * largest, f"off by {error:.1e} where the largest entry is {largest:.1e}"


def randomise(layer: nn.Module) -> nn.Module:
    """Parameters and running averages as training leaves them, no two alike."""
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0.5)
        for name, buffer in layer.named_buffers():
            if name.endswith("running_mean"):
                buffer.normal_()
            if name.endswith("running_var"):
                buffer.uniform_(0.5, 2)
    return layer


@st.composite
def layers(draw, **fixed):
    """A capsule layer of any kind, shape and options, at random, and a batch for it. `fixed` options are not drawn."""

    def option(name, strategy):
        return fixed[name] if name in fixed else draw(strategy)

    def per_axis(strategy):
        return draw(st.one_of(strategy, st.tuples(*[strategy] * rank)))

    rank = option("rank", st.integers(0, 3))
    groups = draw(st.integers(1, 2)) if rank else 1
    width = groups * draw(st.integers(1, 3))
    geometry, taps = {}, 1
    if rank:
        kernel_size = per_axis(st.integers(1, 3))
        taps = kernel_size**rank if isinstance(kernel_size, int) else math.prod(kernel_size)
        padding = option("padding", st.one_of(st.sampled_from(["same", "valid"]), st.integers(0, 2)))
        geometry = dict(
            kernel_size=kernel_size,
            stride=1 if padding == "same" else per_axis(st.integers(1, 2)),
            padding=padding,
            dilation=per_axis(st.integers(1, 2)),
            groups=groups,
            padding_mode=draw(st.sampled_from(["zeros", "reflect", "replicate", "circular"])),
        )
    options = dict(
        bias=option("bias", st.sampled_from([False, True, "type"])),
        gain=option("gain", st.booleans()),
        norm=option("norm", st.booleans()),
        init_std=option("init_std", st.sampled_from([None, 0.05])),
    )
    dim = draw(st.integers(1, min(4, width // groups * taps)))
    torch.manual_seed(draw(seeds))
    layer = KINDS[rank](width, types=groups * draw(st.integers(1, 2)), dim=dim, **geometry, **options)
    dtype = option("dtype", st.sampled_from([torch.float32, torch.float64]))
    x = 1 + torch.randn(BATCH, width, *[5] * rank, dtype=dtype)
    return randomise(layer).to(dtype), x


def as_written(layer: nn.Module, x: Tensor, rows: slice | Tensor | None = None) -> Tensor:
    """What the layer answers before its activation, a step at a time: pad, centre and scale, project, gain and bias."""
    rank = x.ndim - 2
    P_c = polar(layer.weight.reshape(layer.types, layer.dim, -1).mT).mT.reshape(layer.weight.shape)
    padded = x
    if rank:
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        padded = nn.functional.pad(x, layer._reversed_padding_repeated_twice, mode)
    if layer.norm is not None:
        mean, var = layer.norm.running_mean, layer.norm.running_var
        if layer.training:
            seen = (x if rows is None else x[rows]).transpose(0, 1).flatten(1)  # (channels, values)
            mean, var = seen.mean(1), seen.var(1, correction=0)
        shape = (-1, *[1] * rank)
        padded = (padded - mean.view(shape)) / (var + layer.norm.eps).sqrt().view(shape)
    if rank:
        convolve = [nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d][rank - 1]
        u = convolve(padded, P_c, None, layer.stride, 0, layer.dilation, layer.groups)
    else:
        u = nn.functional.linear(padded, P_c)
    u = u.unflatten(1, (layer.types, layer.dim))  # (N, types, dim, ...)
    if layer.gain is not None:
        u = u * layer.gain.view(-1, 1, *[1] * rank)
    if layer.bias is not None:
        u = u + layer.bias.view(layer.types, -1, *[1] * rank)  # one number per type, or dim of them
    return u.flatten(1, 2)


class CNN(nn.Module):
    """The network that is converted: two convolutions with batch norm and ReLU, one with a bias, and a linear classifier."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1)
        self.bn2 = nn.BatchNorm2d(2 * width)
        self.relu2 = nn.ReLU()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(2 * width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu1(self.bn1(self.conv1(x)))
        x = self.relu2(self.bn2(self.conv2(x)))
        return self.fc(self.pool(x).flatten(1))


def images(batch: int = BATCH, size: int = 8, seed: int = 0) -> Tensor:
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(seed))


class Capsules(nn.Module):
    """Capsules of 1, 2 and 3 dimensions; `pair` is called twice in a forward pass, once by its other name."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = SubspaceConv2d(3, 4, 2, 3, padding=1, gain=True, norm=True, activation=Spark(4, 2, leak=0.2))
        self.pair = SubspaceConv2d(8, 8, 1, 3, padding=1, bias=True, norm=True)
        self.again = self.pair
        self.head = SubspaceLinear(8, 5, 3, bias="type", activation=CapsuleLength(5, 3, scale=4.0))

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(torch.relu(self.pair(self.conv(x))))
        return self.head(x.mean((2, 3)))
