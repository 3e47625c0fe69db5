"""The state of a network's capsules: are the subspaces well conditioned and distinct, are the capsules alive?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from subcaps.nn import Spark, SubspaceLayer, capsules


@dataclass(frozen=True)
class LayerHealth:
    """One capsule layer.

    `condition` is the worst condition number of a type's W and `orthonormality` the largest entry of Q^T Q - I. `overlap` is the
    mean squared cosine of the principal angles between two types' subspaces: 1 where they are the same, and `random_overlap`,
    dim / d, where they are random. With a batch, `on` is the share of capsules above their threshold and `dead` the number of
    types none of whose capsules is (None without a `Spark`), `length` the mean length.
    """

    name: str
    types: int
    dim: int
    condition: float
    orthonormality: float
    overlap: float
    random_overlap: float
    length: float | None = None
    on: float | None = None
    dead: int | None = None


@dataclass(frozen=True)
class Health:
    """The capsule layers of a network; prints as a table."""

    layers: tuple[LayerHealth, ...]

    def __str__(self) -> str:
        head = ["layer", "types x dim", "condition", "|Q'Q - I|", "overlap (random)", "length", "on", "dead types"]
        cells = [head] + [
            [
                layer.name,
                f"{layer.types} x {layer.dim}",
                f"{layer.condition:.3g}",
                f"{layer.orthonormality:.0e}",
                f"{layer.overlap:.4f} ({layer.random_overlap:.4f})",
                "-" if layer.length is None else f"{layer.length:.3g}",
                "-" if layer.on is None else f"{100 * layer.on:.0f}%",
                "-" if layer.dead is None else str(layer.dead),
            ]
            for layer in self.layers
        ]
        widths = [max(len(line[i]) for line in cells) for i in range(len(head))]
        return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in cells)


@torch.no_grad()
def health(model: nn.Module, batch: Any = None) -> Health:
    """The state of every capsule layer of `model`, in numbers that say what is wrong when capsules do not learn.

    Without a batch only the weights are looked at. With one the network runs on it as it is, in its current mode.

    Example:
        >>> import subcaps
        >>> net = nn.Sequential(subcaps.nn.SubspaceConv2d(3, types=4, dim=2, kernel_size=3))
        >>> subcaps.health(net).layers[0].condition < 1.001
        True
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, SubspaceLayer)}
    if not layers:
        raise ValueError("health: the model has no capsule layer")
    answers = {} if batch is None else capsules(model, batch)
    return Health(tuple(_layer(name, layer, answers.get(name)) for name, layer in layers.items()))


def _layer(name: str, layer: SubspaceLayer, u: Tensor | None) -> LayerHealth:
    W = layer.weight.detach().reshape(layer.types, layer.dim, -1).mT.cpu().double()
    values = torch.linalg.svdvals(W)
    Q = layer.subspaces().detach().cpu().double()
    d = Q.shape[1]
    flat = Q.mT.reshape(-1, d)
    cosines = (flat @ flat.mT).view(layer.types, layer.dim, layer.types, layer.dim).square().sum((1, 3)) / layer.dim
    identity = torch.eye(layer.dim, dtype=Q.dtype, device=Q.device)
    types = layer.types
    overlap = (cosines.sum() - cosines.diagonal().sum()) / max(types * (types - 1), 1)
    on = dead = length = None
    if u is not None:
        linear = isinstance(layer, nn.Linear)  # (..., types, dim); a convolution's are (N, types, dim, ...)
        lengths = torch.linalg.vector_norm(u.float(), dim=-1 if linear else 2)
        length = lengths.mean().item()
        spark = next((module for module in layer.modules() if isinstance(module, Spark)), None)
        if spark is not None:
            by_type = lengths.movedim(-1 if linear else 1, 0).flatten(1)
            alive = by_type > spark.b.float().square()[:, None]
            on, dead = alive.float().mean().item(), int((~alive.any(1)).sum())
    return LayerHealth(
        name,
        types,
        layer.dim,
        torch.where(values[:, -1] > 0, values[:, 0] / values[:, -1], torch.inf).amax().item(),
        (Q.mT @ Q - identity).abs().amax().item(),
        overlap.item(),
        layer.dim / d,
        length,
        on,
        dead,
    )
