"""Registered memory: tensors of the user's that lie in memory which all members of a set on one host map.

Each member has its part of a segment, and sees the others' parts. An allreduce in place of a tensor that lies there needs no
copies: each member reduces its slice of all members' data where it is (`ShmTransport.allreduce_in_place`). A tensor's *place*,
the number of its memory and where it begins there, is part of the request: only if all members' tensors lie at the same place
is it done so. Small tensors, and any tensor whose place is not the same on all members, go the ordinary way.

A part is forgotten when the last tensor that looks into it is gone, and all are when the queue ends: what is left then are
ordinary tensors.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from math import prod
from typing import NamedTuple

import numpy as np
import torch

from hora.engine.plan import Batch
from hora.engine.request import DTYPES, Kind, Signature
from hora.engine.shm.fork import copy_in_children
from hora.engine.shm.segment import Segment, aligned

__all__ = ["IN_PLACE_BYTES", "Place", "Registry"]

# Below, a copy takes less time than the second meeting of the members that a reduction in place ends with.
IN_PLACE_BYTES = 131072
_KEPT_VIEWS = 4096

# The number of the memory and the offset in bytes; empty for a tensor that does not lie in any.
Place = tuple[int, ...]


class _Memory(NamedTuple):
    number: int
    begin: int  # the address of the own part
    num_bytes: int  # of a part
    segment: Segment


class Registry:
    """The registered memory of one queue, on its member number `member`."""

    def __init__(self, member: int, num_members: int) -> None:
        self._member = member
        self._num_members = num_members
        self._known: dict[int, _Memory] = {}
        # The same by address; one assignment, because a tensor may go at any time and on any thread.
        self._by_address: tuple[list[int], list[_Memory]] = ([], [])
        self._views: dict[tuple[Place, int, torch.dtype], list[torch.Tensor]] = {}

    def __bool__(self) -> bool:
        return bool(self._known)

    @staticmethod
    def segment_bytes(num_bytes: int, num_members: int) -> int:
        """The size of a segment in which each member has a part of this size."""
        return num_members * aligned(num_bytes)

    def add(self, number: int, segment: Segment, num_bytes: int) -> torch.Tensor:
        """The own part of a segment that all members know by this number, as bytes."""
        offset = self._member * aligned(num_bytes)
        copy_in_children(segment.memory, offset, num_bytes)
        raw = np.frombuffer(segment.memory, dtype=np.uint8, offset=offset, count=num_bytes)
        part = torch.from_numpy(raw)
        self._known[number] = _Memory(number, part.data_ptr(), num_bytes, segment)
        self._sort()
        weakref.finalize(raw, self._forget, number).atexit = False  # the storage of all tensors there holds it
        return part

    def locate(self, tensor: torch.Tensor) -> Place:
        """Where a tensor on the CPU lies; empty if it is small, not contiguous, or somewhere else."""
        if not self._known or tensor.nbytes < IN_PLACE_BYTES or not tensor.is_contiguous():
            return ()
        begins, memories = self._by_address
        address = tensor.data_ptr()
        index = bisect_right(begins, address) - 1
        if index < 0:
            return ()
        memory = memories[index]
        offset = address - memory.begin
        return (memory.number, offset) if offset + tensor.nbytes <= memory.num_bytes else ()

    def in_place(self, batch: Batch) -> list[torch.Tensor] | None:
        """All members' flat tensors, if the batch is the allreduce of tensors that lie at the same place."""
        place = batch.signature.extra
        if batch.kind is not Kind.ALLREDUCE or not place or len(batch.parts) != 1:
            return None
        announced = batch.parts[0].signatures
        same = all(signature is not None and signature.extra == place for signature in announced)
        return self.views(batch.signature) if same else None

    def views(self, signature: Signature) -> list[torch.Tensor]:
        """All members' flat tensors at the place of a request."""
        (name,), (shape,), place = signature.dtypes, signature.shapes, signature.extra
        count, dtype = prod(shape), DTYPES[name]
        key = (place, count, dtype)
        found = self._views.get(key)
        if found is None:
            if len(self._views) >= _KEPT_VIEWS:
                self._views.clear()
            memory, (_, offset) = self._known[place[0]], place
            parts = [peer * aligned(memory.num_bytes) for peer in range(self._num_members)]
            found = self._views[key] = [memory.segment.tensor(part + offset, count, dtype) for part in parts]
        return found

    def clear(self) -> None:
        """Forget all memory. Tensors keep what they look into."""
        for number in list(self._known):
            self._forget(number)

    def _forget(self, number: int) -> None:
        memory = self._known.pop(number, None)
        if memory is not None:
            self._sort()
            for key in [key for key in list(self._views) if key[0][0] == number]:
                self._views.pop(key, None)
            memory.segment.close()

    def _sort(self) -> None:
        memories = sorted(self._known.values(), key=lambda memory: memory.begin)
        self._by_address = ([memory.begin for memory in memories], memories)
