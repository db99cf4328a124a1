"""One pass over batches: forward, losses, metrics and, in training, the optimizer's step. Averages over all ranks.

A label has the type that its loss takes: integers stay integers where they can (class numbers), else they become floats.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

import hora.torch as hvd

__all__ = ["Batch", "Step", "split_batch"]

Loss = Callable[..., Any]


@dataclass(frozen=True)
class Batch:
    """Tensors of one batch, on the rank's device."""

    inputs: list[torch.Tensor]
    labels: list[torch.Tensor]
    weights: torch.Tensor | None = None


def split_batch(
    batch: Any,
    *,
    features: Sequence[str],
    labels: Sequence[str],
    weight: str | None,
    input_shapes: Sequence[Sequence[int]] | None,
    label_shapes: Sequence[Sequence[int]] | None,
    device: torch.device,
) -> Batch:
    """From what a data module yields: a dict of columns, or `(features, label)`."""
    if isinstance(batch, tuple | list):
        given, label = batch
        sources = list(given.values()) if isinstance(given, Mapping) else [given]
        targets = list(label.values()) if isinstance(label, Mapping) else [label]
        weights = None
    else:
        sources, targets = [batch[name] for name in features], [batch[name] for name in labels]
        weights = None if weight is None else _tensor(batch[weight], device).float().reshape(-1)
    inputs = [_tensor(source, device).float() for source in sources]
    if input_shapes:
        inputs = [tensor.reshape(tuple(shape)) for tensor, shape in zip(inputs, input_shapes, strict=True)]
    wanted = [_tensor(target, device) for target in targets]
    wanted = [tensor.float() if tensor.is_floating_point() else tensor.long() for tensor in wanted]
    if label_shapes:
        wanted = [tensor.reshape(tuple(shape)) for tensor, shape in zip(wanted, label_shapes, strict=True)]
    return Batch(inputs, wanted, weights)


class Step:
    """A model's way through a batch. Sums its numbers until a pass is over."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Any,
        values: Mapping[str, Any],
        *,
        losses: Sequence[Loss],
        device: torch.device,
    ) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._losses = [_on(loss, device) for loss in losses]
        self._labels: list[str] = list(values["label_cols"])
        self._keep_shapes = bool(values["label_shapes"])
        self._loss_weights = values["loss_weights"] or [1.0 / len(self._labels)] * len(self._labels)
        groups = values["metrics"] or []
        groups = [list(group) if isinstance(group, list | tuple) else [group] for group in groups]
        self._metrics = [group * len(self._labels) if len(group) == 1 else group for group in groups]
        self._passes = values["backward_passes_per_step"]
        self._own_step = values["train_minibatch_fn"]
        self._as_float: dict[int, bool] = {}
        self._num_backward = 0
        self.output_sizes: tuple[int, ...] = ()

    def run(self, batches: Iterable[Batch], *, training: bool) -> dict[str, Any]:
        """The mean loss and metrics of a pass, over all batches of all ranks."""
        self._model.train(training)
        totals = np.zeros(2 + sum(map(len, self._metrics)))
        for index, batch in enumerate(batches):
            if training:
                outputs, labels, loss = self._train(batch, index)
            else:
                with torch.no_grad():
                    outputs, labels, loss = self._forward(batch)
            with torch.no_grad():
                metrics = [
                    float(metric(output.detach(), label))
                    for group in self._metrics
                    for metric, output, label in zip(group, outputs, labels, strict=True)
                ]
            totals += [1.0, float(loss.detach()), *metrics]
        whole = hvd.allreduce(torch.from_numpy(totals), op=hvd.Sum, name=f"estimator.totals.{training}").tolist()
        num_batches, loss_sum, *sums = whole
        means = iter(value / max(num_batches, 1.0) for value in sums)
        groups = [
            {f"group_{number}_{label}": next(means) for label in self._labels} for number in range(len(self._metrics))
        ]
        return {"loss": loss_sum / max(num_batches, 1.0), "all_metrics": groups}

    def _train(self, batch: Batch, index: int) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        if self._own_step is not None:
            outputs, loss = self._own_step(
                self._model,
                self._optimizer,
                self._fitted,
                self._loss,
                batch.inputs,
                batch.labels,
                batch.weights,
                self._passes,
                index,
            )
            return *self._fitted(outputs, batch.labels), loss
        if self._num_backward % self._passes == 0:
            self._optimizer.zero_grad()
        outputs, labels, loss = self._forward(batch)
        loss.backward()
        self._num_backward += 1
        if self._num_backward % self._passes == 0:
            self._optimizer.step()
        return outputs, labels, loss

    def _forward(self, batch: Batch) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
        outputs, labels = self._fitted(self._model(*batch.inputs), batch.labels)
        return outputs, labels, self._loss(outputs, labels, batch.weights)

    def _fitted(self, outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs as a list, and the labels in the outputs' shape where they have as many elements."""
        found = _as_list(outputs)
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

    def _wants_float(self, number: int, output: torch.Tensor, label: torch.Tensor) -> bool:
        """Whether this label's loss cannot be computed, or not be differentiated, with an integer label. Tried once."""
        if number not in self._as_float:
            trial = output.detach().clone().requires_grad_()
            try:
                with torch.enable_grad():
                    self._losses[number](trial, label).mean().backward()
                self._as_float[number] = False
            except (RuntimeError, TypeError, ValueError, IndexError):
                self._as_float[number] = True
        return self._as_float[number]

    def _loss(
        self, outputs: Sequence[torch.Tensor], labels: Sequence[torch.Tensor], weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The weighted sum of the labels' losses."""
        total = torch.zeros((), device=self._device)
        for loss, share, output, label in zip(self._losses, self._loss_weights, outputs, labels, strict=True):
            if weights is None:
                total = total + share * loss(output, label)
            else:
                each = _row_by_row(loss, output, label)
                total = total + share * (weights * each.reshape(len(weights), -1).mean(dim=1)).mean()
        return total


def _row_by_row(loss: Loss, output: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
    """The loss without its mean, for weights of rows."""
    reduction = getattr(loss, "reduction", None)
    if isinstance(loss, torch.nn.Module) and isinstance(reduction, str):
        loss.reduction = "none"  # type: ignore[assignment, unused-ignore]
        try:
            return loss(output, label)
        finally:
            loss.reduction = reduction  # type: ignore[assignment, unused-ignore]
    return loss(output, label, reduction="none")


def _tensor(values: Any, device: torch.device) -> torch.Tensor:
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.array(values))
    return tensor.to(device)


def _as_list(outputs: Any) -> list[torch.Tensor]:
    return list(outputs) if isinstance(outputs, tuple | list) else [outputs]


def _on(loss: Loss, device: torch.device) -> Loss:
    return loss.to(device) if isinstance(loss, torch.nn.Module) else loss
