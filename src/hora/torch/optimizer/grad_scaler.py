"""torch's `GradScaler` with distributed optimizers: gradients are reduced before they are unscaled.

`unscale_`, which `GradScaler.step` calls too, divides gradients in place and looks for infinities. While a reduction is
under way that would be a race, and every rank would see its own infinities alone. After the reduction all ranks see the
same, and skip the same steps.
"""

from __future__ import annotations

import functools

import torch

from hora.torch.optimizer.base import _DistributedOptimizer

__all__ = ["reduce_before_unscaling"]


def reduce_before_unscaling() -> None:
    """Let every `torch.amp.GradScaler` reduce the gradients of a distributed optimizer first. Idempotent."""
    unscale = torch.amp.GradScaler.unscale_
    if getattr(unscale, "reduces_first", False):
        return

    @functools.wraps(unscale)
    def unscale_(self: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
        if isinstance(optimizer, _DistributedOptimizer):
            optimizer._make_whole()  # for a scaler that is disabled too: what follows is clipping
        unscale(self, optimizer)

    unscale_.reduces_first = True  # type: ignore[attr-defined]
    torch.amp.GradScaler.unscale_ = unscale_  # type: ignore[method-assign]
