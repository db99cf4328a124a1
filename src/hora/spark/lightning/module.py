"""LightningModules: a wrapper for a plain module, and support for old modules on today's Lightning.

`to_lightning_module` adds steps for an estimator's losses and columns to a plain `torch.nn.Module`. `modern` lets
modules with removed hooks (such as `training_epoch_end`) train again.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch

from hora.spark.estimator.objective import weighted_loss
from hora.spark.estimator.packing import ModelAndOptimizer, as_list, to_list
from hora.spark.lightning.package import default_package

# The removed hook, the step whose outputs it gets, and the hook that calls it now.
_REMOVED = (
    ("training_epoch_end", "training_step", "on_train_epoch_end"),
    ("validation_epoch_end", "validation_step", "on_validation_epoch_end"),
    ("test_epoch_end", "test_step", "on_test_epoch_end"),
)


_CALLBACK_HOOKS = ("on_init_start", "on_init_end", "on_epoch_end")


def to_lightning_module(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    loss_fns: Any,
    loss_weights: Sequence[float] | None,
    feature_cols: Sequence[str],
    label_cols: Sequence[str],
    sample_weights_col: str | None,
    validation: Any,
) -> Any:
    """Wrap a plain module as a LightningModule: inputs by keyword, named like the feature columns."""
    methods = _Validation if validation else _Training
    made: Any = type(methods.__name__, (methods, default_package().LightningModule), {})()
    made._model = model
    made._optimizer = optimizer
    made._losses = to_list(loss_fns, len(label_cols))
    made._loss_weights = list(loss_weights or [1.0 / len(label_cols)] * len(label_cols))
    made._columns = (list(feature_cols), list(label_cols), sample_weights_col)
    return made


class _Training:
    """Methods that a plain module lacks. `to_lightning_module` sets the attributes."""

    _model: Any
    _optimizer: Any
    _losses: list[Callable[..., Any]]
    _loss_weights: list[float]
    _columns: tuple[list[str], list[str], str | None]
    log: Callable[..., None]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._model(*args, **kwargs)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the given optimizer's class and state, with its groups, on this module's parameters."""
        return ModelAndOptimizer.of(self._model, self._optimizer).optimizer_of(self._model)

    def training_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self._step(batch)
        self.log("train_loss", loss.detach(), on_step=False, on_epoch=True, sync_dist=True, batch_size=_rows(batch))
        return {"loss": loss}

    def _step(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        features, labels, weight = self._columns
        outputs, wanted = self._transform_outputs(
            self.forward(**{name: batch[name].float() for name in features}), [batch[name] for name in labels]
        )
        return self._calculate_loss(outputs, wanted, None if weight is None else batch[weight].float())

    def _transform_outputs(self, outputs: Any, labels: Sequence[torch.Tensor]) -> tuple[list[Any], list[Any]]:
        """Return outputs as a list; labels reshaped like them if they have as many elements, and cast to their type."""
        found = as_list(outputs)
        fitted = []
        for output, label in zip(found, labels, strict=True):
            if label.numel() == output.numel():
                label = label.reshape(output.shape).to(output.dtype)
            fitted.append(label.float() if label.is_floating_point() else label.long())
        return found, fitted

    def _calculate_loss(
        self, outputs: Sequence[Any], labels: Sequence[Any], sample_weights: torch.Tensor | None = None
    ) -> Any:
        return weighted_loss(outputs, labels, self._loss_weights, self._losses, sample_weights)


class _Validation(_Training):
    """The same with validation: `val_loss` is the mean over all ranks, for `EarlyStopping` and similar callbacks."""

    def validation_step(self, batch: Mapping[str, torch.Tensor], batch_idx: int) -> dict[str, torch.Tensor]:
        loss = self._step(batch)
        self.log("val_loss", loss, on_epoch=True, sync_dist=True, batch_size=_rows(batch))
        return {"val_loss": loss}


def _rows(batch: Mapping[str, torch.Tensor]) -> int:
    return len(next(iter(batch.values())))


def modern(module: Any) -> Any:
    """Return the same module; hooks that replace removed ones call them, with a warning."""
    for old, step, new in _REMOVED:
        hook = getattr(module, old, None)
        if callable(hook):
            warnings.warn(
                f"{type(module).__name__}.{old} was removed in Lightning 2.0; {new} calls it here with the "
                f"outputs of {step}. Move it there.",
                DeprecationWarning,
                stacklevel=2,
            )
            _bridge(module, old, step, new)
    return module


def old_hooks(package: ModuleType, callbacks: Sequence[Any]) -> list[Any]:
    """Return a callback, if needed, that calls the removed hooks of `callbacks`, with a warning."""
    old = [one for one in callbacks if any(callable(getattr(one, name, None)) for name in _CALLBACK_HOOKS)]
    if not old:
        return []
    warnings.warn(
        f"callbacks with hooks that Lightning has removed ({', '.join(_CALLBACK_HOOKS)}): the hooks that replaced "
        "them call them. Move them there.",
        DeprecationWarning,
        stacklevel=2,
    )

    def call(hook: str, *args: Any) -> None:
        for callback in old:
            if callable(getattr(callback, hook, None)):
                getattr(callback, hook)(*args)

    def set_up(trainer: Any, pl_module: Any, stage: str) -> None:
        call("on_init_start", trainer)
        call("on_init_end", trainer)

    at_the_end = functools.partial(call, "on_epoch_end")
    hooks = {"setup": set_up, "on_train_epoch_end": at_the_end, "on_validation_epoch_end": at_the_end}
    return [package.callbacks.LambdaCallback(**hooks)]


def _bridge(module: Any, old: str, step: str, new: str) -> None:
    kind = type(module)
    outputs: dict[int, list[Any]] = {}  # per data loader

    def remembering(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = getattr(kind, step)(self, *args, **kwargs)
        kept = outputs.setdefault(args[2] if len(args) > 2 else kwargs.get("dataloader_idx", 0), [])
        if output is not None:
            kept.append(_detached(output))
        return output

    def at_the_end(self: Any) -> None:
        """Call the old hook as Lightning 1 did: with a list of outputs other than None, or a list per loader."""
        lists = list(outputs.values())
        getattr(kind, old)(self, lists if len(lists) > 1 else lists[0] if lists else [])
        outputs.clear()
        getattr(kind, new)(self)

    # Lightning rejects modules whose class has the old name: a class in between hides it.
    module.__class__ = type(kind.__name__, (kind,), {old: None, step: remembering, new: at_the_end})


def _detached(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.detach()
    return {name: _detached(value) for name, value in output.items()} if isinstance(output, Mapping) else output
