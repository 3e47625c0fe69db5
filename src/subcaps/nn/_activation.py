"""What follows a projection: sparking, squashing, lengths as channels."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subcaps.nn import functional as F


class Spark(nn.Module):
    """Turns off capsules shorter than a learned threshold: v = max(|u| - b^2, 0) u / |u|.

    (N, types * dim, ...) -> the same shape. One b per type, b^2 = 0.25 at the start; `subcaps.calibrate` sets it from data.

    Args:
        types: Number of capsule types.
        dim: Dimension of a capsule.
        leak: Slope below the threshold. 0 is the paper's; with 0 a type whose capsules are all off gets no gradient.

    Example:
        >>> Spark(types=1, dim=2)(torch.tensor([[3.0, 4.0], [0.1, 0.1]]))
        tensor([[2.8500, 3.8000],
                [0.0000, 0.0000]], grad_fn=<_SparkBackward>)
    """

    def __init__(self, types: int, dim: int, leak: float = 0.0) -> None:
        super().__init__()
        if not 0 <= leak <= 1:
            raise ValueError(f"Spark: leak={leak}; the slope below the threshold is at least 0 and at most 1")
        self.types, self.dim, self.leak = types, dim, leak
        self.b = nn.Parameter(torch.full((types,), 0.5))

    def forward(self, u: Tensor) -> Tensor:
        check_channels("Spark", self.types, self.dim, u)
        return F.spark(u, self.b, self.leak)

    def extra_repr(self) -> str:
        return f"{self.types}, {self.dim}" + (f", leak={self.leak}" if self.leak else "")


class Squash(nn.Module):
    """Maps a capsule's length into [0, 1) and keeps its direction: v = |u|^2 / (1 + |u|^2) u / |u|.

    (N, types * dim, ...) -> the same shape. With `mean` the length stays below sqrt(dim) instead of 1.

    Args:
        dim: Dimension of a capsule.
        mean: Take the mean of the squares for |u|^2, as the authors' code does, not their sum.

    Example:
        >>> Squash(dim=2)(torch.tensor([[3.0, 4.0]]))
        tensor([[0.5769, 0.7692]])
    """

    def __init__(self, dim: int, *, mean: bool = False) -> None:
        super().__init__()
        self.dim, self.mean = dim, mean

    def forward(self, u: Tensor) -> Tensor:
        return F.squash(u, self.dim, self.mean)

    def extra_repr(self) -> str:
        return f"{self.dim}" + (", mean=True" if self.mean else "")


class AppendLengths(nn.Module):
    """Appends the length of every capsule as a channel: (N, types * dim, ...) -> (N, types * dim + types, ...).

    Projections and radial activations are odd, f(-x) = -f(x); lengths are even. What follows sees both.

    Example:
        >>> AppendLengths(types=1, dim=2)(torch.tensor([[3.0, 4.0]]))
        tensor([[3., 4., 5.]])
    """

    def __init__(self, types: int, dim: int) -> None:
        super().__init__()
        self.types, self.dim = types, dim

    def forward(self, u: Tensor) -> Tensor:
        check_channels("AppendLengths", self.types, self.dim, u)
        return torch.cat([u, F.lengths(u, self.dim)], dim=1)

    def extra_repr(self) -> str:
        return f"{self.types}, {self.dim}"


def check_channels(name: str, types: int, dim: int, u: Tensor) -> None:
    """That u is (N, types * dim, ...)."""
    if u.ndim < 2 or u.shape[1] != types * dim:
        raise ValueError(f"{name}({types}, {dim}) takes (N, {types * dim}, ...), types * dim channels; got {tuple(u.shape)}")
