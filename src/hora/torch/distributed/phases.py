"""The phases of a step of DDP, FSDP2 or another training on torch's process groups, for the meter.

`hvd`'s optimizers measure their own steps. Here torch's public hooks of all optimizers mark the end of a step, and
`torch.autograd.backward` is wrapped, as the live page wraps data loaders. Waits within collectives are measured where
they happen (`engine.progress`), except those of DDP, whose C++ waits for futures: its last bucket is full when all
gradients are there, so the rest of backward is a wait. What remains of a step is its forward pass.
Installed only while the ranks report.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from hora.telemetry.meters import meter

_clock = time.perf_counter


class Phases:
    """The present step. Several optimizers may step in it, and backward may run several times."""

    def __init__(self) -> None:
        self._depth = 0  # a backward within another one (checkpointing) belongs to it
        self._backward_ended = 0.0  # 0: no backward since the last optimizer
        self._blocked_s = 0.0  # the total when that was
        self._began = 0.0  # of the optimizer
        self._future: tuple[float, float, float] | None = None  # the latest one in a backward: when, and totals then
        self._last: weakref.ref[torch.optim.Optimizer] | None = None  # whose steps are counted

    def install(self) -> None:
        plain = torch.autograd.backward
        if hasattr(plain, "is_metered"):
            return

        @functools.wraps(plain)
        def metered(*args: Any, **kwargs: Any) -> None:
            if self._depth or torch.compiler.is_compiling():
                return plain(*args, **kwargs)
            began, blocked_s, self._future = _clock(), meter.blocked_s, None
            self._depth += 1
            try:
                return plain(*args, **kwargs)
            finally:
                self._depth -= 1
                self._backward_ended = _clock()
                self._note_wait_for_futures()
                self._blocked_s = meter.blocked_s
                meter.backward_s += max(self._backward_ended - began - (self._blocked_s - blocked_s), 0.0)

        metered.is_metered = True  # type: ignore[attr-defined]
        torch.autograd.backward = metered
        register_optimizer_step_pre_hook(self._begin)
        register_optimizer_step_post_hook(self._end)

    def future_made(self) -> None:
        """Note that torch's C++ has a future of an operation, for which it waits at the end of backward."""
        if self._depth:
            self._future = _clock(), meter.blocked_s, meter.transport_s

    def _note_wait_for_futures(self) -> None:
        if self._future is None:
            return
        since, blocked_s, transport_s = self._future
        left_s = self._backward_ended - since - (meter.blocked_s - blocked_s)
        moving_s = min(meter.transport_s - transport_s, max(left_s, 0.0))
        meter.reduce_s += moving_s
        meter.wait_s += max(left_s - moving_s, 0.0)

    def _begin(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if _is_hvds(type(optimizer)):
            return
        now, blocked_s = _clock(), meter.blocked_s
        if self._backward_ended:
            meter.between_s += max(now - self._backward_ended - (blocked_s - self._blocked_s), 0.0)
            self._backward_ended = 0.0
        self._began, self._blocked_s = now, blocked_s

    def _end(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if not self._began or _is_hvds(type(optimizer)):
            return
        meter.optimizer_s += max(_clock() - self._began - (meter.blocked_s - self._blocked_s), 0.0)
        self._began = 0.0
        if self._last is None or self._last() is None:
            self._last = weakref.ref(optimizer)
        if self._last() is optimizer:  # of two optimizers, a GAN's, the first one counts the steps
            meter.step_done()


def _is_hvds(kind: type[torch.optim.Optimizer]) -> bool:
    """Return whether such an optimizer measures its own steps."""
    return any(base.__module__.startswith("hora.") for base in kind.__mro__)


phases = Phases()
"""The phases of this process's steps."""
