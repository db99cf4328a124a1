"""Horovod's Keras callbacks as mixins; `horovod.keras` and `horovod.tensorflow.keras` add their base class.

`with_base` does so here and for the callbacks of `hora.keras.elastic`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any

import numpy as np
import torch

import hora.torch as hvd
from hora.keras.hyperparameters import follow_number, learning_rate_variable, read_number, set_number
from hora.keras.values import assign_values, broadcast_variables, optimizer_variables, read_values
from hora.telemetry.meters import meter
from hora.telemetry.report import outbox

Logs = MutableMapping[str, Any] | None


def with_base(methods: type, base: type, module: str) -> Any:
    """Return a class of the same name with these methods, this base class and this module."""
    return type(methods.__name__, (methods, base), {"__doc__": methods.__doc__, "__module__": module})


class BroadcastGlobalVariablesCallback:
    """Broadcasts weights and optimizer state from a root, once, after the first batch, when all variables exist.

    Reports the training's length, metrics, and the time between batches to the live page.
    """

    model: Any
    params: Any

    def __init__(self, root_rank: int, device: str = "", local_variables: Sequence[Any] | None = None) -> None:
        super().__init__()
        self.root_rank = root_rank
        self._local = {id(variable): variable for variable in local_variables or ()}
        self.broadcast_done = False
        self._last_end: float | None = None

    def register_local_var(self, variable: Any) -> None:
        """Exclude a variable from the broadcast."""
        self._local[id(variable)] = variable

    def on_train_begin(self, logs: Logs = None) -> None:
        steps, epochs = ((self.params or {}).get(name) or 0 for name in ("steps", "epochs"))
        meter.total_steps = steps * epochs

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._last_end = None

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        if self._last_end is not None:
            meter.data_s += time.perf_counter() - self._last_end

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._last_end = time.perf_counter()
        meter.report({name: value for name, value in (logs or {}).items() if np.ndim(value) == 0})
        if self.broadcast_done:
            return
        variables = [*self.model.weights, *optimizer_variables(self.model.optimizer)]
        broadcast_variables([variable for variable in variables if id(variable) not in self._local], self.root_rank)
        self.broadcast_done = True


class MetricAverageCallback:
    """Replaces an epoch's metrics by their means over the ranks, for the callbacks after it."""

    def __init__(self, device: str = "") -> None:
        super().__init__()

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        names = sorted(name for name, value in (logs or {}).items() if np.ndim(value) == 0)
        if logs and names:
            values = torch.tensor([float(logs[name]) for name in names], dtype=torch.float64, device="cpu")
            means = hvd.allreduce(values, name=f"keras.metrics.{'.'.join(names)}").tolist()
            logs.update(zip(names, means, strict=True))
            found = dict(zip(names, means, strict=True))
            meter.report(found)
            outbox.add(found, epoch + 1)
        meter.restart_step()


class LearningRateScheduleCallback:
    """Sets the learning rate to `initial_lr * multiplier(epoch)` between two epochs."""

    model: Any
    params: Any

    def __init__(
        self,
        initial_lr: float,
        multiplier: Callable[[float], float] | float,
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr is required: the rate at which the schedule starts")
        self.initial_lr, self.start_epoch, self.end_epoch = initial_lr, start_epoch, end_epoch
        self.staircase, self.momentum_correction, self.steps_per_epoch = staircase, momentum_correction, steps_per_epoch
        self._restore_momentum: float | None = None
        self._epoch = 0
        if callable(multiplier):
            self.multiplier: Callable[[float], float] = multiplier
        else:
            base = float(multiplier)
            self.multiplier = lambda epoch: base ** (epoch - self.start_epoch)

    def on_train_begin(self, logs: Logs = None) -> None:
        self._put_momentum_back()  # an elastic training may have been interrupted within a batch
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = (self.params or {}).get("steps")
            if not self.steps_per_epoch:
                raise ValueError(
                    "the number of steps per epoch is unknown, but a schedule by the batch needs it: pass "
                    "steps_per_epoch to the callback"
                )
        if self.momentum_correction:
            follow_number(self.model, "momentum")

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        epoch = float(self._epoch)
        if epoch < self.start_epoch or (self.end_epoch is not None and epoch >= self.end_epoch):
            return
        if self.staircase and batch == 0:
            self._adjust(epoch)
        elif not self.staircase:
            assert self.steps_per_epoch is not None
            self._adjust(epoch + batch / self.steps_per_epoch)

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self._put_momentum_back()

    def _put_momentum_back(self) -> None:
        if self._restore_momentum is not None:
            set_number(self.model.optimizer, "momentum", self._restore_momentum)
            self._restore_momentum = None

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        if logs is not None:
            logs["lr"] = self._rate()

    def _rate(self) -> float:
        return float(read_values([self._variable()])[0])

    def _variable(self) -> Any:
        rate = learning_rate_variable(self.model.optimizer)
        if rate is None:
            raise ValueError(
                f"the learning rate of {type(self.model.optimizer).__name__} is already a Keras schedule; create the "
                "optimizer with a number"
            )
        return rate

    def _adjust(self, epoch: float) -> None:
        old, new = self._rate(), self.initial_lr * self.multiplier(epoch)
        assign_values([self._variable()], [new])
        momentum = read_number(self.model.optimizer, "momentum") if self.momentum_correction else None
        if momentum and old:
            self._restore_momentum = momentum
            set_number(self.model.optimizer, "momentum", momentum * new / old)


class LearningRateWarmupCallback(LearningRateScheduleCallback):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` over the first epochs, batch by batch."""

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            assert self.steps_per_epoch is not None
            epoch += 1.0 / self.steps_per_epoch  # so that the last batch reaches the full rate
            return 1.0 / hvd.size() * (epoch * (hvd.size() - 1) / warmup_epochs + 1)

        super().__init__(
            initial_lr,
            multiplier,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        super().on_epoch_end(epoch, logs)
        if self.end_epoch is not None and epoch == self.end_epoch - 1 and self.verbose > 0 and hvd.rank() == 0:
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {self._rate():g}.", flush=True)


class BestModelCheckpoint:
    """`ModelCheckpoint(save_best_only=True)` whose `filepath` an estimator sets; saves nothing before."""

    filepath: Any

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            "best.keras" if not save_weights_only else "best.weights.h5",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None

    def _save_model(self, *args: Any, **kwargs: Any) -> Any:
        if self.filepath is None:
            raise ValueError("BestModelCheckpoint has no filepath: set it, or let an estimator do so")
        return super()._save_model(*args, **kwargs)  # type: ignore[misc]
