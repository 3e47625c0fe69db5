"""The statistics a capsule layer centres and scales its input with."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class InputNorm(nn.Module):
    """Mean and deviation of each input channel; the layer folds them into its weight and bias, so x is only read.

    In training they are the batch's own, with their gradient, and running averages are kept; in evaluation they are the
    averages. The buffers are named as in torch's batch norm. Averages gathered under dropout, or under other weights, are
    wrong without it: `subcaps.update_norms` takes them again.
    """

    eps = 1e-5
    running_mean: Tensor
    running_var: Tensor
    num_batches_tracked: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.channels = channels
        self.momentum: float | None = 0.1  # None: the plain mean of all batches
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def reset_running_stats(self) -> None:
        """Forget all batches."""
        self.running_mean.zero_()
        self.running_var.fill_(1)
        self.num_batches_tracked.zero_()

    def forward(self, x: Tensor | None, rows: slice | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(mean, deviation), of the rows of x, (N, channels, ...), or the running averages where x is None."""
        if x is None:
            return self.running_mean, (self.running_var + self.eps).sqrt()
        x = x if rows is None else x[rows]
        count = x.numel() // x.shape[1]
        if count < 2:
            raise ValueError(
                f"norm=True: a batch of shape {tuple(x.shape)} has {count} value per channel, which has no deviation; "
                "use more rows, or `model.eval()`"
            )
        over = [i for i in range(x.ndim) if i != 1]
        with torch.autocast(x.device.type, enabled=False):
            var, mean = torch.var_mean(x.float() if x.dtype in (torch.bfloat16, torch.float16) else x, over, correction=0)
        self._remember(mean.detach(), var.detach() * (count / (count - 1)))
        return mean, (var + self.eps).sqrt()

    @torch.no_grad()
    def _remember(self, mean: Tensor, var: Tensor) -> None:
        self.num_batches_tracked.add_(1)
        share = self.momentum if self.momentum is not None else 1 / self.num_batches_tracked
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(var.to(self.running_var.dtype), share)

    def extra_repr(self) -> str:
        return f"{self.channels}"
