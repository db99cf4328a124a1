"""Optimizer state of a sharded optimizer: sharded over the ranks, and assembled on request.

State tensors with the shape of their parameter are sharded like it. In shared memory they exist once, and every rank
sees all of them as `optimizer.state[parameter]`. Everything else ("step" and other scalars) is the same for all
elements of a group, and every rank keeps its own. `ShardedOptimizer` uses this class.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.engine.request import Kind
from hora.engine.shm.segment import SharedMemory
from hora.torch.optimizer.bucket_plan import BucketSpec, view_like
from hora.torch.optimizer.buckets import apart
from hora.torch.optimizer.copies import bare_copy, copied
from hora.torch.sharded.shards import Shard, Shards

VALUES = ""  # the parameters themselves, among the entries of the state
Place = tuple[int, str]  # bucket and entry


@dataclass(frozen=True)
class ParameterKinds:
    """Parameters that can share a shard: of one group, and with the same scalars ("step") in their state."""

    of: dict[torch.Tensor, int]
    groups: list[int]  # the parameter group of each kind


def kinds_of(optimizer: Any, parameters: Sequence[torch.Tensor]) -> ParameterKinds:
    """Return the kinds of these parameters for the current state."""
    group_of = {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}
    found: dict[tuple[int, object], int] = {}
    of = {p: found.setdefault((group_of[p], _scalar_values(optimizer.state.get(p))), len(found)) for p in parameters}
    return ParameterKinds(of, [group for group, _ in found])


def _scalar_values(state: dict[str, Any] | None) -> object:
    if not state:
        return None
    return tuple(sorted((key, float(value)) for key, value in state.items() if key in _SCALARS and value is not None))


class ShardState:
    """Location of each element's optimizer state. `optimizer` is the user's; `inner` steps the shards."""

    def __init__(self, optimizer: Any, specs: Sequence[BucketSpec], kinds: ParameterKinds) -> None:
        self._optimizer = optimizer
        self.specs = specs
        self.parameter_kinds = kinds
        self.entries: dict[Place, torch.dtype] = {}  # what exists for every element, the parameters included
        for index, spec in enumerate(specs):
            keys = {VALUES: spec.parameters[0].dtype}
            for group in sorted({kinds.groups[kinds.of[p]] for p in spec.parameters}):
                keys.update(_elementwise_state(optimizer, group, spec.parameters[0]))
            self.entries.update({(index, key): keys[key] for key in sorted(keys)})
        # What this rank has whole (in shared memory, and the parameters), and its slice of every entry.
        self.flats: dict[Place, torch.Tensor] = {}
        self.slices: dict[Place, torch.Tensor] = {}
        self._lent: dict[Place, torch.Tensor] = {}  # what is shared, for users: on storages that they may move
        self._adopted = False
        self._num_entries = -1  # of this rank's shards; -1: look for new ones

    def num_bytes(self) -> int:
        """Return the size of parameters and state in shared memory."""
        return sum(SharedMemory.space(self.specs[i].num_elements, dtype) for (i, _), dtype in self.entries.items())

    def divide(self, shards: Shards, inner: Any, memory: SharedMemory | None) -> None:
        """Shard the current state of the whole parameters."""
        self._shards, self._inner = shards, inner
        for place, dtype in self.entries.items():
            bucket = shards.buckets[place[0]]
            if place[1] == VALUES:
                self.flats[place] = bucket.values
            elif memory is not None:
                self.flats[place] = memory.allocate(bucket.spec.num_elements, dtype)
            mine, whole = bucket.part, self.flats.get(place)
            self.slices[place] = torch.zeros_like(bucket.values[mine], dtype=dtype) if whole is None else whole[mine]
        self.load(own_slices_only=True)

    def load(self, *, own_slices_only: bool = False) -> None:
        """Shard the whole state in `optimizer.state`.

        Between steps every rank writes all of it to shared memory, so it is enough if one rank has loaded a checkpoint.
        Inside a step others may already step their slices.
        """
        whole = {p: state for p, state in self._optimizer.state.items() if p in self.parameter_kinds.of}
        for parameter in whole:
            del self._optimizer.state[parameter]
        self._inner.state.clear()
        for index, bucket in enumerate(self._shards.buckets):
            for key in _elementwise_keys(whole, bucket.spec.parameters):
                # A copy: the whole state may be views of what is overwritten.
                dtype, device = self.entries[index, key], bucket.values.device
                flat = torch.zeros(bucket.spec.num_elements, dtype=dtype, device=device)
                for parameter, view in zip(bucket.spec.parameters, bucket.spec.views(flat), strict=True):
                    value = whole.get(parameter, {}).get(key)
                    if isinstance(value, torch.Tensor):
                        view.copy_(value)
                if self._shards.shared and not own_slices_only:
                    self.flats[index, key].copy_(flat)
                else:
                    self.slices[index, key].copy_(flat[bucket.part])
        for shard in self._shards.owned:
            members = [parameter for parameter in shard.members if whole.get(parameter)]
            if members:
                homes = {key: self._home(shard, key) for key in _elementwise_keys(whole, members)}
                self._inner.state[shard.parameter] = {**self._scalars(whole, shard.kind), **homes}
        for index, group in enumerate(self._inner.param_groups):
            for idle in group["params"]:
                scalars = self._scalars(whole, index)
                if idle not in self._inner.state and scalars:
                    keys = _elementwise_keys(whole, self._members(index))
                    self._inner.state[idle] = {**{key: torch.zeros_like(idle) for key in keys}, **scalars}
        self._adopted, self._num_entries = False, -1
        if self._shards.shared and self._inner.state:
            self.present()

    def fits(self) -> bool:
        """Return whether the whole state in `optimizer.state` fits the current layout."""
        wanted = kinds_of(self._optimizer, list(self.parameter_kinds.of))
        pairs = {(self.parameter_kinds.of[p], wanted.of[p]) for p in wanted.of}
        keys = [_elementwise_keys(dict(self._optimizer.state), spec.parameters) for spec in self.specs]
        known = all((index, key) in self.entries for index, its in enumerate(keys) for key in its)
        return known and len(pairs) == len({mine for mine, _ in pairs})

    def _members(self, kind: int) -> list[torch.Tensor]:
        return [parameter for parameter, its in self.parameter_kinds.of.items() if its == kind]

    def _scalars(self, whole: dict[torch.Tensor, dict[str, Any]], kind: int) -> dict[str, Any]:
        for parameter in self._members(kind):
            state = whole.get(parameter)
            if state:
                keys = _elementwise_keys(whole, [parameter])
                return {key: copied(value) for key, value in state.items() if key not in keys}
        return {}

    def adopt(self) -> None:
        """Move state that the optimizer created in the first step of this layout into the slices."""
        if self._adopted:
            if any(lent.data_ptr() != self.flats[place].data_ptr() for place, lent in self._lent.items()):
                self.present()
            return
        self._adopted = True
        for shard in self._shards.owned:
            state = self._inner.state.get(shard.parameter, {})
            for key, value in state.items():
                is_whole = isinstance(value, torch.Tensor) and value.shape == shard.parameter.shape
                if is_whole and (shard.bucket, key) in self.slices:
                    state[key] = self._home(shard, key).copy_(value)
        if self._shards.shared:
            self.present()

    def gather_new(self) -> bool:
        """Gather entries that the optimizer has made since the state was sharded; return whether there are some.

        A momentum that is switched on later makes them, on all ranks in the same step (collective).
        """
        shards = self._inner.param_groups
        known = self._num_entries
        self._num_entries = sum(len(self._inner.state.get(p, ())) for group in shards for p in group["params"])
        if self._num_entries == known:
            return False
        is_new = False
        for index, bucket in enumerate(self._shards.buckets):
            kinds = {self.parameter_kinds.of[parameter] for parameter in bucket.spec.parameters}
            found = {key: value for kind in sorted(kinds) for key, value in self._new_entries(index, kind).items()}
            is_new = is_new or bool(found)
            for key in sorted(found):
                self.entries[index, key] = found[key].dtype
                mine = torch.zeros_like(bucket.values[bucket.part], dtype=found[key].dtype)
                for shard in self._shards.owned:
                    value = self._inner.state.get(shard.parameter, {}).get(key)
                    if shard.bucket == index and isinstance(value, torch.Tensor):
                        mine[shard.part].copy_(value)
                self.slices[index, key] = mine
                if self._shards.shared:
                    self.flats[index, key] = self._gather(index, key, mine)
        return is_new

    def _new_entries(self, index: int, kind: int) -> dict[str, torch.Tensor]:
        """Return the elementwise entries of this kind that bucket `index` does not have, as one shard has them."""
        shard, state = self._inner_state(kind)
        return {
            key: state[key] for key in _elementwise_keys({shard: state}, [shard]) if (index, key) not in self.entries
        }

    def _home(self, shard: Shard, key: str) -> torch.Tensor:
        return self.slices[shard.bucket, key][shard.part]

    def present(self) -> None:
        """Put the whole state into `optimizer.state`: views of shared memory, or gathered (then collective)."""
        flats = self._lend() if self._shards.shared else self._gathered()
        places = {
            parameter: (index, offset)
            for index, bucket in enumerate(self._shards.buckets)
            for offset, parameter in zip(bucket.spec.offsets, bucket.spec.parameters, strict=True)
        }
        for parameter, kind in self.parameter_kinds.of.items():  # in the order of a plain optimizer's state
            index, offset = places[parameter]
            _, mine = self._inner_state(kind)
            for key, value in mine.items():
                flat = flats.get((index, key))
                # One copy each: a plain optimizer counts the steps of every parameter separately.
                whole = copied(value) if flat is None else view_like(flat, offset, parameter)
                self._optimizer.state[parameter][key] = whole

    def _lend(self) -> dict[Place, torch.Tensor]:
        for place, flat in self.flats.items():
            if place not in self._lent or self._lent[place].data_ptr() != flat.data_ptr():
                self._lent[place] = apart(flat)
        return self._lent

    def _inner_state(self, kind: int) -> tuple[torch.Tensor, dict[str, Any]]:
        """Return one of this rank's shards of this kind, and its state; empty before the first step."""
        shards = self._inner.param_groups[kind]["params"]
        shard = next((shard for shard in shards if self._inner.state.get(shard)), shards[0])
        return shard, self._inner.state.get(shard, {})

    def kinds(self) -> list[dict[str, Any]]:
        """Return the state of each kind's parameters: values common to all elements, and ... for sharded entries."""
        found: list[dict[str, Any]] = []
        for kind in range(len(self._inner.param_groups)):
            shard, state = self._inner_state(kind)
            divided = _elementwise_keys({shard: state}, [shard])
            found.append({key: ... if key in divided else copied(value) for key, value in state.items()})
        return found

    def _gathered(self) -> dict[Place, torch.Tensor]:
        return {
            (index, key): self._gather(index, key, part) for (index, key), part in self.slices.items() if key != VALUES
        }

    def _gather(self, index: int, key: str, part: torch.Tensor) -> torch.Tensor:
        """Return an entry of a whole bucket (collective); `part` is this rank's slice."""
        set_id = self._optimizer.process_set.process_set_id
        name = f"state.{key}.{self.specs[index].name}"
        request = self._shards.runtime.submit(Kind.ALLGATHER, [part], name=name, process_set_id=set_id)
        (whole,) = request.result()
        return whole

    def unite(self) -> None:
        """Copy the whole state to private memory, in `optimizer.state`."""
        self.present()
        for parameter in self.parameter_kinds.of:
            state = self._optimizer.state.get(parameter)
            if state:
                self._optimizer.state[parameter] = {key: copied(value) for key, value in state.items()}


def _elementwise_keys(whole: dict[torch.Tensor, dict[str, Any]], parameters: Sequence[torch.Tensor]) -> list[str]:
    """Return the state entries that have the parameter's shape, except "step" and the like of a scalar parameter."""
    return sorted(
        {
            key
            for parameter in parameters
            for key, value in whole.get(parameter, {}).items()
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and key not in _SCALARS
        }
    )


# Scalar entries, even for parameters without dimensions.
_SCALARS = frozenset(("step", "mu_product", "eta", "mu"))


def _elementwise_state(optimizer: Any, group: int, like: torch.Tensor) -> dict[str, torch.dtype]:
    """Return a group's per-element state entries and dtypes: from its state, or by stepping a dummy."""
    members = optimizer.param_groups[group]["params"]
    state = {p: optimizer.state[p] for p in members if optimizer.state.get(p)}
    keys = _elementwise_keys(state, members)
    if state:
        return {key: next(s[key].dtype for s in state.values() if key in s) for key in keys}
    dummy = torch.nn.Parameter(torch.zeros(2, dtype=like.dtype, device=like.device), requires_grad=False)
    dummy.grad = torch.zeros_like(dummy)
    trial = bare_copy(optimizer, optimizer._base_class)  # without hooks or state
    trial.param_groups, trial.state = [{**optimizer.param_groups[group], "params": [dummy]}], defaultdict(dict)
    trial._optimizer_step_pre_hooks, trial._optimizer_step_post_hooks = {}, {}
    trial.step()
    return {
        key: value.dtype
        for key, value in trial.state[dummy].items()
        if isinstance(value, torch.Tensor) and value.shape == dummy.shape
    }
