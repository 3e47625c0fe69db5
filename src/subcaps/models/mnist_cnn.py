"""A small convolutional network for 28 x 28 digits, and its capsule twin."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn


class MnistCNN(nn.Sequential):
    """Three convolutions, each with batch norm and ReLU, mean pooling, a linear classifier: (N, 1, 28, 28) -> (N, 10)."""

    def __init__(self, width: int = 32, classes: int = 10) -> None:
        layers: list[tuple[str, nn.Module]] = []
        channels = 1
        for i, out in enumerate((width, 2 * width, 2 * width), start=1):
            layers += [
                (f"conv{i}", nn.Conv2d(channels, out, 3, padding=1, bias=False)),
                (f"norm{i}", nn.BatchNorm2d(out)),
                (f"relu{i}", nn.ReLU()),
            ]
            if i < 3:
                layers.append((f"pool{i}", nn.MaxPool2d(2)))
            channels = out
        layers += [("pool", nn.AdaptiveAvgPool2d(1)), ("flatten", nn.Flatten()), ("head", nn.Linear(channels, classes))]
        super().__init__(OrderedDict(layers))
