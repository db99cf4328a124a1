"""Shards: parameters, gradients and optimizer state of a sharded optimizer, and this rank's slice of them.

Buckets are flat, as in `buckets.py`; member m owns slice m of every bucket. If all members share memory (`shared`), it
holds one copy of the parameters and optimizer state, and every member's gradients: each member reduces and steps its
slice, and nothing is sent. Otherwise gradients are reduce-scattered and parameters all-gathered, between hosts by
schedules, with members numbered host by host. `ShardedOptimizer` uses this class.

A step: filling --ready of all--> reduced (`finish`) --`step`--> filling. No rank may read the parameters between the
last `ready` and the end of `step`. So `finish` reduces the last bucket, and `step` ends with a barrier.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

import torch

from hora import engine
from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.schedule import ReductionSchedule
from hora.engine.shm.reduction import SharedMemoryReduction
from hora.engine.shm.segment import SharedMemory
from hora.errors import HorovodInternalError
from hora.torch.norms import total_norm
from hora.torch.optimizer.bucket_plan import BucketSpec, view_like
from hora.torch.optimizer.buckets import (
    SMALL_BYTES,
    Layout,
    alike,
    apart,
    copy_gradients,
    described,
    is_set_to,
    make_reductions,
    release_all,
)
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, Reduction, RequestedReduction

# One bucket is filled while one is reduced; two more keep backward from waiting for ranks that are a little behind.
NUM_PLACES = 4


def _place_bytes(specs: Sequence[BucketSpec]) -> list[int]:
    """Return the size of each place: that of its largest bucket."""
    sizes = [spec.num_elements * spec.dtype.itemsize for spec in specs]
    return [max(sizes[place::NUM_PLACES]) for place in range(min(NUM_PLACES, len(sizes)))]


class ShardBucket:
    """A bucket, and this rank's part of it. Gradients are multiplied by `scale` when they are copied."""

    def __init__(
        self,
        spec: BucketSpec,
        values: torch.Tensor,
        gradients: torch.Tensor,
        reduction: Reduction,
        options: ReduceOptions,
        *,
        scale: float,
    ) -> None:
        self.spec = spec
        self.values = values  # parameters: the same memory on all members if shared
        share = spec.num_elements // options.num_members
        self.part = slice(options.member * share, (options.member + 1) * share)  # that this rank owns
        out = reduction.out if spec.dtype is values.dtype else None
        # Of this rank's slice.
        self.gradient = torch.zeros_like(values[self.part]) if out is None else out
        self.before: ShardBucket | None = None  # uses the same place of gradients earlier in this step
        self.held: list[tuple[int, torch.Tensor | None]] = []  # gradients that arrived and are not in the place yet
        self.num_ready = 0
        self._views = spec.views(gradients)
        self._is_small = [view.nbytes < SMALL_BYTES for view in self._views]
        # Places and their gradients, which are copied once all have arrived.
        self._small: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.lend()
        self._scale = scale  # differs from 1.0 only if gradients are not cast
        self.gaps = spec.gaps(gradients)  # values there would count in a norm
        self.reduction = reduction
        self._is_reduced = False

    def lend(self) -> None:
        """Make the parameters' values for users: on a storage of their own, which they may move."""
        lent = apart(self.values)
        self._lent_storage = lent.untyped_storage()
        self.lent = self.spec.views(lent)
        self.addresses = [view.data_ptr() for view in self.lent]

    @property
    def is_moved(self) -> bool:
        """Return whether the storage for users was moved."""
        return self._lent_storage.data_ptr() != self.values.data_ptr()

    def load(self, index: int) -> None:
        """Copy this rank's slice of a parameter, which is elsewhere, into the bucket."""
        parameter, offset = self.spec.parameters[index], self.spec.offsets[index]
        begin, end = max(offset, self.part.start), min(offset + parameter.numel(), self.part.stop)
        if begin < end:
            whole = torch.empty(parameter.numel(), dtype=self.values.dtype, device=self.values.device)
            view_like(whole, 0, self.lent[index]).copy_(parameter.detach())
            self.values[begin:end] = whole[begin - offset : end - offset]

    def is_free(self) -> bool:
        """Return whether all members are done with the bucket that uses the place earlier in this step."""
        before = self.before
        return before is None or before._is_reduced or before.reduction.done

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient into the bucket; None for a missing one."""
        view = self._views[index]
        if gradient is None:
            view.zero_()
        elif self._is_small[index]:
            self._small.append((view, gradient.detach() if gradient.requires_grad else gradient))
        else:
            copy_gradients([view], [gradient.detach()], self._scale)

    def start(self) -> None:
        """Start reducing in the background; all gradients have arrived."""
        self._complete()
        self.reduction.start(background=True)

    def wait(self) -> None:
        """Wait for this rank's reduced slice; reduces it here if it was not started."""
        if not self._is_reduced:
            if not self.reduction.in_flight:
                self._complete()
            result = self.reduction.wait()
            if result is not self.gradient:
                self.gradient.copy_(result)
            self._is_reduced = True

    def clear(self) -> None:
        """Empty the bucket for the next step."""
        self._is_reduced, self.num_ready = False, 0
        self.held.clear()
        self._small.clear()

    def _complete(self) -> None:
        if self._small:
            targets, gradients = zip(*self._small, strict=True)
            copy_gradients(list(targets), list(gradients), self._scale)
            self._small.clear()
        torch._foreach_zero_(self.gaps)


def let_go(buckets: Sequence[ShardBucket]) -> None:
    """Give the parameters of these buckets private memory again."""
    for bucket in buckets:
        for parameter, address in zip(bucket.spec.parameters, bucket.addresses, strict=True):
            if parameter.data_ptr() == address:
                parameter.data = parameter.detach().clone()


def is_used_elsewhere(parameter: torch.Tensor) -> bool:
    """Return whether other processes may have this parameter's memory: `share_memory`, `torch.multiprocessing`."""
    return parameter.is_cpu and parameter.is_shared()


@dataclass(frozen=True, eq=False)
class Shard:
    """A run of elements of one bucket and one kind that this rank owns, as a parameter to step."""

    parameter: torch.nn.Parameter
    kind: int
    bucket: int
    part: slice  # of this rank's slice of the bucket
    members: list[torch.Tensor]  # the parameters that have elements in it


class Shards(Reducer):
    """One rank's part of a sharded optimizer; `owned` are its shards."""

    def __init__(
        self,
        runtime: engine.Runtime,
        options: ReduceOptions,
        specs: Sequence[BucketSpec],
        kind_of: Callable[[torch.Tensor], int],
        memory: SharedMemory | None,
    ) -> None:
        self.runtime = runtime
        self.shared = memory is not None
        self._set_id = options.process_set_id
        self._options = options
        self.member, self.num_members = options.member, options.num_members
        self.buckets: list[ShardBucket] = []
        self._schedule: ReductionSchedule | None = None
        self._gathers: list[Reduction] = []  # of the parameters that are not shared
        if memory is None:
            self._make_own_buckets(specs)
        else:
            self._schedule = runtime.sets.schedule(memory, self._set_id)
            self._make_shared_buckets(specs, memory, self._schedule)
        self.owned = [shard for index in range(len(specs)) for shard in self._divide(index, kind_of)]
        self._locations = {
            id(parameter): (bucket, index)
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.spec.parameters)
        }
        reductions = [*(bucket.reduction for bucket in self.buckets), *self._gathers]
        self._finalizer = weakref.finalize(self, release_all, reductions)
        self._let_go = weakref.finalize(self, let_go, self.buckets)
        self._let_go.atexit = False
        self._holding: list[ShardBucket] = []  # buckets with `held` gradients
        # Parameters become views of the buckets. In shared memory the first member's values apply.
        if not self.shared or self.member == 0:
            for bucket in self.buckets:
                for parameter, view in zip(bucket.spec.parameters, bucket.lent, strict=True):
                    view.copy_(parameter.detach())
        if self.shared:
            runtime.barrier(self._set_id)
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.spec.parameters):
                if not is_used_elsewhere(parameter):
                    parameter.data = bucket.lent[index].data

    def _make_own_buckets(self, specs: Sequence[BucketSpec]) -> None:
        """Create buckets with this rank's own parameters and gradients (collective)."""
        options = self._options
        gathers, scatters, scales = list[Layout](), list[Layout](), list[float]()
        for spec in specs:
            place = spec.num_elements, spec.parameters[0].dtype, spec.device
            gathers.append(Layout(f"parameters.{spec.name}", *place, kind=Kind.ALLGATHER))
            scale, reduce = options.early_scaling(spec.dtype)
            scales.append(scale)
            scatters.append(Layout(spec.name, spec.num_elements, spec.dtype, spec.device, reduce, Kind.REDUCESCATTER))
        values, self._gathers = make_reductions(self.runtime, options, gathers)
        gradients, reductions = make_reductions(self.runtime, options, scatters)
        for spec, its, gradient, reduction, scale in zip(specs, values, gradients, reductions, scales, strict=True):
            self.buckets.append(ShardBucket(spec, its, gradient, reduction, options, scale=scale))

    def _make_shared_buckets(
        self, specs: Sequence[BucketSpec], memory: SharedMemory, schedule: ReductionSchedule
    ) -> None:
        """Create buckets with one copy of the parameters, and places for all members' gradients, in shared memory.

        Bucket i uses place i modulo `NUM_PLACES`; few buckets have a place each.
        """
        options, in_turn = self._options, len(specs) > NUM_PLACES
        places = [
            [memory.allocate(num_bytes, torch.uint8, copied=False) for _ in range(self.num_members)]
            for num_bytes in _place_bytes(specs)
        ]
        for index, spec in enumerate(specs):
            values = memory.allocate(spec.num_elements, spec.parameters[0].dtype)
            num_bytes = spec.num_elements * spec.dtype.itemsize
            of_all = [place[:num_bytes].view(spec.dtype) for place in places[index % NUM_PLACES]]
            mine = of_all[self.member]
            slice_of_mine = mine.chunk(self.num_members)[self.member]
            # No other member reads this rank's slice of its own gradients, so the reduced slice can overwrite it, if
            # the place is not reused.
            out = torch.zeros_like(slice_of_mine) if in_turn else slice_of_mine
            # Small gradients are copied together, so scaling them on the way would cost an extra call.
            scale, reduce = options.early_scaling(spec.dtype)
            small = all(parameter.numel() * spec.dtype.itemsize < SMALL_BYTES for parameter in spec.parameters)
            if small and options.reduce.prescale == 1.0:
                scale, reduce = 1.0, options.reduce
            reduction = SharedMemoryReduction(
                schedule, Kind.REDUCESCATTER, [of_all], name=spec.name, reduce=reduce, out=out, ends_together=in_turn
            )
            bucket = ShardBucket(spec, values, mine, reduction, options, scale=scale)
            if index >= NUM_PLACES:
                bucket.before = self.buckets[index - NUM_PLACES]
            self.buckets.append(bucket)

    @staticmethod
    def num_bytes(specs: Sequence[BucketSpec], num_members: int) -> int:
        """Return the size of all members' gradients and of a schedule in shared memory."""
        schedule = SharedMemory.space(ReductionSchedule.num_bytes(num_members), torch.uint8)
        return schedule + num_members * sum(SharedMemory.space(size, torch.uint8) for size in _place_bytes(specs))

    def _divide(self, index: int, kind_of: Callable[[torch.Tensor], int]) -> list[Shard]:
        """Divide this rank's slice of a bucket where the kind changes."""
        bucket, shards = self.buckets[index], []
        edges = [*bucket.spec.offsets, bucket.spec.num_elements]
        spans = zip(pairwise(edges), bucket.spec.parameters, strict=True)
        for kind, run in groupby(spans, key=lambda span: kind_of(span[1])):
            its = list(run)
            begin, end = max(its[0][0][0], bucket.part.start), min(its[-1][0][1], bucket.part.stop)
            if begin < end:
                part = slice(begin - bucket.part.start, end - bucket.part.start)
                parameter = torch.nn.Parameter(bucket.values[begin:end], requires_grad=False)
                parameter.grad = bucket.gradient[part]
                members = [p for (at, _), p in its if at < end and at + p.numel() > begin]
                shards.append(Shard(parameter, kind, index, part, members))
        return shards

    # --- gradients ------------------------------------------------------------------------------------------------

    def ready(self, parameter: torch.Tensor) -> None:
        """Take the gradient of `parameter` and set it to None; whole gradients exist only after `materialise`."""
        bucket, index = self._locations[id(parameter)]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError("sharded=True does not support sparse gradients; use sparse=False, or sharded=False")
        parameter.grad = None
        bucket.num_ready += 1
        if not bucket.held:
            self._holding.append(bucket)
        bucket.held.append((index, gradient))
        self._put_held()  # never waits: the others may need a later gradient of this rank

    def finish(self) -> None:
        """Reduce the rest and wait, so that every shard has its reduced gradient. All parameters were `ready`."""
        try:
            for bucket in self.buckets:
                if bucket.before is not None:
                    bucket.before.wait()
                self._put_held()
            for bucket in self.buckets:
                bucket.wait()
        except Exception:
            for bucket in self.buckets:
                with suppress(Exception):  # the first error is being raised
                    if bucket.reduction.in_flight:
                        bucket.wait()
            raise
        finally:
            for bucket in self.buckets:
                bucket.clear()
            self._holding.clear()

    def _put_held(self) -> None:
        """Copy held gradients into their buckets, as far as the places are free now, and start complete buckets."""
        for bucket in list(self._holding):
            if bucket.is_free():
                self._holding.remove(bucket)
                for index, gradient in bucket.held:
                    bucket.put(index, gradient)
                bucket.held.clear()
                if bucket.num_ready == len(bucket.spec.parameters) and bucket is not self.buckets[-1]:
                    bucket.start()

    def materialise(self) -> None:
        """Write the whole reduced gradient of every parameter, on all ranks (collective)."""
        requests = [
            self.runtime.submit(Kind.ALLGATHER, [bucket.gradient], name=bucket.spec.name, process_set_id=self._set_id)
            for bucket in self.buckets
        ]
        for bucket, request in zip(self.buckets, requests, strict=True):
            (whole,) = request.result()
            for parameter, view in zip(bucket.spec.parameters, bucket.spec.views(whole), strict=True):
                parameter.grad = view

    def load_whole(self) -> None:
        """Copy this rank's slices of the whole gradients, which the user may have changed."""
        for bucket in self.buckets:
            flat = torch.zeros_like(bucket.values)
            for parameter, view in zip(bucket.spec.parameters, bucket.spec.views(flat), strict=True):
                if parameter.grad is not None:
                    view.copy_(parameter.grad)
                parameter.grad = None
            bucket.gradient.copy_(flat[bucket.part])

    # --- parameters that users have moved -------------------------------------------------------------------------

    def load_moved(self, names: Mapping[torch.Tensor, str]) -> list[tuple[ShardBucket, int]]:
        """Load the values of parameters that have other memory by now, before they are stepped."""
        moved = []
        for bucket in self.buckets:
            try:
                if not bucket.is_moved and all(map(is_set_to, bucket.spec.parameters, bucket.lent)):
                    continue
            except RuntimeError:  # on another device
                pass
            for index, (parameter, view) in enumerate(zip(bucket.spec.parameters, bucket.lent, strict=True)):
                if not alike(parameter, view):
                    raise ValueError(
                        f"{names[parameter]} is {described(parameter)} now, but sharded=True has its values as "
                        f"{described(view)}: wrap the optimizer again after converting a model"
                    )
                if bucket.is_moved or not parameter.is_set_to(view):
                    bucket.load(index)
                    moved.append((bucket, index))
        return moved

    def give_back(self, moved: Sequence[tuple[ShardBucket, int]]) -> None:
        """Put the new values into parameters that have other memory, which is freed unless it is shared."""
        for bucket, index in moved:
            parameter = bucket.spec.parameters[index]
            if bucket.is_moved:
                bucket.lend()
            if is_used_elsewhere(parameter):
                parameter.detach().copy_(bucket.lent[index])
            else:
                parameter.data = bucket.lent[index].data

    def let_go(self) -> None:
        """Give the parameters private memory again."""
        self._let_go()

    # --- after the step -------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Send the stepped slices to all members: a barrier with shared memory, otherwise an all-gather."""
        if self._schedule is not None:
            self.meet()
            return
        for gather in self._gathers:
            gather.start(background=False)
        for bucket, gather in zip(self.buckets, self._gathers, strict=True):
            whole = gather.wait()
            if isinstance(gather, RequestedReduction):
                bucket.values.copy_(whole)

    def meet(self) -> None:
        """Wait for every member: needed before stepping if gradients were reduced earlier."""
        if self._schedule is not None and self._schedule.meet("optimizer.step"):
            raise HorovodInternalError(
                "a sharded optimizer is not supported with Join: every rank has to step its slice"
            )

    def release(self) -> None:
        """Release the reductions."""
        self._finalizer()

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """Return the norm over all members' slices (collective)."""
        gradients = [shard.parameter.grad for shard in self.owned if shard.parameter.grad is not None]
        found = total_norm(gradients, norm_type)
        norm = found.double().reshape(1)
        infinite = norm_type == float("inf")
        value = norm if infinite else norm**norm_type
        reduce = Reduce(ReduceOp.MAX if infinite else ReduceOp.SUM)
        self.runtime.allreduce_(value, f"gradient norm {self.buckets[0].spec.name}", reduce, self._set_id)
        total = value if infinite else value ** (1.0 / norm_type)
        return total.to(found.dtype if found.dtype is torch.float64 else torch.float32).squeeze(0)

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply this rank's reduced slices by a factor."""
        for bucket in self.buckets:
            bucket.gradient.mul_(factor.to(bucket.gradient.device))
            torch._foreach_zero_(bucket.gaps)  # a non-finite factor turns zeros into NaN

    def inner_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return a parameter group for each kind, with its options and this rank's shards.

        A rank without a shard of some kind steps one dummy element instead, to track the scalars of its state.
        """
        result = []
        for kind, group in enumerate(groups):
            members = [shard.parameter for shard in self.owned if shard.kind == kind]
            if not members:
                like = group["params"][0]
                idle = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device), requires_grad=False)
                idle.grad = torch.zeros_like(idle)
                members.append(idle)
            result.append({**group, "params": members})
        return result
