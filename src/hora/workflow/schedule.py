"""The learning rate as a pure function of the epoch, and early stopping."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import torch


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Scales the optimizer's learning rate with the number of ranks, warms up to that, then decays.

    Args:
        warmup_epochs: Epochs, also a fraction, until the full rate.
        scale: The factor after the warm-up; None: the world's size.
        decay: "cosine": to 0 in the last epoch; "steps": times `gamma` at each milestone.
        milestones: In epochs.
        gamma: The factor of a milestone.
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
        """Return the factor of the learning rate at a time (`epoch` 2.5: halfway through the third)."""
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


@dataclass(eq=False)
class EarlyStopping:
    """Stops if a monitored value has not improved. It is the same on every rank, so all ranks stop together.

    Args:
        monitor: A column of the history.
        patience: Epochs without improvement.
        min_delta: A smaller change is no improvement.
        highest: A greater value is better.
        restore_best: The model ends with the weights of its best epoch.
    """

    monitor: str = "valid_loss"
    _: KW_ONLY
    patience: int = 5
    min_delta: float = 0.0
    highest: bool = False
    restore_best: bool = True

    def __post_init__(self) -> None:
        if self.patience < 1:
            raise ValueError(f"patience must be at least 1 epoch, but it is {self.patience}")
        if self.min_delta < 0:
            raise ValueError(f"min_delta must not be negative, but it is {self.min_delta}")
        self._best = -math.inf if self.highest else math.inf
        self._num_stale = 0
        self._weights: dict[str, torch.Tensor] | None = None

    def should_stop(self, record: Mapping[str, float], model: torch.nn.Module) -> bool:
        """Record an epoch; returns whether it was the last."""
        if self.monitor not in record:
            raise ValueError(f"early stopping watches {self.monitor!r}, but an epoch has {', '.join(record)}")
        value = record[self.monitor]
        gain = value - self._best if self.highest else self._best - value
        if gain > self.min_delta:
            self._best, self._num_stale = value, 0
            if self.restore_best:
                self._weights = {name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items()}
        else:
            self._num_stale += 1
        return self._num_stale >= self.patience

    def finish(self, model: torch.nn.Module) -> None:
        """Restore the best weights."""
        if self._weights is not None:
            model.load_state_dict(self._weights)

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return {"best": self._best, "num_stale": self._num_stale, "weights": self._weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state from a checkpoint."""
        self._best, self._num_stale, self._weights = state["best"], state["num_stale"], state["weights"]
