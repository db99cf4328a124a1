"""`TorchState`: models, optimizers, samplers and plain values as one state, in memory and on disk."""

from __future__ import annotations

import gc
import io
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from hora import engine
from hora.config import EngineConfig
from hora.safe_load import load_torch
from hora.torch.basics import rank
from hora.torch.distributed.calls import Calls
from hora.torch.distributed.live import live_groups, start_over
from hora.torch.elastic.durable import DurableCommits
from hora.torch.elastic.handlers import (
    ElasticSampler,
    GeneratorStateHandler,
    ModelStateHandler,
    OptimizerStateHandler,
    SnapshotHandler,
    StateHandler,
    handler_for,
)
from hora.torch.elastic.last_step import LastStep
from hora.torch.elastic.state import ObjectState
from hora.torch.functions import allgather_object, broadcast_object
from hora.torch.ops import allgather, allreduce_, barrier
from hora.torch.optimizer.hooks import _DistributedOptimizer
from hora.torch.optimizer.parameters import parameters_of
from hora.torch.process_sets import global_process_set
from hora.torch.reduce_op import Sum

log = logging.getLogger("hora")

# Sent instead of a step number by a rank that has no state yet.
_FOUNDER = -1  # present since the start of the job, perhaps before there was any state
_NEWCOMER = -2


class TorchState(ObjectState):
    """Everything a training must not lose: `TorchState(model=net, optimizer=opt, sampler=s, epoch=0, batch=0)`.

    With `per_step=True` (or HORA_ELASTIC_PER_STEP=1) a failure costs one step. Survivors keep models and optimizers in
    place, as the last applied step left them. All other values revert to those at the first gradient of the failed
    step. A commit then copies nothing, unless it is written to disk.

    Args:
        kwargs: Keyword arguments of the function, a dict; of a state: the values that it keeps, by name.
    """

    def __init__(
        self,
        model: torch.nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        per_step: bool | None = None,
        **kwargs: Any,
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := handler_for(value)) is not None}
        object.__setattr__(self, "_handlers", handlers)
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(broadcast_object, rank, **plain)
        has_come = engine.is_initialized() and engine.current_runtime().world.generation != 0
        if has_come and not TorchState._established:
            self._origin = _NEWCOMER
        # A failed step leaves models and optimizers alone. Everything else is copied when a step begins, except
        # generators, which are used before.
        in_place = (ModelStateHandler, OptimizerStateHandler)
        self._in_place = [handler for handler in handlers.values() if isinstance(handler, in_place)]
        self._small = {name: handler for name, handler in handlers.items() if not isinstance(handler, in_place)}
        self._copied = [h for h in self._small.values() if not isinstance(h, GeneratorStateHandler)]
        if _wants_steps(handlers, per_step):
            self._last = LastStep()
            self._watch_steps()

    def enter(self) -> bool:
        if engine.has_elastic_launcher() and _default_group() is not None and not engine.is_newcomer():
            engine.admit_later()
        return True

    @property
    def per_step(self) -> bool:  # type: ignore[override]
        """Return whether a failure costs one step."""
        return self._last is not None

    def _progress(self) -> int:
        return super()._progress() + (0 if self._last is None else self._last.number)

    def _watch_steps(self) -> None:
        self._forget_copies()  # made with the handlers
        for optimizer in self._optimizers():
            optimizer.watch_steps(self)

    def step_begins(self) -> None:
        """Called by the optimizer at the first gradient of a step."""
        last = self._last
        if last is not None and not last.begun:
            last.begun = True
            super().save()
            for handler in self._copied:
                handler.save()

    def step_ends(self) -> None:
        """Called by the optimizer when the step was applied, or skipped on all ranks alike."""
        last = self._last
        if last is not None:
            last.number += 1
            last.begun = False
            last.remember()

    def persist(self, folder: str | Path, *, keep: int = 3, every: int = 1) -> bool:
        """Write commits to a folder on rank 0 from now on. If it has some, load the newest one into this state.

        Call this on all ranks before the elastic loop.

        Args:
            folder: One that rank 0 finds again: a shared one in jobs on several hosts.
            keep: How many commits to keep there.
            every: Write each commit whose number this divides.

        Returns:
            Whether a commit was loaded.
        """
        for name, value in (("keep", keep), ("every", every)):
            if value < 1:
                raise ValueError(f"{name} must be at least 1, but it is {value}")
        _check_storable(self._saved_state)
        durable = self._durable = DurableCommits(folder, keep=keep)
        self._every, self._num_unwritten = every, 0
        for handler in self._handlers.values():
            handler.lent = lambda: durable.busy  # type: ignore[method-assign]
        content = durable.read_last()
        if content is None:
            return False
        self._load_commit(content, folder)
        return True

    def _load_commit(self, content: dict[str, Any], folder: str | Path) -> None:
        handled, plain = content["handled"], content["plain"]
        for what, found, mine in (("handled", handled, self._handlers), ("plain", plain, self._saved_state)):
            if set(found) != set(mine):
                raise ValueError(
                    f"the commits in {folder} belong to another state: their {what} values are {sorted(found)}, this "
                    f"state's are {sorted(mine)}"
                )
        for name, handler in self._handlers.items():
            handler.committed = handled[name]
        self._saved_state = plain
        self._load_saved()
        self._forget_copies()

    def _write_down(self) -> None:
        if self._durable is None:
            return
        if self._last is not None and any(getattr(h.value, "has_slices_apart", False) for h in self._in_place):
            raise ValueError(
                "durable commits with per_step=True need the state of a sharded optimizer in the memory of one host, "
                "but here it is sharded over hosts or GPUs; use per_step=False, or sharded=False"
            )
        self._num_unwritten += 1
        amid = self._last is not None and self._last.begun  # inside a step the values are not those to resume with
        if self._num_unwritten >= self._every and not amid and not self._durable.busy and self._rank() == 0:
            self._write(self._durable)

    def _write(self, durable: DurableCommits) -> None:
        if self._last is not None:
            self._save_everything()
        handled = {name: handler.committed for name, handler in self._handlers.items()}
        durable.write({"handled": handled, "plain": self._saved_state})
        self._num_unwritten = 0

    def flush(self) -> None:
        """Write the last commit to disk, if commits are durable."""
        if self._durable is not None and self._rank() == 0:
            self._durable.wait()
            if self._num_unwritten or self._durable.failure is not None:
                self._write(self._durable)
                self._durable.finish()

    def save(self) -> None:
        """Copy everything. With `per_step` only what a step changes before it is applied."""
        if self._last is None:
            self._save_everything()
        elif not self._last.begun:
            self._last.remember()

    def _save_everything(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        """Go back to the last commit, or with `per_step` to the last step."""
        for handler in self._handlers.values():
            handler.discard_step()
        last = self._last
        if last is None:
            self._load_saved()
            return
        if last.begun:
            super().restore()
            for small in self._copied:
                small.restore()
        last.roll_back()

    def _load_saved(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def _forget_copies(self) -> None:
        for handler in self._in_place if self._last is not None else ():
            handler.committed = None

    def sync(self) -> None:
        """Copy the state from rank 0, or with `per_step` from a rank with the newest (collective)."""
        last = self._last
        number = self._origin if not self._synced else 0 if last is None else last.number
        group = _default_group() if self._moved else None
        mine = torch.tensor([[number, group is not None]], device="cpu")
        numbers, have_groups = allgather(mine, name="elastic.last_step").T.tolist()
        if group is not None and all(have_groups):
            start_over(engine.current_runtime(), group)
            gc.collect()  # DDP models of the last world, whose hooks are still there
        self._moved = False
        if max(numbers) == _NEWCOMER:
            raise RuntimeError(
                "the state of the training is lost: all ranks that had it died before a newcomer could copy it. "
                "Start the job again; with state.persist() it continues from the last commit on disk"
            )
        if last is not None:
            self._unite_slices()
            self._sync_steps(last, numbers)
        else:
            for handler in self._handlers.values():
                handler.sync()
            super().sync()
        self._synced = TorchState._established = True

    def _optimizers(self) -> list[_DistributedOptimizer]:
        return [h.value for h in self._handlers.values() if isinstance(h.value, _DistributedOptimizer)]

    def _unite_slices(self) -> None:
        """Assemble sharded optimizers on every rank that has slices of them (collective)."""
        for handler in self._in_place:
            if hasattr(handler.value, "is_sharded"):
                of_all = allgather_object(handler.value.slices(), "elastic.slices")
                handler.value.unite({which: its for found in of_all for which, its in found.items()})

    def _sync_steps(self, last: LastStep, numbers: list[int]) -> None:
        newest = max(numbers)
        root = numbers.index(newest)
        if last.number == newest:
            last.roll_back_generators()
        is_behind = 0 <= last.number < newest
        if is_behind:  # the rank with the newest state may die as well while it sends it
            for handler in self._in_place:
                handler.save()
        try:
            if newest < 0 or min(numbers) < newest:
                for handler in self._in_place:
                    handler.broadcast(root)
            self._broadcast_values(root)
        except BaseException:
            if is_behind:
                for handler in self._in_place:
                    handler.restore()
            raise
        finally:
            self._forget_copies()
        last.number, last.rolled_back = max(newest, 0), False
        values = [handler.value for handler in self._handlers.values()]
        modules = [value for value in values if isinstance(value, torch.nn.Module)]
        last.watch(
            [module for module in modules if not self._is_average(module)],
            [value for value in values if isinstance(value, torch.Generator)],
        )

    def _is_average(self, module: torch.nn.Module) -> bool:
        """Return whether this is a copy that is updated after steps, such as an EMA: no forward pass changes it."""
        trained = {p for optimizer in self._optimizers() for p in parameters_of(optimizer)}
        in_use = module.training and not isinstance(module, torch.optim.swa_utils.AveragedModel)
        return not in_use and trained.isdisjoint(module.parameters())

    def _broadcast_values(self, root: int) -> None:
        small = {name: handler for name, handler in self._small.items() if isinstance(handler, SnapshotHandler)}
        for handler in small.values():
            handler.save()
        content = {name: handler.committed for name, handler in small.items()}
        plain = {name: getattr(self, name) for name in self._saved_state}
        content, plain = broadcast_object((content, plain), root, "elastic.values")
        if self._rank() != root:
            for name, handler in small.items():
                handler.committed = content[name]
                handler.restore()
            for name, value in plain.items():
                setattr(self, name, value)
        for name, own in self._small.items():
            if name not in small:
                own.sync()

    def end_together(self) -> None:
        """With `per_step`, wait until all ranks have made the last step: one that exits cannot send it any more."""
        if self._last is not None:
            barrier()

    def reset(self) -> None:
        """Handle a change of the world: samplers divide the rest again, and sharded optimizers drop their slices."""
        self._moved = True
        sharded = [h.value for h in self._handlers.values() if getattr(h.value, "is_sharded", False)]
        if self._last is not None:  # `sync` assembles sharded optimizers
            if self._last.begun:
                self.restore()  # hosts changed inside a step
        elif sharded:
            for optimizer in sharded:
                optimizer.leave_world()
            # Every rank's snapshot is whole. Other ranks may have written to the old shared memory since.
            self.restore()
        else:
            for optimizer in self._optimizers():
                optimizer.change_worlds()
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _agree(self, view: tuple[int, int, int]) -> tuple[int, int, int]:
        # One small tensor instead of an object, because this runs at every commit. And a sum, to which only rank 0
        # contributes, instead of a broadcast: no rank continues before all have saved, so a commit that returned cannot
        # be lost.
        mine = torch.tensor(view if self._rank() == 0 else (0, 0, 0), device="cpu")
        before, latest, changes = allreduce_(mine, op=Sum, name="elastic.host_updates").tolist()
        return before, latest, changes

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        super().__setattr__(name, value)
        if handler is not None:
            handler.set_value(value)
            if self._last is not None:
                self._watch_steps()

    _handlers: dict[str, StateHandler]
    _last: LastStep | None = None  # with `per_step`
    _established = False  # this process has taken part in a training before, perhaps with another state
    _origin = _FOUNDER
    _synced = False
    _moved = False  # into another world, since the last `sync`
    _durable: DurableCommits | None = None
    _every = 1
    _num_unwritten = 0


def _default_group() -> Calls | None:
    """Return torch's default group if it is one of this backend's."""
    group: Any = torch.distributed.group.WORLD if torch.distributed.is_available() else None
    return group if group in live_groups() else None


def _wants_steps(handlers: Mapping[str, StateHandler], asked: bool | None) -> bool:
    """Return whether failures cost one step.

    Raises ValueError if the caller asked for it and it is not possible; if only the environment asks, falls back to
    commits.
    """
    if asked is None:
        config = engine.current_runtime().config if engine.is_initialized() else EngineConfig.from_env()
        wanted = config.elastic_per_step
    else:
        wanted = asked
    obstacle = _obstacle(handlers) if wanted else ""
    if obstacle and asked:
        raise ValueError(f"per_step=True {obstacle}")
    if obstacle and any(isinstance(handler.value, _DistributedOptimizer) for handler in handlers.values()):
        log.warning("HORA_ELASTIC_PER_STEP=1 %s: failures roll back to the last commit", obstacle)
    return wanted and not obstacle


def _obstacle(handlers: Mapping[str, StateHandler]) -> str:
    optimizers = [h.value for h in handlers.values() if isinstance(h.value, torch.optim.Optimizer)]
    distributed = [optimizer for optimizer in optimizers if isinstance(optimizer, _DistributedOptimizer)]
    if not distributed:
        return "needs a hvd.DistributedOptimizer in the state, which reports the steps"
    if len({id(optimizer) for optimizer in optimizers}) > 1:
        names = ", ".join(name for name, h in handlers.items() if isinstance(h.value, torch.optim.Optimizer))
        return (
            f"needs one optimizer in the state, but there are several ({names}): a failure between their steps would "
            "repeat the first one's; use per_step=False and call state.commit() at the end of every iteration, "
            "which rolls the whole iteration back"
        )
    for optimizer in distributed:
        if getattr(optimizer, "keeps_outer_state", False):
            return (
                "does not work with hvd.LocalSGD, DiLoCo and DESLOC, whose hosts have parameters of their own "
                "between two exchanges; use per_step=False"
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            return "does not work with LBFGS, which moves the parameters several times in a step; use per_step=False"
        if optimizer.process_set is not global_process_set:
            return (
                "needs optimizers of all ranks, but one belongs to a process set, which ends with its world; use "
                "per_step=False and the plain optimizer in the state, and make the set and hvd.DistributedOptimizer in "
                "the training function, which every new world enters (HOROVOD_DYNAMIC_PROCESS_SETS=1)"
            )
    return ""


def _check_storable(values: dict[str, Any]) -> None:
    """Raise ValueError for plain values that cannot be read back without running code."""
    for name, value in values.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            load_torch(buffer.getvalue()).plain()
        except Exception as error:  # raised by pickle, torch or the user's class
            raise ValueError(
                f"{name} cannot be part of a durable commit: it is a {type(value).__qualname__}, but only tensors, "
                "numbers, strings, and lists, tuples and dictionaries of them can be read back"
            ) from error
