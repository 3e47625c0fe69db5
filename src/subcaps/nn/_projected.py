"""One projection per step: `with projected(model)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from subcaps.nn._layer import SharedProjection, SubspaceLayer, leaves


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
    of_weight = {id(leaf): shared for layer, shared in zip(layers, made, strict=True) for leaf in leaves(layer)}

    def after_step(optimizer: Optimizer, *_: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if id(parameter) in of_weight:
                    of_weight[id(parameter)].stepped = True

    hook = register_optimizer_step_post_hook(after_step)
    try:
        for layer, shared in zip(layers, made, strict=True):
            layer._shared = shared
        yield
        for layer, shared in zip(layers, made, strict=True):
            shared.check(layer)
    finally:
        hook.remove()
        for layer, shared_before in zip(layers, before, strict=True):
            layer._shared = shared_before
