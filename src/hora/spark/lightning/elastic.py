"""Elastic training with Lightning: a fit loop that survives the loss and arrival of ranks, step by step.

Everything around the loop happens once: the Trainer, its setup hooks and its optimizers stay. In every new world the
loop runs again, including `on_train_start`. Models and optimizers stay in place (`hvd.elastic.TorchState`), learning
rates follow the number of ranks, loaders are created anew, and the interrupted epoch continues with its remaining
batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import hora.torch as hvd
from hora.torch.elastic.handlers import SnapshotHandler, get_handler_registry
from hora.torch.elastic.loop import run
from hora.torch.elastic.torch_state import TorchState


def make_elastic(trainer: Any, new_data: Callable[[], Any] | None) -> None:
    """Make the Trainer's `fit` continue when the world changes.

    `new_data` creates the data module for this process's current rank and size. None if the module or data module reads
    them in `train_dataloader()`, or Lightning's own sampler does.
    """
    if (LoopPosition, _LoopPositionHandler) not in get_handler_registry():
        get_handler_registry().append((LoopPosition, _LoopPositionHandler))
    loop = trainer.fit_loop
    if not isinstance(loop, _ElasticFit):
        loop.__class__ = type("ElasticFitLoop", (_ElasticFit, type(loop)), {})
        loop.epoch_loop.__class__ = type("ElasticEpochLoop", (_ElasticEpoch, type(loop.epoch_loop)), {})
    loop.new_data = new_data


class LoopPosition:
    """A Trainer's position in its training. Newcomers copy all of it, and a failed step is rolled back.

    Lightning's loops count batches from the start or the middle of an epoch: `first` of `total` were done when it was
    entered.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.began = False
        self.epoch = 0  # number of epochs done, including everything at their ends
        self.first = self.total = 0
        self.size = hvd.size()  # the factor of the learning rates
        self._modes = [(module, module.training) for module in trainer.lightning_module.modules()]

    @property
    def done(self) -> float:
        """Return the finished share of the epoch's batches."""
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.current
        return (self.first + batches.processed) / self.total if self.total else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return the values that a step changes."""
        strategy = self.trainer.strategy
        found = {name: getattr(self, name) for name in ("began", "epoch", "first", "total", "size")}
        found["rates"] = [
            {name: group[name] for name in ("lr", "initial_lr") if name in group} for group in strategy.groups()
        ]
        found["schedulers"] = [config.scheduler.state_dict() for config in strategy.lr_scheduler_configs]
        if self.began:  # before that, all ranks have the same initial values, perhaps from a checkpoint
            found["loops"] = self.trainer.fit_loop.state_dict()
            del found["loops"]["state_dict"]  # of loaders, which are created anew
        return found

    def load_state_dict(self, found: dict[str, Any]) -> None:
        trainer, strategy = self.trainer, self.trainer.strategy
        for name in ("began", "epoch", "first", "total", "size"):
            setattr(self, name, found[name])
        for group, rates in zip(strategy.groups(), found["rates"], strict=True):
            group.update(rates)
        for config, state in zip(strategy.lr_scheduler_configs, found["schedulers"], strict=True):
            config.scheduler.load_state_dict(state)
        if "loops" in found:
            trainer.fit_loop.load_state_dict(found["loops"])
        for callback in trainer.callbacks if "callbacks" in found else ():
            if callback.state_key in found["callbacks"]:
                callback.load_state_dict(found["callbacks"][callback.state_key])
        if "metrics" in found:
            trainer.should_stop = found["should_stop"]
            trainer._logger_connector._callback_metrics.update(found["metrics"])

    def beyond_steps(self) -> dict[str, Any]:
        """Return the values that steps do not change and newcomers need."""
        trainer = self.trainer
        return {
            "callbacks": {callback.state_key: callback.state_dict() for callback in trainer.callbacks},
            "metrics": dict(trainer._logger_connector._callback_metrics),
            "should_stop": trainer.should_stop,
        }

    def reset_progress(self) -> None:
        """Bring the Trainer to its state between two batches, possibly in a new world."""
        trainer, loop = self.trainer, self.trainer.fit_loop
        inner = (loop.epoch_loop.automatic_optimization, loop.epoch_loop.manual_optimization)
        for part in (loop, loop.epoch_loop, loop.epoch_loop.val_loop, *inner):
            part._restarting = part._loaded_from_state_dict = part._resuming_from_checkpoint = False
        for tracker in (loop.epoch_progress.total, loop.epoch_progress.current):
            tracker.ready = tracker.started = tracker.processed = tracker.completed = self.epoch
        for tracker in (loop.epoch_loop.batch_progress.total, loop.epoch_loop.batch_progress.current):
            tracker.ready = tracker.started = tracker.completed = tracker.processed
        for module, training in self._modes:
            module.training = training
        # Reset an epoch's means to the batches since the last change, so that all ranks reduce the same ones.
        trainer.validating = True
        trainer._logger_connector.reset_results()
        trainer.training = True
        trainer._logger_connector.reset_results()
        trainer.strategy.apply_rank()
        if self.size != hvd.size():
            trainer.strategy.scale_rates(hvd.size() / self.size)
            self.size = hvd.size()


class _LoopPositionHandler(SnapshotHandler):
    """Handler of a `LoopPosition`: a step copies a small part of it, newcomers copy more."""

    @property
    def committed(self) -> Any:
        return self._saved | self.value.beyond_steps()

    @committed.setter
    def committed(self, saved: Any) -> None:
        self._saved = saved


class _ElasticFit:
    """Mixin before Lightning's fit loop."""

    trainer: Any
    epoch_loop: Any
    epoch_progress: Any
    max_batches: int | float
    new_data: Callable[[], Any] | None
    first = 0  # batches of this epoch that other worlds have done

    def run(self) -> None:
        trainer = self.trainer
        self.place = LoopPosition(trainer)
        more = {f"optimizer_{number}": optimizer for number, optimizer in enumerate(trainer.strategy.optimizers)}
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            more["scaler"] = scaler
        # With several optimizers a step is not an iteration: a failure then rolls back to the last commit.
        by_step = len(trainer.strategy.optimizers) == 1
        self.state: Any = TorchState(model=trainer.lightning_module, per_step=by_step, place=self.place, **more)
        run(self._run_in_world)(self.state)

    def _run_in_world(self, state: Any) -> None:
        place, again = self.place, self.place.began
        self.first = 0
        if again:
            place.reset_progress()
            self._renew_data()
        else:
            place.began, place.epoch = True, self.epoch_progress.current.processed
        super().run()  # type: ignore[misc]

    def _renew_data(self) -> None:
        """Create the loaders of this world; the first epoch ends once its remaining batches are done."""
        trainer = self.trainer
        if self.new_data is not None:
            trainer.datamodule.teardown("fit")
            trainer._data_connector.attach_datamodule(trainer.lightning_module, self.new_data())
            trainer.datamodule.setup("fit")
        self.epoch_loop.val_loop._combined_loader = None
        self._set_up_data()
        if self.max_batches == float("inf"):
            return  # the remaining number is unknown: the epoch starts again
        total, done = int(self.max_batches), self.place.done
        self.first = total if done == 1.0 else min(round(done * total), total - 1)
        if 0 < self.first < total:
            given = trainer.limit_train_batches
            trainer.limit_train_batches = total - self.first
            self._set_up_data()
            trainer.limit_train_batches = given

    def _set_up_data(self) -> None:
        self._combined_loader = None
        super().setup_data()  # type: ignore[misc]

    def advance(self) -> None:
        """Run an epoch or the rest of it, possibly only the validation after its last batch."""
        if self.place.done < 1.0:
            super().advance()  # type: ignore[misc]
        elif self.epoch_loop._should_check_val_epoch():
            self.trainer.validating = True
            self.epoch_loop.val_loop.run()
            self.trainer.training = True

    def on_advance_end(self) -> None:
        super().on_advance_end()  # type: ignore[misc]
        place = self.place
        place.epoch, place.first, place.total = self.epoch_progress.current.processed, 0, 0
        if self.first:
            self.first, self._combined_loader = 0, None  # the next epoch is complete
        self.state.commit()


class _ElasticEpoch:
    """Mixin before Lightning's loop over the batches of an epoch."""

    trainer: Any
    batch_progress: Any

    def on_run_start(self, data_fetcher: Any) -> None:
        loop = self.trainer.fit_loop
        length = loop.max_batches
        loop.place.first, loop.place.total = loop.first, 0 if length == float("inf") else loop.first + int(length)
        super().on_run_start(data_fetcher)  # type: ignore[misc]

    def advance(self, data_fetcher: Any) -> None:
        super().advance(data_fetcher)  # type: ignore[misc]
        # The epoch's end follows the last batch, and ranks that join then could not take part in it.
        if not self.batch_progress.is_last_batch and not self._should_accumulate():  # type: ignore[attr-defined]
            self.trainer.fit_loop.state.commit()
