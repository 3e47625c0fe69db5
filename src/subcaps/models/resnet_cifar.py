"""The residual networks of He et al. (2016) for 32 x 32 images: depth 20, 32, 44, 56 or 110 (6 n + 2)."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Two 3 x 3 convolutions with batch norm, added to their input.

    Where the shape changes the input is subsampled and its missing channels are zeros (their option A: no parameters).
    """

    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.relu2 = nn.ReLU()
        self.stride, self.missing = stride, out - channels

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu1(self.bn1(self.conv1(x)))))
        if self.stride > 1 or self.missing:
            x = F.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.missing // 2, self.missing - self.missing // 2))
        return self.relu2(x + y)


class ResNetCifar(nn.Module):
    """(N, 3, 32, 32) -> (N, classes): a convolution, three stages of n blocks with 16, 32 and 64 channels, mean, linear.

    Example:
        >>> sum(parameter.numel() for parameter in ResNetCifar(20).parameters())
        269722
    """

    def __init__(self, depth: int, classes: int = 10, width: int = 16) -> None:
        super().__init__()
        if depth < 8 or (depth - 2) % 6:
            raise ValueError(f"ResNetCifar: depth={depth} is not 6 n + 2; choose for instance 20, 32, 44, 56 or 110")
        self.depth = depth
        self.conv1 = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        blocks = (depth - 2) // 6
        self.layer1 = _stage(width, width, 1, blocks)
        self.layer2 = _stage(width, 2 * width, 2, blocks)
        self.layer3 = _stage(2 * width, 4 * width, 2, blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(4 * width, classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(self.pool(x).flatten(1))


def _stage(channels: int, out: int, stride: int, blocks: int) -> nn.Sequential:
    return nn.Sequential(Block(channels, out, stride), *(Block(out, out, 1) for _ in range(blocks - 1)))
