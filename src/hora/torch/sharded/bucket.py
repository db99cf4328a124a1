"""One bucket of a sharded optimizer: parameters, this rank's gradients on their way, and this rank's reduced slice.

In a step: empty --`put` of every gradient--> complete --`start`--> in flight --`wait`--> reduced --`take`--> empty. The
last bucket is not started: `wait`, in the thread that needs the result, reduces it.

A slice is reduced out of the memory of the gradients, so that can serve another bucket afterwards: a model of many
buckets has a few places (`GradientPlaces`) that its buckets use in turn, which saves most of the memory that gradients
would take on every rank. A gradient that comes while the bucket before is in its place (`before`) is held until the
place `is_free`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hora.engine.schedule import PersistentReduction
from hora.engine.shm.segment import SharedMemory
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.buckets import SMALL_BYTES, view_like
from hora.torch.optimizer.reducer import RequestedReduction

__all__ = ["NUM_PLACES", "GradientPlaces", "ShardBucket"]

# One bucket is being filled and one reduced; two more keep backward from waiting for ranks that are a little behind.
NUM_PLACES = 4


class GradientPlaces:
    """Bucket i lies in place i modulo `NUM_PLACES`, in the memory of every member; few buckets have a place each."""

    def __init__(self, specs: Sequence[BucketSpec], num_members: int, memory: SharedMemory) -> None:
        self._specs = specs
        self.in_turn = len(specs) > NUM_PLACES
        self._places = [
            [memory.take(num_bytes, torch.uint8, copied=False) for _ in range(num_members)]
            for num_bytes in _place_bytes(specs)
        ]

    @staticmethod
    def num_bytes(specs: Sequence[BucketSpec], num_members: int) -> int:
        """Return the size of all members' places in shared memory."""
        return num_members * sum(SharedMemory.space(num_bytes, torch.uint8) for num_bytes in _place_bytes(specs))

    def of(self, index: int) -> list[torch.Tensor]:
        """Every member's place for this bucket."""
        spec = self._specs[index]
        place = self._places[index % NUM_PLACES]
        return [memory[: spec.num_elements * spec.dtype.itemsize].view(spec.dtype) for memory in place]


def _place_bytes(specs: Sequence[BucketSpec]) -> list[int]:
    """The size of each place: that of the largest bucket that uses it."""
    sizes = [spec.num_elements * spec.dtype.itemsize for spec in specs]
    return [max(sizes[place::NUM_PLACES]) for place in range(min(NUM_PLACES, len(sizes)))]


class ShardBucket:
    """This rank owns the elements from `begin` to `end`. Gradients are multiplied with `scale` when they are put in."""

    def __init__(
        self,
        spec: BucketSpec,
        values: torch.Tensor,
        gradients: torch.Tensor,
        begin: int,
        end: int,
        reduction: PersistentReduction | RequestedReduction,
        *,
        scale: float,
    ) -> None:
        self.spec = spec
        self.values = values  # parameters: the same memory on all members when shared
        self.begin, self.end = begin, end
        self.bound = reduction if isinstance(reduction, PersistentReduction) else None
        self.before: ShardBucket | None = None
        self.held: list[tuple[int, torch.Tensor | None]] = []  # gradients that came while the place was in use
        self.num_ready = 0
        self._views = [view_like(gradients, offset, p) for offset, p in zip(spec.offsets, spec.parameters, strict=True)]
        self._is_small = [view.nbytes < SMALL_BYTES for view in self._views]
        # Places and their gradients, which are copied when all have come.
        self._small: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._scale = scale  # not 1.0 only where gradients are not cast
        self.gaps = spec.gaps(gradients)  # numbers there would count in a norm
        self._reduction = reduction
        self._reduced: torch.Tensor | None = None

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self.spec.parameters[0].dtype

    @property
    def in_flight(self) -> bool:
        return self._reduction.in_flight

    @property
    def is_complete(self) -> bool:
        """Return whether all gradients of this step have come."""
        return self.num_ready == len(self.spec.parameters)

    def comes_after(self, before: ShardBucket | None) -> None:
        """The place of the gradients is used by other buckets too, in this step by `before`."""
        self.before = before

    def is_free(self) -> bool:
        """Return whether all members are done with the bucket that uses the place earlier in this step."""
        before = self.before
        return before is None or before._reduced is not None or before._reduction.done

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient in, None for one that is missing here."""
        view = self._views[index]
        if gradient is None:
            view.zero_()
        elif self._is_small[index]:
            self._small.append((view, gradient.detach() if gradient.requires_grad else gradient))
        elif self._scale != 1.0:
            torch.mul(gradient.detach(), self._scale, out=view)
        else:
            view.copy_(gradient.detach())

    def start(self) -> None:
        """All gradients have come: reduce them in the background."""
        self._complete()
        self._reduction.start(background=True)

    def wait(self) -> None:
        """Return when this rank's slice is reduced; reduce it if that has not been started."""
        if self._reduced is None:
            if not self._reduction.in_flight:
                self._complete()
            self._reduced = self._reduction.wait()

    def take(self) -> torch.Tensor | None:
        """The reduced slice, None if the reduction failed; the bucket is empty again."""
        reduced, self._reduced = self._reduced, None
        self.num_ready = 0
        self.held.clear()
        self._small.clear()
        return reduced

    def _complete(self) -> None:
        if self._small:
            targets, gradients = zip(*self._small, strict=True)
            torch._foreach_copy_(targets, gradients)
            if self._scale != 1.0:
                torch._foreach_mul_(targets, self._scale)
            self._small.clear()
        self.clear_gaps()

    def clear_gaps(self) -> None:
        """Zero what lies between the gradients."""
        torch._foreach_zero_(self.gaps)
