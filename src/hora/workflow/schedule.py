"""The learning rate over time, as a pure function of the epoch. `fit` asks it before every step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

__all__ = ["Schedule"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Scale the optimizer's learning rate with the number of ranks, warm up to that, then decay.

    `scale` is the factor after the warm-up; None means the world's size. `decay`: `none`, `cosine` (to 0 in
    the last epoch) or `steps` (times `gamma` at each milestone, in epochs).
    """

    warmup_epochs: float = 0.0
    scale: float | None = None
    decay: Literal["none", "cosine", "steps"] = "none"
    milestones: tuple[float, ...] = ()
    gamma: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup_epochs < 0:
            raise ValueError(f"warmup_epochs must not be negative, but it is {self.warmup_epochs}")
        if self.scale is not None and self.scale <= 0:
            raise ValueError(f"scale must be positive, or None for the number of ranks, but it is {self.scale}")
        if self.decay not in ("none", "cosine", "steps"):
            raise ValueError(f"decay must be none, cosine or steps, but it is {self.decay!r}")

    def factor(self, epoch: float, *, epochs: int, size: int) -> float:
        """What the learning rate is multiplied with at a moment (`epoch` 2.5: halfway through the third)."""
        scale = float(size) if self.scale is None else self.scale
        if epoch < self.warmup_epochs:
            return 1.0 + (scale - 1.0) * epoch / self.warmup_epochs
        return scale * self._decay(epoch, epochs)

    def _decay(self, epoch: float, epochs: int) -> float:
        if self.decay == "cosine":
            done = (epoch - self.warmup_epochs) / max(epochs - self.warmup_epochs, 1e-9)
            return 0.5 * (1.0 + math.cos(math.pi * min(done, 1.0)))
        if self.decay == "steps":
            return self.gamma ** sum(epoch >= milestone for milestone in self.milestones)
        return 1.0
