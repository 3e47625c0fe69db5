"""One projection per step: `with projected(model)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from subcaps.nn._layer import SharedProjection, SubspaceLayer


@contextmanager
def projected(model: nn.Module) -> Iterator[None]:
    """Inside the block every capsule layer's projection is computed once, on entry, however often the layer is called.

    One backward pass then runs one backward of each projection. Put a forward and its backward pass into one block:

        >>> import torch, subcaps
        >>> layer = subcaps.nn.SubspaceLinear(8, types=2, dim=2)
        >>> with subcaps.projected(layer):
        ...     loss = sum(layer(torch.randn(4, 8)).square().mean() for _ in range(3))
        ...     loss.backward()

    and an evaluation loop, under `torch.no_grad()`, into one as well. To deploy a network, `fuse` it.

    The results are those without the block. The weights must not change inside; the sum of several losses is differentiated
    together, or `retain_graph=True` is given; with gradient accumulation every micro-batch has its block. Checkpointing
    needs `use_reentrant=False` and its backward pass inside the block.
    """
    layers = [module for module in model.modules() if isinstance(module, SubspaceLayer)]
    before = [layer._shared for layer in layers]
    made = [SharedProjection(layer) for layer in layers]
    try:
        for layer, shared in zip(layers, made, strict=True):
            layer._shared = shared
        yield
        for layer, shared in zip(layers, made, strict=True):
            shared.check(layer)
    finally:
        for layer, shared_before in zip(layers, before, strict=True):
            layer._shared = shared_before
