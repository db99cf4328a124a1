"""Staging: the shared memory into which every member puts its gradients to be reduced into slices.

A slice is reduced out of the staging memory, so that can serve another bucket afterwards: a model of many buckets has a few
places that its buckets use in turn. That saves most of the memory that gradients would take on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.shared_memory import SharedMemory

__all__ = ["NUM_PLACES", "Staging"]

# One bucket is being filled and one reduced; two more keep backward from waiting for ranks that are a little behind.
NUM_PLACES = 4


class Staging:
    """Bucket i lies in place i modulo `NUM_PLACES`, in the memory of every member; few buckets have a place each."""

    def __init__(self, specs: Sequence[BucketSpec], num_members: int, memory: SharedMemory) -> None:
        self._specs = specs
        self.in_turn = len(specs) > NUM_PLACES
        self._places = [
            [memory.take(num_bytes, torch.uint8) for _ in range(num_members)] for num_bytes in _place_bytes(specs)
        ]

    @staticmethod
    def num_bytes(specs: Sequence[BucketSpec], num_members: int) -> int:
        """What the staging of all members takes of shared memory."""
        return num_members * sum(SharedMemory.space(num_bytes, torch.uint8) for num_bytes in _place_bytes(specs))

    def of(self, index: int) -> list[torch.Tensor]:
        """Every member's staging memory for this bucket."""
        spec = self._specs[index]
        place = self._places[index % NUM_PLACES]
        return [memory[: spec.num_elements * spec.dtype.itemsize].view(spec.dtype) for memory in place]


def _place_bytes(specs: Sequence[BucketSpec]) -> list[int]:
    """The size of each place: that of the largest bucket that uses it."""
    sizes = [spec.num_elements * spec.dtype.itemsize for spec in specs]
    return [max(sizes[place::NUM_PLACES]) for place in range(min(NUM_PLACES, len(sizes)))]
