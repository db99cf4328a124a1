"""One optimizer step, and one pass over validation data: precision, accumulation and clipping.

Epochs, checkpoints and progress belong to the callers: `fit`, and the training of the Spark estimator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch

from hora.telemetry.meters import meter
from hora.torch.optimizer.distributed import clip_grad_norm_
from hora.workflow.history import Tally
from hora.workflow.schedule import Schedule

Metric = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the fraction of rows whose largest output is the target's class."""
    return (outputs.argmax(dim=-1) == targets).float().mean()


@dataclass(frozen=True)
class Scored:
    """A batch that has passed through the model: its outputs, its targets and its loss."""

    outputs: Any
    targets: Any
    loss: torch.Tensor
    weight: int  # of the batch, in means over batches and ranks


class Objective(Protocol):
    """Scoring of a batch."""

    @property
    def names(self) -> Sequence[str]:
        """Names of the reported values: the loss first, then the metrics."""

    def score(self, model: torch.nn.Module, batch: Any) -> Scored:
        """Run the forward pass and compute the loss."""

    def metrics(self, scored: Scored) -> Sequence[torch.Tensor | float]:
        """Return the reported values after the loss."""


class Supervised:
    """One loss and any number of metrics, of the outputs and the target of a batch (inputs…, target).

    A batch is weighted by its number of rows, so that means are exact for unequal batches.
    """

    def __init__(self, loss: Metric, metrics: Mapping[str, Metric], device: torch.device) -> None:
        self._loss = loss
        self._metrics = dict(metrics)
        self._device = device

    @property
    def names(self) -> Sequence[str]:
        return ["loss", *self._metrics]

    def score(self, model: torch.nn.Module, batch: Any) -> Scored:
        if not isinstance(batch, (tuple, list)) or len(batch) < 2:
            raise ValueError(f"a loader must yield (inputs…, target), but it yielded a {type(batch).__name__}")
        *inputs, target = (part.to(self._device, non_blocking=True) for part in batch)
        outputs = model(*inputs)
        return Scored(outputs, target, self._loss(outputs, target), len(target))

    def metrics(self, scored: Scored) -> Sequence[torch.Tensor]:
        return [metric(scored.outputs, scored.targets) for metric in self._metrics.values()]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Settings of a step.

    Args:
        precision: Of the forward pass; weights stay unchanged, and float16 uses loss scaling.
        accumulate: Batches per optimizer step.
        clip_norm: The maximum gradient norm over all parameters, after averaging.
        schedule: The learning rate over time; None keeps the optimizer's.
    """

    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    accumulate: int = 1
    clip_norm: float | None = None
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if self.precision not in _DTYPES:
            raise ValueError(f"precision must be one of {', '.join(_DTYPES)}, but it is {self.precision!r}")
        if self.accumulate < 1:
            raise ValueError(f"accumulate must be at least 1 batch, but it is {self.accumulate}")
        if self.clip_norm is not None and self.clip_norm <= 0:
            raise ValueError(f"clip_norm must be positive, or None not to clip, but it is {self.clip_norm}")

    def autocast(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context of a forward pass."""
        dtype = _DTYPES[self.precision]
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


@dataclass(eq=False)
class Stepper:
    """Takes optimizer steps on a model: `step`, or `begin`, `add` and `finish` if a step does not end with a batch."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    objective: Objective
    recipe: Recipe
    device: torch.device

    def __post_init__(self) -> None:
        half = self.recipe.precision == "float16"
        self.scaler = torch.amp.GradScaler(self.device.type) if half else None

    def step(self, batches: Sequence[Any], tally: Tally) -> None:
        """Accumulate the mean of the batches' gradients, then update the weights once."""
        self.begin()
        for batch in batches:
            self.add(batch, tally, divisor=len(batches))
        self.finish()

    def begin(self) -> None:
        """Clear the gradients of the previous step."""
        self.optimizer.zero_grad()

    def add(self, batch: Any, tally: Tally, *, divisor: int = 1) -> None:
        """Run forward and backward, and add the batch's gradients, divided by `divisor`, to the step."""
        with self.recipe.autocast(self.device):
            scored = self.objective.score(self.model, batch)
        share = scored.loss / divisor
        (share if self.scaler is None else self.scaler.scale(share)).backward()
        self.report(scored, tally)

    def report(self, scored: Scored, tally: Tally) -> None:
        """Record a trained batch's loss and metrics."""
        with torch.no_grad():
            values = [scored.loss, *self.objective.metrics(scored)]
            tally.add(values, scored.weight)
            meter.report(dict(zip(self.objective.names, values, strict=True)))

    def finish(self) -> None:
        # A distributed optimizer averages the gradients before they are unscaled or clipped.
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        if self.recipe.clip_norm is not None:
            clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()


def score_all(
    model: torch.nn.Module, batches: Iterable[Any], objective: Objective, *, recipe: Recipe, device: torch.device
) -> Tally:
    """Score this rank's batches without training; the model's mode is restored."""
    tally = Tally(objective.names, device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), recipe.autocast(device):
            for batch in batches:
                scored = objective.score(model, batch)
                tally.add([scored.loss, *objective.metrics(scored)], scored.weight)
    finally:
        model.train(was_training)
    return tally


def evaluate(
    model: torch.nn.Module,
    loader: Any,
    loss: Metric,
    *,
    metrics: Mapping[str, Metric] | None = None,
    recipe: Recipe | None = None,
    device: torch.device | str = "cpu",
    prefix: str = "valid",
) -> dict[str, float]:
    """Return mean loss and metrics over all rows of all ranks; the model's mode is restored.

    Args:
        model: The network.
        loader: Batches of this rank's rows.
        loss: The loss of a batch, from predictions and labels.
        metrics: More numbers of a batch, by name.
        recipe: Precision, and how a batch is divided; by default plain.
        device: Where the model is.
        prefix: What stands before each name of the result.
    """
    where = torch.device(device)
    objective = Supervised(loss, metrics or {}, where)
    return score_all(model, loader, objective, recipe=recipe or Recipe(), device=where).means(prefix)
