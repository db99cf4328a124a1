"""Objective of a training: a batch's loss and metrics.

`Objective` is what a step needs. Two follow it: `Supervised` here, for `fit` (one loss of outputs and target), and the
Spark estimator's, which has a loss and metrics for each label column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["Metric", "Objective", "Scored", "Supervised", "accuracy"]

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """The fraction of rows whose largest output is the target's class."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


@dataclass(frozen=True)
class Scored:
    """A batch that has been through the model: its outputs, what they should be, and its loss.

    `weight` is what the batch counts for in the means over batches and ranks.
    """

    outputs: Any
    targets: Any
    loss: torch.Tensor
    weight: int


class Objective(Protocol):
    """Scoring of a batch."""

    @property
    def names(self) -> Sequence[str]:
        """Of the reported values: the loss first, then the metrics."""

    def score(self, model: torch.nn.Module, batch: Any) -> Scored:
        """The forward pass and the loss."""

    def metrics(self, scored: Scored) -> Sequence[torch.Tensor | float]:
        """The reported values after the loss."""


class Supervised:
    """One loss and any number of metrics, of the outputs and the target of a batch (inputs…, target).

    A batch counts for its number of rows, so that the means are exact where batches are unequal.
    """

    def __init__(self, loss: Metric, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._loss = loss
        self._metrics = dict(metrics)
        self._device = device

    @property
    def names(self) -> Sequence[str]:
        return ["loss", *self._metrics]

    def score(self, model: torch.nn.Module, batch: Any) -> Scored:
        inputs, target = _unpack(batch, self._device)
        outputs = model(*inputs)
        return Scored(outputs, target, self._loss(outputs, target), len(target))

    def metrics(self, scored: Scored) -> Sequence[torch.Tensor]:
        return [metric(scored.outputs, scored.targets) for metric in self._metrics.values()]


def _unpack(batch: Any, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The model's arguments and the target of a batch, on the device."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ValueError(f"a loader must give (inputs…, target), but it gave a {type(batch).__name__}")
    *inputs, target = (part.to(device, non_blocking=True) for part in batch)
    return inputs, target
