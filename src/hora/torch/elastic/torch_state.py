"""The state of a training: models, optimizers, samplers and plain values under one roof.

Each kind of value has a handler that knows how to snapshot, restore and broadcast it. Snapshots of tensors are written
into buffers that are kept from commit to commit, so a commit allocates nothing and costs one copy of the state.
"""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch

from hora.torch.basics import rank
from hora.torch.elastic.durable import DurableCommits
from hora.torch.elastic.sampler import ElasticSampler
from hora.torch.elastic.state import ObjectState
from hora.torch.functions import broadcast_object, broadcast_parameters
from hora.torch.ops import allreduce_
from hora.torch.optimizer_state import broadcast_optimizer_state
from hora.torch.reduce_op import Sum

__all__ = [
    "ModelStateHandler",
    "OptimizerStateHandler",
    "SamplerStateHandler",
    "StateHandler",
    "TorchState",
    "get_handler_registry",
    "set_handler_registry",
]


class StateHandler:
    """How one kind of value is saved, restored and synchronised."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise TypeError(f"{type(self).__name__} must define save()")

    def restore(self) -> None:
        raise TypeError(f"{type(self).__name__} must define restore()")

    def sync(self) -> None:
        raise TypeError(f"{type(self).__name__} must define sync()")

    def set_value(self, value: Any) -> None:
        """Watch another value from now on, and save it."""
        self.value = value
        self.save()

    def lent(self) -> bool:
        """Whether somebody reads what was saved last, so that the next `save` must not write over it."""
        return False

    @property
    def committed(self) -> Any:
        """What was saved last, for durable commits: tensors, numbers, texts, and lists and dictionaries of them."""
        raise TypeError(f"{type(self).__name__} must define `committed` to be part of a durable commit")

    @committed.setter
    def committed(self, saved: Any) -> None:
        raise TypeError(f"{type(self).__name__} must define `committed` to be part of a durable commit")


class _SnapshotHandler(StateHandler):
    """A handler that keeps a state dict in `_saved`."""

    _saved: Any

    @property
    def committed(self) -> Any:
        return self._saved

    @committed.setter
    def committed(self, saved: Any) -> None:
        self._saved = saved

    @property
    def _buffers(self) -> Any:
        """Where the next snapshot may go."""
        return None if self.lent() else self._saved


class ModelStateHandler(_SnapshotHandler):
    """A module: parameters and buffers."""

    def __init__(self, value: torch.nn.Module) -> None:
        super().__init__(value)
        self._saved = snapshot(value.state_dict(), None)

    def save(self) -> None:
        self._saved = snapshot(self.value.state_dict(), self._buffers)

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(_SnapshotHandler):
    """An optimizer: its state and its groups' options."""

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value)
        self._saved = snapshot(value.state_dict(), None)

    def save(self) -> None:
        self._saved = snapshot(self.value.state_dict(), self._buffers)

    def restore(self) -> None:
        # The optimizer takes the tensors it is given for its own, and would then change the snapshot.
        self.value.load_state_dict(snapshot(self._saved, None))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(_SnapshotHandler):
    """An ElasticSampler: the epoch and how far it has come."""

    def __init__(self, value: ElasticSampler) -> None:
        super().__init__(value)
        self._saved = copy.deepcopy(value.state_dict())

    def save(self) -> None:
        self._saved = copy.deepcopy(self.value.state_dict())

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=0, name="elastic.sampler"))
        self.save()


_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Pairs of (type, handler class); the first match wins."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    global _registry
    _registry = registry


def _handler_for(value: Any) -> StateHandler | None:
    for kind, handler in _registry:
        if isinstance(value, kind):
            return handler(value)
    return None


class TorchState(ObjectState):
    """Everything a training must not lose: `TorchState(model=net, optimizer=opt, sampler=s, epoch=0, batch=0)`."""

    def __init__(
        self, model: torch.nn.Module | None = None, optimizer: torch.optim.Optimizer | None = None, **kwargs: Any
    ) -> None:
        kwargs.update(model=model, optimizer=optimizer)
        handlers = {name: handler for name, value in kwargs.items() if (handler := _handler_for(value)) is not None}
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

    def commit(self) -> None:
        """Save, write to disk if asked to, then raise HostsUpdatedInterrupt if rank 0 has heard of new hosts."""
        self.save()
        if self._durable is not None:
            self._num_unwritten += 1
            if self._num_unwritten >= self._every and not self._durable.busy and self._rank() == 0:
                self._write(self._durable)
        self.check_host_updates()

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
        # anything, instead of a broadcast: nobody goes on before all have saved, so no commit that returned can be lost.
        mine = torch.tensor(view if self._rank() == 0 else (0, 0, 0))
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


def snapshot(value: Any, into: Any) -> Any:
    """A deep copy of a state dict. Tensors go into those of `into`, an earlier snapshot, where they fit."""
    if isinstance(value, torch.Tensor):
        source = value.detach()
        return into.copy_(source) if _fits(into, source) else source.clone()
    if isinstance(value, dict):
        earlier = into if isinstance(into, dict) else {}
        copied = copy.copy(value)  # keeps OrderedDict and its metadata
        for key, item in value.items():
            copied[key] = snapshot(item, earlier.get(key))
        return copied
    if isinstance(value, list):
        earlier_items = into if isinstance(into, list) and len(into) == len(value) else [None] * len(value)
        return [snapshot(item, old) for item, old in zip(value, earlier_items, strict=True)]
    return copy.deepcopy(value)


def _fits(into: Any, source: torch.Tensor) -> bool:
    return (
        isinstance(into, torch.Tensor)
        and into.shape == source.shape
        and into.dtype == source.dtype
        and into.device == source.device
        and into.layout == source.layout == torch.strided
    )
