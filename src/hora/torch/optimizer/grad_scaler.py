"""`torch.amp.GradScaler` with distributed optimizers: gradients are reduced before they are unscaled."""

from __future__ import annotations

import functools

import torch

from hora.torch.optimizer.hooks import _DistributedOptimizer


def reduce_before_unscaling() -> None:
    """Patch `torch.amp.GradScaler` to reduce the gradients of a distributed optimizer first. Idempotent."""
    unscale = torch.amp.GradScaler.unscale_
    if getattr(unscale, "reduces_first", False):
        return

    @functools.wraps(unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer._make_whole()  # also for a disabled scaler: clipping follows
        unscale(self, optimizer)

    unscale_.reduces_first = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
