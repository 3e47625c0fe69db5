"""Networks and blocks whose steps are timed: each as a CNN, and as the SCN of the same shapes that `convert` makes of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn

from subcaps.models import ResNetCifar
from subcaps.nn import CapsuleLength, Spark, convert


class Case(NamedTuple):
    """A network, the shape of its input, and what `convert` is told."""

    name: str
    build: Callable[[], nn.Module]
    batch: int
    image: tuple[int, int, int]
    patterns: dict[str, Any]

    def twin(self) -> nn.Module:
        """The CNN."""
        return self.build()

    def scn(self) -> nn.Module:
        """The SCN of the same layer shapes."""
        model = self.build()
        convert(model, self.patterns)
        return model


def svhn_discriminator(width: int = 64) -> nn.Sequential:
    """The discriminator of Improved GAN for SVHN: nine convolutions, mean pool, a linear classifier."""
    layers: list[nn.Module] = [nn.Dropout(0.2)]
    channels = 3
    for i, (out, kernel, stride, padding) in enumerate(
        [
            (1, 3, 1, 1),
            (1, 3, 1, 1),
            (1, 3, 2, 1),
            (2, 3, 1, 1),
            (2, 3, 1, 1),
            (2, 3, 2, 1),
            (2, 3, 1, 0),
            (2, 1, 1, 0),
            (2, 1, 1, 0),
        ]
    ):
        layers.append(
            nn.Sequential(
                nn.Conv2d(channels, out * width, kernel, stride, padding, bias=False),
                nn.BatchNorm2d(out * width),
                nn.LeakyReLU(0.2),
            )
        )
        channels = out * width
        if i in (2, 5):
            layers.append(nn.Dropout(0.5))
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))


def resnet34_last_block(channels: int = 512) -> nn.Sequential:
    """Two 3 x 3 convolutions of 512 channels on 7 x 7 positions, without the residual connection, which the paper drops."""
    return nn.Sequential(
        *(
            nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
            for _ in range(2)
        )
    )


def _capsules(dim: int) -> dict[str, Any]:
    return dict(dim=dim, norm=True, activation=lambda types, dim: Spark(types, dim, leak=0.2))


def _head(dim: int) -> dict[str, Any]:
    return dict(types=10, dim=dim, activation=lambda types, dim: CapsuleLength(types, dim, scale=4.0))


SVHN = {f"{i}.{part}": option for i in (9, 10, 11) for part, option in (("0", _capsules(2)), ("1", "drop"), ("2", "drop"))}
RESNET = {"layer3.2.conv*": _capsules(2), "layer3.2.bn*": "drop", "layer3.2.relu1": "drop", "fc": _head(4)}
BLOCK = {f"{i}.{part}": option for i in (0, 1) for part, option in (("0", _capsules(2)), ("1", "drop"), ("2", "drop"))}

CASES = (
    Case("svhn discriminator", svhn_discriminator, 300, (3, 32, 32), SVHN | {"14": _head(4)}),
    Case("resnet20", lambda: ResNetCifar(20), 128, (3, 32, 32), RESNET),
    Case("resnet34 last block", resnet34_last_block, 64, (512, 7, 7), BLOCK),
)
QUICK = (
    Case("svhn discriminator", lambda: svhn_discriminator(4), 4, (3, 32, 32), SVHN | {"14": _head(4)}),
    Case("resnet8", lambda: ResNetCifar(8), 4, (3, 32, 32), {"fc": _head(4)}),
)
