"""Setting from data what data should set: thresholds before training, running statistics before an evaluation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from subcaps.nn import functional as F
from subcaps.nn._activation import Spark
from subcaps.nn._layer import SubspaceLayer
from subcaps.nn._norm import InputNorm


@torch.no_grad()
def calibrate(model: nn.Module, batch: Any, active: float = 0.5) -> None:
    """Set the thresholds of every `Spark` from data, per type, so that a share `active` of its capsules is on.

    Layer by layer in one forward pass, each seeing what the layers before it answer once set. Dropout is off; norms take
    the batch's own statistics and keep their running ones.

    Example:
        >>> import subcaps
        >>> net = subcaps.nn.SubspaceLinear(8, types=2, dim=2, activation=subcaps.nn.Spark(2, 2))
        >>> x = torch.randn(100, 8)
        >>> subcaps.calibrate(net, x, active=0.25)
        >>> (net(x).view(100, 2, 2).norm(dim=2) > 0).float().mean()
        tensor(0.2500)
    """
    if not 0 < active < 1:
        raise ValueError(f"calibrate: active={active}; the share of capsules that are on is between 0 and 1")
    sparks = [module for module in model.modules() if isinstance(module, Spark)]
    if not sparks:
        raise ValueError("calibrate: the model has no Spark, so there is no threshold to set")
    called: set[int] = set()

    def set_threshold(spark: nn.Module, args: tuple[Any, ...]) -> None:
        assert isinstance(spark, Spark)
        lengths = F.lengths(args[0].float(), spark.dim).transpose(0, 1).flatten(1)  # (types, all positions)
        count = lengths.shape[1]
        off = min(max(round((1 - active) * count), 1), count)
        below, above = (lengths.kthvalue(k, dim=1).values for k in (off, min(off + 1, count)))
        spark.b.copy_(((below + above) / 2).sqrt())
        called.add(id(spark))

    handles = [spark.register_forward_pre_hook(set_threshold) for spark in sparks]
    kept = [(buffer, buffer.clone()) for norm in _norms(model) for buffer in norm.buffers(recurse=False)]
    try:
        with _measuring(model):
            model(batch)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in kept:
            buffer.copy_(value)
    missed = [name for name, module in model.named_modules() if isinstance(module, Spark) and id(module) not in called]
    if missed:
        raise RuntimeError(f"calibrate: {', '.join(missed)} took no part in the forward pass and keep their thresholds")


@torch.no_grad()
def update_norms(model: nn.Module, batches: Iterable[Any]) -> None:
    """Take the running statistics of every norm again: of `norm=True` layers and of torch's batch norms.

    They become the plain mean over `batches` (tensors, or tuples whose first entry is the input), without dropout. Averages
    gathered under dropout, or a network whose weights were averaged, need this before an evaluation.

    Example:
        >>> import subcaps
        >>> net = subcaps.nn.SubspaceLinear(8, types=2, dim=2, norm=True)
        >>> subcaps.update_norms(net, [torch.randn(100, 8) + 5])
        >>> net.norm.running_mean.round()
        tensor([5., 5., 5., 5., 5., 5., 5., 5.])
    """
    norms = _norms(model)
    if not norms:
        return
    stream = iter(batches)
    first = next(stream, None)
    if first is None:
        raise ValueError("update_norms: no batches, so there are no statistics")
    momenta = [norm.momentum for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            norm.momentum = None  # the plain mean
        with _measuring(model):
            for batch in itertools.chain([first], stream):
                model(batch[0] if isinstance(batch, (tuple, list)) else batch)
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum


def _norms(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if isinstance(module, InputNorm) or (isinstance(module, _BatchNorm) and module.track_running_stats)
    ]


@contextmanager
def _measuring(model: nn.Module) -> Iterator[None]:
    """Norms on the batch's statistics, everything else, dropout first of all, as in evaluation."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        for module in model.modules():
            if isinstance(module, (_BatchNorm, InputNorm)) or (isinstance(module, SubspaceLayer) and module.norm is not None):
                module.training = True
        yield
    finally:
        for module, training in modes:
            module.training = training
