"""Objective of an estimator's training: a loss and metrics per label column, for the steps of `hora.workflow`.

A label gets the type that its loss accepts: integers stay integers if possible (class numbers), else become floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.spark.estimator.packing import as_list, to_list
from hora.workflow.step import Scored

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Minibatch:
    """Tensors of one batch of rows, on the rank's device."""

    inputs: list[torch.Tensor]
    labels: list[torch.Tensor]
    weights: torch.Tensor | None = None


class LabelColumns:
    """The objective of an estimator: the weighted sum of the labels' losses.

    As in Horovod, averages are taken over steps and ranks: every minibatch counts the same, regardless of its size.
    `output_sizes` is the number of values per row of each output, known after the first minibatch.
    """

    def __init__(self, values: Mapping[str, Any], losses: Sequence[Loss], device: torch.device) -> None:
        self._losses = [loss.to(device) if isinstance(loss, torch.nn.Module) else loss for loss in losses]
        self._labels: list[str] = list(values["label_cols"])
        self._keep_shapes = bool(values["label_shapes"])
        self._loss_weights = values["loss_weights"] or [1.0 / len(self._labels)] * len(self._labels)
        self._metrics = [to_list(group, len(self._labels)) for group in values["metrics"] or []]
        self._as_float: dict[int, bool] = {}
        self.output_sizes: tuple[int, ...] = ()

    @property
    def names(self) -> Sequence[str]:
        return ["loss", *(f"group_{number}_{label}" for number in range(len(self._metrics)) for label in self._labels)]

    def score(self, model: torch.nn.Module, batch: Minibatch) -> Scored:
        outputs, labels = self.fit_labels(model(*batch.inputs), batch.labels)
        return Scored(outputs, labels, self.loss(outputs, labels, batch.weights), weight=1)

    def metrics(self, scored: Scored) -> Sequence[torch.Tensor | float]:
        return [
            metric(output.detach(), label)
            for group in self._metrics
            for metric, output, label in zip(group, scored.outputs, scored.targets, strict=True)
        ]

    def entry(self, averages: Sequence[float] | None) -> dict[str, Any]:
        """Return the averages of a pass in the form of an estimator's history; zeros without a minibatch."""
        names = self.names
        loss, *rest = averages or [0.0] * len(names)
        named = list(zip(names[1:], rest, strict=True))
        num_labels = len(self._labels)
        groups = [dict(named[start : start + num_labels]) for start in range(0, len(named), num_labels)]
        return {"loss": loss, "all_metrics": groups}

    def fit_labels(self, outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return outputs as a list, and labels reshaped like the outputs if they have as many elements."""
        found = as_list(outputs)
        if len(found) != len(labels):
            raise ValueError(f"the model has {len(found)} outputs, but there are {len(labels)} label columns")
        self.output_sizes = tuple(output[0].numel() for output in found)
        fitted = []
        for number, (output, label) in enumerate(zip(found, labels, strict=True)):
            if not self._keep_shapes and label.numel() == output.numel():
                label = label.reshape(output.shape)
            if not label.is_floating_point() and self._wants_float(number, output, label):
                label = label.float()
            fitted.append(label)
        return found, fitted

    def loss(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        return weighted_loss(outputs, labels, self._loss_weights, self._losses, weights)

    def _wants_float(self, number: int, output: torch.Tensor, label: torch.Tensor) -> bool:
        """Return whether this label's loss needs a floating-point label; tried once."""
        if number not in self._as_float:
            trial = output.detach().clone().requires_grad_()
            try:
                with torch.enable_grad():
                    self._losses[number](trial, label).mean().backward()
                self._as_float[number] = False
            except (RuntimeError, TypeError, ValueError, IndexError):
                self._as_float[number] = True
        return self._as_float[number]


def weighted_loss(
    outputs: Sequence[torch.Tensor],
    labels: Sequence[torch.Tensor],
    loss_weights: Sequence[float],
    loss_fns: Sequence[Loss],
    sample_weights: torch.Tensor | None = None,
) -> Any:
    """Return the weighted sum of the labels' losses; rows are weighted in their means by `sample_weights`."""
    total: Any = 0
    for loss, share, output, label in zip(loss_fns, loss_weights, outputs, labels, strict=True):
        if sample_weights is None:
            total = total + share * loss(output, label)
        else:
            weights = sample_weights.flatten()
            each = _row_by_row(loss, output, label).reshape(len(weights), -1).mean(dim=1)
            total = total + share * (weights * each).mean()
    return total


def weighted_loss_fn() -> Callable[..., Any]:
    """Return `weighted_loss`; exists for Horovod's interface."""
    return weighted_loss


def _row_by_row(loss: Loss, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """Return the loss of each row, to be weighted."""
    reduction = getattr(loss, "reduction", None)
    if isinstance(loss, torch.nn.Module) and isinstance(reduction, str):
        loss.reduction = "none"  # type: ignore[assignment, unused-ignore]
        try:
            return loss(output, label)
        finally:
            loss.reduction = reduction  # type: ignore[assignment, unused-ignore]
    return loss(output, label, reduction="none")
