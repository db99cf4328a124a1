"""The state of a training: models, optimizers, samplers and plain values under one roof.

Each kind of value has a handler that knows how to snapshot, restore and broadcast it. Snapshots of tensors are written
into buffers that are kept from commit to commit, so a commit allocates nothing and costs one copy of the state.
"""

from __future__ import annotations

import copy
from typing import Any

import torch

from hora.torch.basics import rank
from hora.torch.elastic.sampler import ElasticSampler
from hora.torch.elastic.state import ObjectState
from hora.torch.functions import broadcast_object, broadcast_parameters
from hora.torch.ops import broadcast_
from hora.torch.optimizer_state import broadcast_optimizer_state

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


class ModelStateHandler(StateHandler):
    """A module: parameters and buffers."""

    def __init__(self, value: torch.nn.Module) -> None:
        super().__init__(value)
        self._saved = snapshot(value.state_dict(), None)

    def save(self) -> None:
        self._saved = snapshot(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def sync(self) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=0)
        self.save()


class OptimizerStateHandler(StateHandler):
    """An optimizer: its state and its groups' options."""

    def __init__(self, value: torch.optim.Optimizer) -> None:
        super().__init__(value)
        self._saved = snapshot(value.state_dict(), None)

    def save(self) -> None:
        self._saved = snapshot(self.value.state_dict(), self._saved)

    def restore(self) -> None:
        # The optimizer takes the tensors it is given for its own, and would then change the snapshot.
        self.value.load_state_dict(snapshot(self._saved, None))

    def sync(self) -> None:
        broadcast_optimizer_state(self.value, root_rank=0)
        self.save()


class SamplerStateHandler(StateHandler):
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
        """The world has changed: samplers divide what is left anew."""
        for handler in self._handlers.values():
            if isinstance(handler.value, ElasticSampler):
                handler.value.reset()

    def _agree(self, view: tuple[int, int, int]) -> tuple[int, int, int]:
        # One small tensor instead of an object: this runs at every commit.
        before, latest, changes = broadcast_(torch.tensor(view), 0, name="elastic.host_updates").tolist()
        return before, latest, changes

    def __setattr__(self, name: str, value: Any) -> None:
        handler = self._handlers.get(name)
        super().__setattr__(name, value)
        if handler is not None:
            handler.set_value(value)

    _handlers: dict[str, StateHandler]


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
