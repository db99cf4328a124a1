"""Memory that all members of a process set have mapped, handed out piece by piece in an order that all of them keep.

Only where the members share a host and the tensors are on the CPU. Used by the optimizer's buckets and shards.
"""

from __future__ import annotations

from typing import Any

import torch

from hora.engine.shm.barrier import Gate
from hora.engine.shm.segment import PAGE_BYTES, Segment, aligned

__all__ = ["SharedMemory"]


class SharedMemory:
    """A segment and how much of it has been handed out. Every member takes the same pieces in the same order."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment
        self._position = 0

    @classmethod
    def allocate(cls, runtime: Any, process_set_id: int, num_bytes: int) -> SharedMemory | None:
        """The same zeroed memory for all members (collective); None where they do not share a host."""
        segment = runtime.shared_segment(process_set_id, num_bytes)
        return None if segment is None else cls(segment)

    @staticmethod
    def space(count: int, dtype: torch.dtype) -> int:
        """The bytes that `take` uses up."""
        return aligned(count * dtype.itemsize, PAGE_BYTES)

    @staticmethod
    def gate_space(num_members: int) -> int:
        """The bytes that `take_gate` uses up."""
        return aligned(Gate.num_bytes(num_members), PAGE_BYTES)

    def take_gate(self, runtime: Any, name: str, process_set_id: int, num_members: int) -> Gate:
        """The next piece as a gate."""
        gate: Gate = runtime.prepared.gate(self._segment, self._position, name=name, process_set_id=process_set_id)
        self._position += self.gate_space(num_members)
        return gate

    def take(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        """The next piece, which begins on a page of its own."""
        tensor = self._segment.tensor(self._position, count, dtype)
        self._position += self.space(count, dtype)
        return tensor
