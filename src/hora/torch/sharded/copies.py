"""Copies of the slices of a sharded optimizer, for elastic training by the step: a step that fails is taken back on all
ranks, and a slice outlives its rank.

Before a rank steps its slice it copies parameters and state of it as the last step has left them. In shared memory
these copies lie beside the slices, with the number of the step that each rank has begun: who is left finds there
whatever the dead have had. Elsewhere a rank keeps its copy, and after stepping sends its slice to another rank, on the
next host if there is one, before the parameters are gathered: nobody has them all before every slice lies in two
places.

    at rest --`before_step`--> begun --stepped, `after_step`, parameters published--> `step_ended`: at rest

Memory: a copy of parameters and optimizer state for all ranks of a host together; without shared memory three times
what a rank has of them (its own before the step, and the other rank's before and after it). Time: copying or sending
that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from hora.engine.request import Kind
from hora.engine.shm.segment import SharedMemory
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.buckets import view_like
from hora.torch.sharded.shards import Shards
from hora.torch.sharded.state import ShardState

__all__ = ["Slices", "SliceCopies"]

_VALUES = ""  # the parameters themselves, among the entries of the state
# Of one member: (bucket, entry) -> its elements. And of several: (member, number of steps) -> those.
_Slice = dict[tuple[int, str], torch.Tensor]
Slices = dict[tuple[int, int], _Slice]


class SliceCopies:
    """Copies of this rank's slices and, where memory is not shared, of another rank's. Counts steps of this world."""

    def __init__(self, shards: Shards, state: ShardState, memory: SharedMemory | None) -> None:
        self._shards, self._state = shards, state
        self._begun = self._ended = 0
        self._kinds: list[dict[str, Any]] | None = None  # of the state, before the step that has begun
        self._apart: Slices = {}
        self._copies: list[dict[str, torch.Tensor]] = []
        self._all_begun: torch.Tensor | None = None
        if memory is not None:
            self._all_begun = memory.take(shards.num_members, torch.int64)
            for spec, entries in zip(state.specs, state.entries, strict=True):
                dtypes = {_VALUES: spec.parameters[0].dtype, **entries}
                self._copies.append({key: memory.take(spec.num_elements, dtypes[key]) for key in sorted(dtypes)})

    @staticmethod
    def num_bytes(specs: Sequence[BucketSpec], state: ShardState, num_members: int) -> int:
        """Return the size of the copies in shared memory."""
        values = sum(SharedMemory.space(spec.num_elements, spec.parameters[0].dtype) for spec in specs)
        return values + state.num_bytes() + SharedMemory.space(num_members, torch.int64)

    @property
    def is_shared(self) -> bool:
        """Return whether every rank finds all copies by itself."""
        return self._all_begun is not None

    # --- while all goes well --------------------------------------------------------------------------------------

    def before_step(self) -> None:
        """Keep this rank's slices as they are. In the first step the optimizer has them, whole."""
        if self._begun:
            self._kinds = self._state.kinds()
            if self._all_begun is None:
                self._apart[self._shards.member, self._ended] = self._mine()
            else:
                for (index, key), part in self._views().items():
                    bucket = self._shards.buckets[index]
                    self._copies[index][key][bucket.begin : bucket.end] = part
        self._begun += 1
        if self._all_begun is not None:
            self._all_begun[self._shards.member] = self._begun

    def after_step(self) -> None:
        """Have another rank keep this rank's slices, if they are nowhere else (collective)."""
        if self._all_begun is not None or self._shards.num_members == 1:
            return
        shards, mine = self._shards, self._views()
        payload = torch.cat([part.contiguous().view(torch.uint8) for part in mine.values()])
        size, away = shards.num_members, shards.num_apart
        splits = [0] * size
        splits[(shards.member + away) % size] = len(payload)
        handle = shards.runtime.submit(Kind.ALLTOALL, [payload], name="sharded.copies", splits=splits)
        received = shards.runtime.synchronize(handle)[0]
        sizes = [part.nbytes for part in mine.values()]
        parts = zip(mine.items(), received.split(sizes), strict=True)
        copy = {place: piece.clone().view(part.dtype) for (place, part), piece in parts}
        self._apart[(shards.member - away) % size, self._begun] = copy

    def step_ended(self) -> None:
        """All ranks have stepped: forget what was before."""
        self._ended = self._begun
        self._kinds = None
        self._apart = {(member, number): its for (member, number), its in self._apart.items() if number == self._ended}

    # --- when the world has broken --------------------------------------------------------------------------------

    def slices(self) -> Slices:
        """Everything that other ranks cannot find by themselves, on the CPU."""
        if self._all_begun is not None:
            return {}
        everything = {**self._apart, (self._shards.member, self._begun): self._mine()}
        return {which: {place: part.cpu() for place, part in its.items()} for which, its in everything.items()}

    def united(self, slices: Slices) -> tuple[dict[torch.Tensor, torch.Tensor], dict[torch.Tensor, dict[str, Any]]]:
        """The whole parameters and their state, as the last step has left them that has ended here. `slices`: of all
        ranks.

        In shared memory only when those who are left have met again: by then they have let go of it.
        """
        kinds = self._kinds if self._kinds is not None else self._state.kinds()
        values: dict[torch.Tensor, torch.Tensor] = {}
        state: dict[torch.Tensor, dict[str, Any]] = {}
        for index, spec in enumerate(self._state.specs):
            flats = {key: self._whole(index, key, slices) for key in (_VALUES, *self._state.entries[index])}
            for offset, parameter in zip(spec.offsets, spec.parameters, strict=True):
                views = {key: view_like(flat, offset, parameter).clone() for key, flat in flats.items()}
                values[parameter] = views.pop(_VALUES)
                its = kinds[self._state.kind_of(parameter)]
                state[parameter] = {key: views[key] if value is ... else _copied(value) for key, value in its.items()}
        return values, state

    def _whole(self, index: int, key: str, slices: Slices) -> torch.Tensor:
        size, bucket = self._shards.num_members, self._shards.buckets[index]
        if self._all_begun is not None:
            whole = self._live(index)[key].clone()
            parts = whole.chunk(size), self._copies[index][key].chunk(size)
            # Looked at after reading: a rank that was given up may have begun to write in between.
            for begun, part, copy in zip(self._all_begun.tolist(), *parts, strict=True):
                if begun > self._ended:
                    part.copy_(copy)
            return whole
        lost = [member for member in range(size) if (member, self._ended) not in slices]
        if lost:
            raise RuntimeError(
                f"the slices of ranks {lost} of the sharded optimizer are lost: the ranks that kept copies of them "
                "died as well. Start the job again; with state.persist() and per_step=False it goes on from the last "
                "commit on disk"
            )
        found = [slices[member, self._ended][index, key] for member in range(size)]
        return torch.cat(found).to(bucket.values.device)

    def _live(self, index: int) -> Mapping[str, torch.Tensor]:
        """The bucket's parameters and state in shared memory."""
        return {_VALUES: self._shards.buckets[index].values, **self._state.flats(index)}

    def _views(self) -> _Slice:
        """This rank's slices, where they lie."""
        found: _Slice = {}
        for index, bucket in enumerate(self._shards.buckets):
            found[index, _VALUES] = bucket.values[bucket.begin : bucket.end]
            for key in sorted(self._state.entries[index]):
                found[index, key] = self._state.slice_of(index, key)
        return found

    def _mine(self) -> _Slice:
        return {place: part.clone() for place, part in self._views().items()}


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value
