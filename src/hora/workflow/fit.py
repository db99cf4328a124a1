"""The fit loop: epochs over a training loader, validation, history, checkpoints; on one process or many ranks.

`step` takes the steps, `checkpoint` stores, `progress` displays. The Spark estimator takes the same steps in its own
epoch loop (`hora.spark.estimator.training` explains why).
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from hora.telemetry.meters import meter
from hora.telemetry.report import outbox
from hora.torch import elastic
from hora.torch.elastic.handlers import SnapshotHandler, StateHandler, get_handler_registry
from hora.workflow import peers
from hora.workflow.checkpoint import Checkpoints, capture_rng, restore_rng
from hora.workflow.history import History, Tally
from hora.workflow.progress import Logger, Progress
from hora.workflow.sampler import Loaders, ShardSampler
from hora.workflow.schedule import EarlyStopping
from hora.workflow.step import Metric, Recipe, Stepper, Supervised, score_all


def fit(
    model: torch.nn.Module,
    loaders: Loaders | tuple[Any, Any],
    optimizer: torch.optim.Optimizer,
    loss: Metric,
    *,
    epochs: int,
    metrics: Mapping[str, Metric] | None = None,
    recipe: Recipe | None = None,
    checkpoints: Checkpoints | str | Path | None = None,
    resume: bool = True,
    early_stopping: EarlyStopping | None = None,
    loggers: Sequence[Logger] = (),
    progress: bool = True,
    device: torch.device | str | None = None,
) -> History:
    """Train a model.

    Works alone and, after `hvd.init()`, together with the other ranks. All ranks start from rank 0's weights, gradients
    are averaged, metrics are means over all ranks; only rank 0 prints, logs and writes. In an elastic job a failure
    costs one step, and newcomers join at the end of a step (docs/elastic.md); this needs loaders from `make_loaders`,
    or a TensorLoader.

    Args:
        model: The model, which is changed in place.
        loaders: (train, valid); valid may be None. Batches are (inputs…, target).
        optimizer: A plain one is wrapped, a DistributedOptimizer is used directly.
        loss: `loss(outputs, target)`.
        epochs: How many, counted from the beginning of the training.
        metrics: Further functions like the loss, by name.
        recipe: Settings of a step.
        checkpoints: A folder: a killed run continues from its last checkpoint and, given the same seed and number of
            ranks, ends with the same weights.
        resume: False: begin anew, even if there are checkpoints.
        early_stopping: When to stop earlier.
        loggers: Write the numbers of each epoch elsewhere.
        progress: Show a line for each epoch.
        device: Where batches are moved; by default that of the model's parameters.

    Returns:
        The numbers of each epoch.

    Raises:
        ValueError: An argument is invalid.
    """
    if epochs < 1:
        raise ValueError(f"epochs must be at least 1, but it is {epochs}")
    recipe = recipe or Recipe()
    plain = getattr(model, "_orig_mod", model)  # a compiled model's own state dict has other names
    where = torch.device(device) if device is not None else next(plain.parameters()).device
    stepper = Stepper(
        model,
        peers.distribute(optimizer, plain, recipe.accumulate),
        Supervised(loss, metrics or {}, where),
        recipe=recipe,
        device=where,
    )
    folder = Checkpoints(checkpoints) if isinstance(checkpoints, (str, Path)) else checkpoints
    kind = _ElasticRun if peers.is_elastic() else _Run
    run = kind(stepper, Loaders(*loaders), plain, epochs, folder, early_stopping, loggers, progress)
    try:
        run.train(resume)
        if early_stopping is not None:
            early_stopping.finish(plain)
        return run.history
    finally:
        run.progress.close()
        for logger in loggers:
            logger.close()


@dataclass(eq=False)
class _Run:
    """One call of `fit`. Its position is (epoch, steps in it); a checkpoint holds the position and all state."""

    stepper: Stepper
    loaders: Loaders
    model: torch.nn.Module
    epochs: int
    checkpoints: Checkpoints | None
    early_stopping: EarlyStopping | None
    loggers: Sequence[Logger]
    visible: bool

    def __post_init__(self) -> None:
        self.tally, self.tally_epoch = Tally(self.stepper.objective.names, self.stepper.device), -1
        self.history = History()
        self.base_rates = [float(group["lr"]) for group in self.stepper.optimizer.param_groups]
        self.num_steps = -(-len(self.loaders.train) // self.stepper.recipe.accumulate)
        self.first_epoch = 0
        self.steps_done = 0
        self.seconds_before = 0.0
        self.stopped = False
        self.midway: dict[str, Any] | None = None
        self._show()
        _check_sharded(self.loaders.train)

    def train(self, resume: bool) -> None:
        peers.broadcast_start(self.model, self.stepper.optimizer)
        if resume:
            self._resume()
        self._begin()
        for epoch in range(self.first_epoch, self.epochs):
            if self.stopped:
                break
            self._epoch(epoch)
            self._save(epoch + 1, 0, capture_rng())

    def _show(self) -> None:
        self.progress = Progress(self.epochs, self.num_steps, visible=self.visible and peers.is_chief())

    def _begin(self) -> None:
        meter.total_steps = meter.num_steps + self.epochs * self.num_steps
        self.progress.start(self.first_epoch, self.steps_done)

    def _epoch(self, epoch: int) -> None:
        began = time.perf_counter() - self.seconds_before
        self.seconds_before = 0.0
        self._train_epoch(epoch, began)
        peers.average_buffers(self.model)
        record = {"epoch": float(epoch + 1), **self.tally.means("train")}
        if self.loaders.valid is not None:
            stepper, valid = self.stepper, self.loaders.valid
            validated = score_all(stepper.model, valid, stepper.objective, recipe=stepper.recipe, device=stepper.device)
            record |= validated.means("valid")
        record["lr"] = float(self.stepper.optimizer.param_groups[0]["lr"])
        record["seconds"] = time.perf_counter() - began
        self.history.append(record)
        if peers.is_chief():
            self.progress.finish_epoch(epoch, record)
            for logger in self.loggers:
                logger.log(record, epoch + 1)
            outbox.add(record, epoch + 1)
        if self.early_stopping is not None:
            self.stopped = self.early_stopping.should_stop(record, self.model)

    def _train_epoch(self, epoch: int, began: float) -> None:
        sampler: Any = getattr(self.loaders.train, "sampler", None)
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)
        if self.tally_epoch != epoch:
            self.tally.clear()
        self.tally_epoch = epoch
        chunks, rng_at_start = self._chunks()
        self.stepper.model.train()
        meter.restart_step()  # exclude the evaluation, or the start
        for step, chunk in enumerate(chunks, start=self.steps_done):
            self._set_learning_rate(epoch + self._share_done(step))
            self.stepper.step(chunk, self.tally)
            self._step_taken(step)
            self.progress.step()
            every = self.checkpoints.every_steps if self.checkpoints is not None else None
            if every and (epoch * self.num_steps + step + 1) % every == 0 and step + 1 < self.num_steps:
                self._save(epoch, step + 1, rng_at_start, time.perf_counter() - began)
        self.steps_done = 0

    def _share_done(self, step: int) -> float:
        return step / self.num_steps

    def _step_taken(self, step: int) -> None:
        """Hook for an elastic run: the ranks may change now."""

    def _chunks(self) -> tuple[Iterator[list[Any]], dict[str, Any]]:
        """Return the batches of each remaining step; after a resume in mid-epoch the loader skips finished ones."""
        midway, self.midway = self.midway, None
        if midway is not None:
            restore_rng(midway["rng_at_start"])
        rng_at_start = capture_rng()
        chunks = _chunked(self.loaders.train, self.stepper.recipe.accumulate)
        if midway is not None:
            for _ in range(self.steps_done):
                next(chunks)
            self.tally.load_state_dict(midway["tally"])
            for name, buffer in self.model.named_buffers():
                buffer.copy_(midway["buffers"][name])
            restore_rng(midway["rng"])
        return chunks, rng_at_start

    def _set_learning_rate(self, epoch: float) -> None:
        schedule = self.stepper.recipe.schedule
        if schedule is not None:
            factor = schedule.factor(epoch, epochs=self.epochs, size=peers.size())
            for group, rate in zip(self.stepper.optimizer.param_groups, self.base_rates, strict=True):
                group["lr"] = rate * factor

    def _save(self, epoch: int, step: int, rng_at_start: dict[str, Any], seconds: float = 0.0) -> None:
        """Write a checkpoint at (epoch, step). Collective: it includes every rank's generators and sums."""
        if self.checkpoints is None:
            return
        mine: dict[str, Any] = {"rng": capture_rng(), "rng_at_start": rng_at_start}
        if step:  # within an epoch each rank has its own sums and running statistics
            buffers = {name: buffer.cpu() for name, buffer in self.model.named_buffers()}
            mine |= {"tally": self.tally.state_dict(), "buffers": buffers}
        ranks = peers.gather(mine)
        if not peers.is_chief():
            return
        scaler, stopping = self.stepper.scaler, self.early_stopping
        state = {
            "epoch": epoch,
            "step": step,
            "seconds": seconds,
            "rows": self._rows_done(),
            "stopped": self.stopped,
            "ranks": ranks,
            "model": self.model.state_dict(),
            "optimizer": self.stepper.optimizer.state_dict(),
            "scaler": scaler.state_dict() if scaler is not None else None,
            "early_stopping": stopping.state_dict() if stopping is not None else None,
            "history": self.history.records,
        }
        with meter.checkpointing():
            self.checkpoints.save(state)
        meter.commit(f"checkpoint of epoch {epoch}" + (f", step {step}" if step else ""))

    def _rows_done(self) -> int:
        """Return the rows of this epoch that all ranks together have trained on, if known."""
        return 0

    def _resume(self) -> None:
        """Resume from rank 0's last valid checkpoint, if there is one."""
        folder = self.checkpoints
        if folder is None:
            return
        payload = peers.broadcast_bytes(folder.read_last() if peers.is_chief() else None)
        if payload is None:
            return
        state = folder.decode(payload)
        self.model.load_state_dict(state["model"])
        self.stepper.optimizer.load_state_dict(state["optimizer"])
        if self.stepper.scaler is not None and state["scaler"] is not None:
            self.stepper.scaler.load_state_dict(state["scaler"])
        if self.early_stopping is not None and state["early_stopping"] is not None:
            self.early_stopping.load_state_dict(state["early_stopping"])
        self.history = History(state["history"])
        self.first_epoch, self.stopped = state["epoch"], state["stopped"]
        self._restore_place(state)
        at = f"epoch {state['epoch'] + 1}, step {self.steps_done}"
        self.progress.say(f"resuming from {folder.folder} at {at}")

    def _restore_place(self, state: dict[str, Any]) -> None:
        ranks = state["ranks"]
        if len(ranks) != peers.size():
            warnings.warn(
                f"the checkpoint was written by {len(ranks)} ranks and {peers.size()} resume it: epoch "
                f"{state['epoch'] + 1} starts from its beginning, with different random numbers",
                stacklevel=2,
            )
            return
        mine = ranks[peers.rank()]
        if state["step"] == 0:
            restore_rng(mine["rng"])
            return
        self.steps_done, self.seconds_before, self.midway = state["step"], state["seconds"], mine


class _ElasticRun(_Run):
    """`fit` in an elastic job. Its position is (epoch, rows done), from which any number of ranks can continue.

    A failure costs one step. The share of a dead rank in the epoch's loss and metrics is lost: the epoch's means are
    those of the others.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        train = self.loaders.train
        sampler, batch_size = getattr(train, "sampler", None), getattr(train, "batch_size", None)
        if not isinstance(sampler, ShardSampler) or not sampler.shuffle or batch_size is None:
            raise ValueError(
                "in an elastic job fit has to divide the rows that are left whenever the ranks change, and cannot "
                f"with a training loader whose sampler is {type(sampler).__name__}; use hora.workflow.make_loaders"
            )
        self.sampler, self.batch_size = sampler, int(batch_size)
        self.rows_before = -1
        register_handlers()
        more = {"scaler": self.stepper.scaler, "early_stopping": self.early_stopping}
        # The history is a string: plain values are copied in every step, which is free for a string.
        self.state: Any = elastic.TorchState(
            model=self.model,
            optimizer=self.stepper.optimizer,
            tally=self.tally,
            per_step=True,
            began=False,
            epoch=0,
            rows=0,
            history="[]",
            stopped=False,
            **{name: value for name, value in more.items() if value is not None},
        )

    def train(self, resume: bool) -> None:
        """Train the remaining epochs, on any number of ranks."""
        elastic.run(self._train)(self.state, resume)

    def _train(self, state: Any, resume: bool) -> None:
        self.progress.close()
        share = -(-self.sampler.num_rows // peers.size())
        self.num_steps = -(-share // (self.batch_size * self.stepper.recipe.accumulate))
        self._show()
        if not state.began:
            if resume:
                self._resume()
                state.epoch, state.stopped = self.first_epoch, self.stopped
                state.history = json.dumps(self.history.records)
            state.began = True
            state.commit()
        self.history = History(json.loads(state.history))
        self.first_epoch = state.epoch
        self._begin()
        while state.epoch < self.epochs and not state.stopped:
            self._epoch(state.epoch)
            # Until all have met again (`_save`, `commit`) the ranks may differ; then they copy one rank's state.
            state.history, state.stopped = json.dumps(self.history.records), self.stopped
            state.epoch, state.rows = state.epoch + 1, 0
            self._save(state.epoch, 0, capture_rng())
            state.commit()

    def _chunks(self) -> tuple[Iterator[list[Any]], dict[str, Any]]:
        self.sampler.num_done = self.rows_before = self.state.rows
        return _chunked(self.loaders.train, self.stepper.recipe.accumulate), capture_rng()

    def _share_done(self, step: int) -> float:
        return float(self.state.rows / self.sampler.num_rows)

    def _step_taken(self, step: int) -> None:
        mine = (step + 1) * self.batch_size * self.stepper.recipe.accumulate
        rows = self.rows_before + min(mine, len(self.sampler)) * peers.size()
        self.state.rows = min(rows, self.sampler.num_rows)
        self.state.commit()

    def _rows_done(self) -> int:
        return int(self.state.rows)

    def _restore_place(self, state: dict[str, Any]) -> None:
        """Resume in mid-epoch with any number of ranks, if the checkpoint is of an elastic job."""
        rows, ranks = state.get("rows", 0), state["ranks"]
        self.state.rows = rows if state["step"] else 0
        if not self.state.rows:
            return
        mine = ranks[peers.rank() % len(ranks)]
        for name, buffer in self.model.named_buffers():
            buffer.copy_(mine["buffers"][name])
        self.tally.load_state_dict({"sums": sum(rank["tally"]["sums"] for rank in ranks)})
        if not peers.is_chief():
            self.tally.clear()
        self.tally_epoch = state["epoch"]


def register_handlers() -> None:
    """Register handlers for `Tally` and `EarlyStopping` in elastic states."""
    registry = get_handler_registry()
    for kind, handler in ((Tally, _TallyHandler), (EarlyStopping, _ReferenceHandler)):
        if (kind, handler) not in registry:
            registry.append((kind, handler))


class _TallyHandler(StateHandler):
    """A rank's own sums: a failed step is rolled back, and no rank copies another's."""

    def save(self) -> None:
        self._saved = {"sums": self.value.sums.clone()}  # on the device: a copy to the host would wait for it

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        """Do nothing: sums stay, and a newcomer has none."""


class _ReferenceHandler(SnapshotHandler):
    """A value that only changes between steps and whose state is replaced, never mutated: no copy is needed."""

    def save(self) -> None:
        self._saved = self.value.state_dict()

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)


def _chunked(loader: Iterable[Any], length: int) -> Iterator[list[Any]]:
    batches = iter(loader)
    while chunk := list(islice(batches, length)):
        yield chunk


def _check_sharded(loader: Any) -> None:
    sampler = getattr(loader, "sampler", None)
    plain = (torch.utils.data.RandomSampler, torch.utils.data.SequentialSampler)
    if peers.size() > 1 and isinstance(sampler, plain):
        warnings.warn(
            f"every one of the {peers.size()} ranks trains on all rows: the training loader's sampler is a "
            f"{type(sampler).__name__}; use hora.workflow.make_loaders or a DistributedSampler to share them",
            stacklevel=4,
        )
