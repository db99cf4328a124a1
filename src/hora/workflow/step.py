"""One optimizer step, and one pass over validation data: precision, accumulation and clipping live here.

It knows nothing about epochs, checkpoints or progress; `fit` does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch

from hora.workflow.schedule import Schedule
from hora.workflow.tally import Metric, Tally

__all__ = ["Recipe", "Stepper", "evaluate"]

_DTYPES = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to take a step.

    `precision`: of the forward pass; weights stay as they are, and float16 comes with loss scaling.
    `accumulate`: batches per optimizer step. `clip_norm`: the longest gradient, over all parameters, after
    averaging. `schedule`: the learning rate over time; None leaves the optimizer's alone.
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
        """The context of a forward pass."""
        dtype = _DTYPES[self.precision]
        return nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)


def unpack(batch: Any, device: torch.device) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The model's arguments and the target of a batch, on the device."""
    if not isinstance(batch, (tuple, list)) or len(batch) < 2:
        raise ValueError(f"a loader must give (inputs…, target), but it gave a {type(batch).__name__}")
    *inputs, target = (part.to(device, non_blocking=True) for part in batch)
    return inputs, target


class Stepper:
    """Takes optimizer steps on a model."""

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Metric,
        *,
        metrics: Mapping[str, Metric],
        recipe: Recipe,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.loss = loss
        self.metrics = metrics
        self.recipe = recipe
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type) if recipe.precision == "float16" else None

    def step(self, batches: Sequence[Any], tally: Tally) -> None:
        """Accumulate the gradients of the batches, then change the weights once."""
        self.optimizer.zero_grad()
        for batch in batches:
            inputs, target = unpack(batch, self.device)
            with self.recipe.autocast(self.device):
                outputs = self.model(*inputs)
                loss = self.loss(outputs, target)
            share = loss / len(batches)
            (share if self.scaler is None else self.scaler.scale(share)).backward()
            with torch.no_grad():
                tally.add([loss, *(metric(outputs, target) for metric in self.metrics.values())], len(target))
        self._update()

    def set_learning_rate(self, rates: Sequence[float]) -> None:
        """One rate per parameter group."""
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate

    def _update(self) -> None:
        if self.scaler is None and self.recipe.clip_norm is None:
            self.optimizer.step()
            return
        # Unscaling and clipping must see the averaged gradients, or every rank would clip to its own length.
        optimizer: Any = self.optimizer
        distributed = hasattr(optimizer, "skip_synchronize")
        if distributed:
            optimizer.synchronize()
        if self.scaler is not None:
            self.scaler.unscale_(optimizer)
        if self.recipe.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip_norm)
        with optimizer.skip_synchronize() if distributed else nullcontext():
            if self.scaler is None:
                optimizer.step()
            else:
                self.scaler.step(optimizer)
                self.scaler.update()


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
    """Mean loss and metrics over all rows of all ranks; the model is left in the mode it was in."""
    device, recipe, metrics = torch.device(device), recipe or Recipe(), metrics or {}
    tally = Tally(["loss", *metrics], device)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), recipe.autocast(device):
            for batch in loader:
                inputs, target = unpack(batch, device)
                outputs = model(*inputs)
                values = [loss(outputs, target), *(metric(outputs, target) for metric in metrics.values())]
                tally.add(values, len(target))
    finally:
        model.train(was_training)
    return tally.means(prefix)
