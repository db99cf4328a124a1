"""The state of a training: models, optimizers, samplers and plain values under one roof, in memory and on disk."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch

from hora.torch.basics import rank
from hora.torch.elastic.durable import DurableCommits
from hora.torch.elastic.handlers import StateHandler, handler_for
from hora.torch.elastic.sampler import ElasticSampler
from hora.torch.elastic.state import ObjectState
from hora.torch.functions import broadcast_object
from hora.torch.ops import allreduce_
from hora.torch.reduce_op import Sum

__all__ = ["TorchState"]


class TorchState(ObjectState):
    """Everything a training must not lose: `TorchState(model=net, optimizer=opt, sampler=s, epoch=0, batch=0)`."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := handler_for(value)) is not None}
        object.__setattr__(self, "_handlers", handlers)
        for name, handler in handlers.items():
            object.__setattr__(self, name, handler.value)
        plain = {name: value for name, value in kwargs.items() if name not in handlers}
        super().__init__(broadcast_object, rank, **plain)

    def persist(self, folder: str | Path, *, keep: int = 3, every: int = 1) -> bool:
        """From now on rank 0 also writes every `every`-th commit to a folder, and keeps the last `keep` there.

        If the folder has commits, this state takes over the newest: returns whether it did. Call it on all ranks,
        before the elastic loop, with a folder that rank 0 will find again (in jobs on several hosts: a shared one).
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
        self._take_over(content, folder)
        return True

    def _take_over(self, content: dict[str, Any], folder: str | Path) -> None:
        handled, plain = content["handled"], content["plain"]
        for what, found, mine in (("handled", handled, self._handlers), ("plain", plain, self._saved_state)):
            if set(found) != set(mine):
                raise ValueError(
                    f"the commits in {folder} are of another state: their {what} values are {sorted(found)}, this "
                    f"state's are {sorted(mine)}"
                )
        for name, handler in self._handlers.items():
            handler.committed = handled[name]
        self._saved_state = plain
        self.restore()

    def _write_down(self) -> None:
        if self._durable is None:
            return
        self._num_unwritten += 1
        if self._num_unwritten >= self._every and not self._durable.busy and self._rank() == 0:
            self._write(self._durable)

    def _write(self, durable: DurableCommits) -> None:
        handled = {name: handler.committed for name, handler in self._handlers.items()}
        durable.write({"handled": handled, "plain": self._saved_state})
        self._num_unwritten = 0

    def flush(self) -> None:
        """Have the last commit on disk, if commits are written there."""
        if self._durable is not None and self._rank() == 0:
            self._durable.finish()
            if self._num_unwritten:
                self._write(self._durable)
                self._durable.finish()

    def save(self) -> None:
        for handler in self._handlers.values():
            handler.save()
        super().save()

    def restore(self) -> None:
        for handler in self._handlers.values():
            handler.restore()
        super().restore()

    def sync(self) -> None:
        for handler in self._handlers.values():
            handler.sync()
        super().sync()

    def reset(self) -> None:
        """The world has changed: samplers divide what is left anew, and sharded optimizers have lost their slices."""
        sharded = [h.value for h in self._handlers.values() if getattr(h.value, "is_sharded", False)]
        for optimizer in sharded:
            optimizer.leave_world()
        if sharded:
            # Every rank's snapshot is whole. Their old memory is shared with ranks that may have written to it since.
            self.restore()
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _agree(self, view: tuple[int, int, int]) -> tuple[int, int, int]:
        # One small tensor instead of an object, because this runs at every commit. And a sum, to which only rank 0 adds
        # anything, instead of a broadcast: no rank goes on before all have saved, so no commit that returned can be lost.
        mine = torch.tensor(view if self._rank() == 0 else (0, 0, 0), device="cpu")
        before, latest, changes = allreduce_(mine, op=Sum, name="elastic.host_updates").tolist()
        return before, latest, changes

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        super().__setattr__(name, value)
        if handler is not None:
            handler.set_value(value)

    _handlers: dict[str, StateHandler]
    _durable: DurableCommits | None = None
    _every = 1
    _num_unwritten = 0


def _check_storable(values: dict[str, Any]) -> None:
    """ValueError for plain values that could not be read back without running code."""
    for name, value in values.items():
        buffer = io.BytesIO()
        try:
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # pickle's, torch's, or whatever the user's class raises
            raise ValueError(
                f"{name} cannot be part of a durable commit: it is a {type(value).__qualname__}, but only tensors, "
                "numbers, texts, and lists, tuples and dictionaries of them are read back"
            ) from error
