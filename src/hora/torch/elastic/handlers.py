"""State handlers: save, restore and synchronize one kind of value each, such as models, optimizers and samplers.

Snapshots reuse their tensors from commit to commit, so a commit allocates nothing and costs one copy of the state.
`torch_state` uses the handlers; users may register their own.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Iterator, Sized
from itertools import cycle, islice
from typing import Any

import torch
from torch.utils.data import Sampler

from hora import engine
from hora.torch.functions import broadcast_object, broadcast_parameters
from hora.torch.optimizer.hooks import _DistributedOptimizer
from hora.torch.optimizer.state import broadcast_optimizer_state


class ElasticSampler(Sampler[int]):
    """Divides the remaining indices of this epoch among the ranks.

    Call `record_batch` after each batch and `set_epoch` at the end of each epoch. Recorded samples take effect at the
    next `reset`, which follows a change of the world.

    Args:
        dataset: The dataset whose rows are shared among the ranks.
        shuffle: Whether rows come in random order.
        seed: Of the order of rows; the same on every rank.
    """

    def __init__(self, dataset: Sized, shuffle: bool = True, seed: int = 0) -> None:
        self.dataset = dataset
        self.shuffle = shuffle
        self.seed = seed
        self.epoch = 0
        self.processed_num = 0
        self.num_replicas = 1
        self.rank = 0
        self._skipped = 0  # of this rank's rows: those before a newcomer's first one
        self._agreed: tuple[int, int, int] | None = None
        self.reset()

    def set_epoch(self, epoch: int) -> None:
        """Begin another epoch with all samples remaining. Call it at the end of an epoch, or at its beginning."""
        if epoch == self.epoch and self._skipped:
            return  # a newcomer has joined in the middle of it
        self.epoch = epoch
        self.processed_num = 0
        self.reset()

    def record_batch(self, batch_idx: int, batch_size: int) -> None:
        """Record that all ranks have processed one more batch of this size."""
        self.processed_num += batch_size * self.num_replicas

    def record_indices(self, indices: set[int]) -> None:
        """Record that all ranks together have processed this many more samples."""
        self.processed_num += len(indices)

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "processed_num": self.processed_num}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.epoch = state_dict["epoch"]
        self.processed_num = state_dict["processed_num"]
        self.reset()

    def reset(self) -> None:
        """Divide the remaining samples among the ranks of the current world."""
        world = engine.current_world()
        if world is not None:
            self.num_replicas, self.rank = world.size, world.rank
        if self._agreed is not None and self._agreed[0] == self.epoch:
            _, self.num_replicas, self.rank = self._agreed
        self._divide(0)

    def agree(self, epoch: int, num_replicas: int, rank: int) -> None:
        """Divide a coming epoch among so many ranks, as others have done it already; this one has the share `rank`."""
        self._agreed = epoch, num_replicas, rank

    def resume(self, epoch: int, num_replicas: int, rank: int, skipped: int) -> None:
        """Continue an epoch that others have begun, with one of their shares, after so many of its rows."""
        self.epoch, self.num_replicas, self.rank = epoch, num_replicas, rank
        self.agree(epoch, num_replicas, rank)
        self.processed_num = 0
        self._divide(skipped)

    def _divide(self, skipped: int) -> None:
        self._skipped = skipped
        order = list(range(len(self.dataset)))
        if self.shuffle:
            random.Random(self.seed + self.epoch).shuffle(order)
        self.remaining_indices = order[self.processed_num :]
        self.num_samples = math.ceil(len(self.remaining_indices) / self.num_replicas)
        self.total_size = self.num_samples * self.num_replicas

    def __iter__(self) -> Iterator[int]:
        # Every rank gets the same number of samples: the first ones are repeated as needed.
        begin = self.rank + self._skipped * self.num_replicas
        return islice(cycle(self.remaining_indices), begin, self.total_size, self.num_replicas)

    def __len__(self) -> int:
        return self.num_samples - self._skipped


class StateHandler:
    """Saves, restores and synchronizes one kind of value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def save(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define save()")

    def restore(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define restore()")

    def sync(self) -> None:
        raise NotImplementedError(f"{type(self).__name__} must define sync()")

    def discard_step(self) -> None:
        """Forget the part of a step that was made before it failed; `restore` may follow."""

    def set_value(self, value: Any) -> None:
        """Track another value from now on, and save it."""
        self.value = value
        self.save()

    def lent(self) -> bool:
        """Return whether a durable commit still reads the last snapshot, so that `save` must not overwrite it."""
        return False

    @property
    def committed(self) -> Any:
        """The last snapshot, for durable commits: tensors, numbers, strings, and lists and dictionaries of them."""
        raise TypeError(f"{type(self).__name__} must define `committed` to be part of a durable commit")

    @committed.setter
    def committed(self, saved: Any) -> None:
        raise TypeError(f"{type(self).__name__} must define `committed` to be part of a durable commit")


class SnapshotHandler(StateHandler):
    """Handler that keeps a state dict in `_saved`; None if there is none."""

    _saved: Any = None

    def __init__(self, value: Any) -> None:
        super().__init__(value)
        self.save()

    def save(self) -> None:
        # Into the buffers of the last one.
        self._saved = snapshot(self.value.state_dict(), None if self.lent() else self._saved)

    def restore(self) -> None:
        # The value may keep the loaded tensors and then modify them.
        self.value.load_state_dict(snapshot(self._saved, None))

    def sync(self) -> None:
        self.broadcast(0)
        self.save()

    def broadcast(self, root_rank: int) -> None:
        """Load the root's value (collective) without saving it."""
        name = f"elastic.{type(self.value).__name__}"
        self.value.load_state_dict(broadcast_object(self.value.state_dict(), root_rank=root_rank, name=name))

    @property
    def committed(self) -> Any:
        return self._saved

    @committed.setter
    def committed(self, saved: Any) -> None:
        self._saved = saved


class ModelStateHandler(SnapshotHandler):
    """Handles a module: parameters and buffers."""

    def restore(self) -> None:
        self.value.load_state_dict(self._saved)

    def broadcast(self, root_rank: int) -> None:
        broadcast_parameters(self.value.state_dict(), root_rank=root_rank)


class OptimizerStateHandler(SnapshotHandler):
    """Handles an optimizer: its state, its groups' options, and the gradients of the passes since its last step.

    These gradients are each rank's own, as long as the ranks go back to the same commit. A rank may have made a commit
    more than another when the world breaks; then, and in newcomers, the root's take their place.
    """

    _num_saved = 0  # which commit it is, by the root's count

    def save(self) -> None:
        self._num_saved += 1
        super().save()
        if isinstance(self.value, _DistributedOptimizer) and (kept := self.value.accumulated()):
            self._saved[_ACCUMULATED] = snapshot(kept, None)

    def restore(self) -> None:
        kept = self._saved.get(_ACCUMULATED, {})
        self.value.load_state_dict(
            snapshot({key: value for key, value in self._saved.items() if key != _ACCUMULATED}, None)
        )
        if isinstance(self.value, _DistributedOptimizer):
            self.value.resume_step(snapshot(kept, None))

    def discard_step(self) -> None:
        if isinstance(self.value, _DistributedOptimizer):
            self.value.discard_step()

    def broadcast(self, root_rank: int) -> None:
        broadcast_optimizer_state(self.value, root_rank=root_rank)
        if isinstance(self.value, _DistributedOptimizer):
            mine = self._num_saved, self.value.accumulated()
            self._num_saved, kept = broadcast_object(mine, root_rank=root_rank, name="elastic.accumulated")
            if mine[0] != self._num_saved:
                self.value.discard_step()
                self.value.resume_step(kept)


class SamplerStateHandler(SnapshotHandler):
    """Handles an ElasticSampler (epoch and progress) or a learning-rate scheduler."""


class ScalerStateHandler(SnapshotHandler):
    """Handles a GradScaler."""

    def discard_step(self) -> None:
        # What it remembers from `unscale_` to `update` is no part of its state dict.
        if self.value.is_enabled():
            self.value._per_optimizer_states.clear()


class GeneratorStateHandler(SnapshotHandler):
    """Handles a torch.Generator."""

    def save(self) -> None:
        self._saved = self.value.get_state()

    def restore(self) -> None:
        self.value.set_state(self._saved)

    def broadcast(self, root_rank: int) -> None:
        self.value.set_state(broadcast_object(self.value.get_state(), root_rank=root_rank, name="elastic.generator"))


_ACCUMULATED = "accumulated"  # beside the entries of an optimizer's state dict, which no optimizer loads

_registry: list[tuple[type, type[StateHandler]]] = [
    (torch.nn.Module, ModelStateHandler),
    (torch.optim.Optimizer, OptimizerStateHandler),
    (ElasticSampler, SamplerStateHandler),
    (torch.optim.lr_scheduler.LRScheduler, SamplerStateHandler),
    (torch.amp.GradScaler, ScalerStateHandler),
    (torch.Generator, GeneratorStateHandler),
]


def get_handler_registry() -> list[tuple[type, type[StateHandler]]]:
    """Return pairs of (type, handler class); the first match wins."""
    return _registry


def set_handler_registry(registry: list[tuple[type, type[StateHandler]]]) -> None:
    global _registry
    _registry = registry


def handler_for(value: Any) -> StateHandler | None:
    """Return a new handler for this value; None for a plain value."""
    return next((handler(value) for kind, handler in _registry if isinstance(value, kind)), None)


def snapshot(value: Any, into: Any) -> Any:
    """Return a deep copy of a state dict. Reuses the tensors of `into`, an earlier snapshot, where they fit."""
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
    if not isinstance(into, torch.Tensor) or source.layout is not torch.strided:
        return False
    return all(getattr(into, name) == getattr(source, name) for name in ("shape", "dtype", "device", "layout"))
