"""Subspace capsule convolutions: every position's patch is projected onto the subspace of every type.

There is no transposed form. An output of a transposed convolution sees only some of the taps, so it is no projection of
anything; upsample, then use these.
"""

from __future__ import annotations

import math
from typing import Any

import torch  # noqa: F401  (the examples use it)
from torch import Tensor, nn

from subcaps.nn._layer import Bias, Rows, SubspaceLayer, check


class _SubspaceConv(SubspaceLayer):
    _rank: int  # of space

    def __init__(
        self, in_channels: int, types: int, dim: int, kernel_size: Any, stride: Any = 1, padding: Any = 0, dilation: Any = 1,
        groups: int = 1, padding_mode: str = "zeros", bias: Bias = False, gain: bool = False, norm: bool = False,
        init_std: float | None = None, activation: nn.Module | None = None,
    ) -> None:  # fmt: skip
        name = type(self).__name__
        taps = kernel_size**self._rank if isinstance(kernel_size, int) else math.prod(kernel_size)
        if groups < 1 or in_channels % groups or types % groups:
            raise ValueError(
                f"{name}: groups={groups} must divide in_channels={in_channels} and types={types}; types split evenly over groups"
            )
        area = "in_channels" + ("/groups" if groups > 1 else "") + "*kernel area"
        check(name, types, dim, in_channels // groups * taps, area, bias, activation)
        super().__init__(
            in_channels,
            types * dim,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias=False,
            padding_mode=padding_mode,
        )
        self._set_up(types, dim, bias, gain, norm, init_std, activation, in_channels)

    def capsules(self, x: Tensor, rows: Rows = None) -> Tensor:
        """What the layer answers before its activation."""
        if x.ndim != self._rank + 2:
            shape = ", ".join(["N", str(self.in_channels), *"DHW"[3 - self._rank :]])
            raise ValueError(f"{type(self).__name__} takes a batch ({shape}); got {tuple(x.shape)}")
        weight, bias = self.folded(self._statistics_from(x), rows)
        return self._conv_forward(x, weight, bias)  # type: ignore[operator]

    def forward(self, x: Tensor, rows: Rows = None) -> Tensor:
        """`rows`: the rows of the batch that the norm's statistics are taken from; None: all."""
        u = self.capsules(x, rows)
        return u if self.activation is None else self.activation(u)


class SubspaceConv1d(_SubspaceConv, nn.Conv1d):
    """A 1-D subspace capsule convolution: (N, in_channels, L) -> (N, types * dim, L'), type-major.

    The arguments are those of `SubspaceConv2d`.

    Example:
        >>> SubspaceConv1d(3, types=4, dim=2, kernel_size=5)(torch.zeros(1, 3, 9)).shape
        torch.Size([1, 8, 5])
    """

    _rank = 1


class SubspaceConv2d(_SubspaceConv, nn.Conv2d):
    """A 2-D subspace capsule convolution: (N, in_channels, H, W) -> (N, types * dim, H', W'), type-major.

    Every patch of in_channels * kernel area numbers is projected onto the subspace of every type, spanned by the type's `dim`
    rows of `weight`. The weight has the shape of the plain convolution's, so a plain network's checkpoint loads.

    Args:
        in_channels: Channels of the input.
        types: Number of capsule types. The layer has types * dim output channels.
        dim: Dimension of a capsule and of its subspace, at most in_channels / groups * kernel area.
        kernel_size: As in `torch.nn.Conv2d`, like `stride`, `padding`, `dilation`, `groups` (types split evenly over them)
            and `padding_mode`.
        bias: False, True (a number per channel) or `"type"` (a number per type, as in the authors' code).
        gain: Learn a factor on the projection of every type.
        norm: Project the input minus its channels' mean over their deviation. In training the batch's own, with their
            gradient; in evaluation running averages.
        init_std: Deviation of an entry of W at the start; None: W starts with orthonormal rows. The function is the same, the
            speed at which Adam turns the subspaces is not.
        activation: A module applied to the capsules, for instance `Spark(types, dim)`.

    Example:
        >>> SubspaceConv2d(3, types=32, dim=2, kernel_size=3, padding=1)(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 64, 8, 8])
    """

    _rank = 2


class SubspaceConv3d(_SubspaceConv, nn.Conv3d):
    """A 3-D subspace capsule convolution: (N, in_channels, D, H, W) -> (N, types * dim, D', H', W'), type-major.

    The arguments are those of `SubspaceConv2d`.

    Example:
        >>> SubspaceConv3d(3, types=4, dim=2, kernel_size=3)(torch.zeros(1, 3, 5, 5, 5)).shape
        torch.Size([1, 8, 3, 3, 3])
    """

    _rank = 3
