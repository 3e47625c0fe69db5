"""What reads capsules: their mean over a field, their lengths as scores, the longest of them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from subcaps.nn import functional as F
from subcaps.nn._activation import check_channels


class CapsuleMeanPool2d(nn.AvgPool2d):
    """The mean capsule of each type over a window: the average pooling of its entries.

    Takes the arguments of `torch.nn.AvgPool2d`, and is it: the name says that capsules keep their type and their entries.

    Example:
        >>> CapsuleMeanPool2d(6)(torch.zeros(1, 128, 6, 6)).shape
        torch.Size([1, 128, 1, 1])
    """


class CapsuleLength(nn.Module):
    """The length of each capsule as its type's score: (N, types * dim) -> (N, types).

    Args:
        types: Number of capsule types, the classes.
        dim: Dimension of a capsule.
        scale: Start of a learned factor on the lengths; None: none, the paper's reading.
        offset: Start of a learned offset; None: none. Softmax does not see an offset that all types share.
        per_type: Learn a scale and an offset for every type. Then the longest capsule need not have the highest score.

    Example:
        >>> CapsuleLength(types=2, dim=2)(torch.tensor([[3.0, 4.0, 0.0, 1.0]]))
        tensor([[5., 1.]])
    """

    def __init__(
        self, types: int, dim: int, scale: float | None = None, offset: float | None = None, per_type: bool = False
    ) -> None:
        super().__init__()
        if per_type and scale is None and offset is None:
            raise ValueError(
                "CapsuleLength: per_type=True, but neither scale= nor offset= is given, so nothing is learned per type"
            )
        self.types, self.dim, self.per_type = types, dim, per_type
        shape = (types,) if per_type else ()
        self.scale = None if scale is None else nn.Parameter(torch.full(shape, float(scale)))
        self.offset = None if offset is None else nn.Parameter(torch.full(shape, float(offset)))

    def forward(self, u: Tensor) -> Tensor:
        check_channels("CapsuleLength", self.types, self.dim, u)
        scores = F.lengths(u.float() if F.is_half(u) else u, self.dim)  # scores go into a softmax
        if self.scale is not None:
            scores = scores * self.scale.view(-1, *[1] * (scores.ndim - 2))
        if self.offset is not None:
            scores = scores + self.offset.view(-1, *[1] * (scores.ndim - 2))
        return scores

    def extra_repr(self) -> str:
        learned = [name for name in ("scale", "offset") if getattr(self, name) is not None]
        text = f"{self.types}, {self.dim}" + "".join(f", learned {name}" for name in learned)
        return text + (", per_type=True" if self.per_type else "")


class CapsuleSelect(nn.Module):
    """The longest capsule and which type it is: (N, types * dim) -> ((N, dim), (N,)).

    Example:
        >>> CapsuleSelect(types=2, dim=2)(torch.tensor([[3.0, 4.0, 0.0, 1.0]]))
        (tensor([[3., 4.]]), tensor([0]))
    """

    def __init__(self, types: int, dim: int) -> None:
        super().__init__()
        self.types, self.dim = types, dim

    def forward(self, u: Tensor) -> tuple[Tensor, Tensor]:
        check_channels("CapsuleSelect", self.types, self.dim, u)
        if u.ndim != 2:
            raise ValueError(f"CapsuleSelect takes (N, {self.types * self.dim}); got {tuple(u.shape)}")
        index = F.lengths(u, self.dim).argmax(1)
        capsules = F.as_capsules(u, self.dim)
        return capsules.take_along_dim(index[:, None, None], 1).squeeze(1), index

    def extra_repr(self) -> str:
        return f"{self.types}, {self.dim}"
