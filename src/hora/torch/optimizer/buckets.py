"""Gradient buckets: many gradients in one flat buffer, reduced as one request while backward continues.

Each gradient is copied into its bucket (and cast by the compression) when it is ready. The last gradient of a bucket
starts the reduction. `.grad` becomes a view of the bucket, so results are not copied back. If the members share memory,
the buckets lie in it and are reduced in place. `finish` reduces the last bucket on the thread that waits for it.
`order` agrees on the layout; the optimizer calls `ready` and `finish`.

Users may do anything to a `.grad`: give it other memory, move its storage (`share_memory`), keep it over steps. So it
is a new tensor in every step, on a storage that the engine does not use itself (`_lend`), and in the next step its
address says whether it still is in the bucket. A tensor that is still referenced then keeps its memory, and the bucket
gets other.

States of a bucket: filling --last gradient--> full, and started if it may overlap --finish--> filling.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import NamedTuple

import torch

from hora import engine
from hora.engine.request import Kind, Reduce
from hora.engine.schedule import ReductionSchedule
from hora.engine.shm.reduction import SharedMemoryReduction
from hora.engine.shm.segment import SharedMemory, Window
from hora.engine.transport.host_reduction import HostReduction
from hora.torch.compression import ErrorFeedback
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, Reduction, RequestedReduction, summed

# Smaller gradients are copied together when the bucket is complete: a call costs more than the bytes.
SMALL_BYTES = 16 * 1024
# Up to this many bytes over all members, every member reduces everything: waiting for slices would take longer.
_DIRECT_BYTES = 256 * 1024


# Of a storage, by its address: tensors and others that hold it.
use_count: Callable[[int], int] = torch._C._storage_Use_Count
is_set_to, gradient_of = torch.Tensor.is_set_to, attrgetter("grad")


def apart(flat: torch.Tensor) -> torch.Tensor:
    """Return a tensor of the same memory on a storage of its own, which can be moved without moving this one's."""
    if flat.device.type != "cpu":
        return flat  # device memory is shared where it is
    return torch.from_numpy(flat.view(torch.uint8).numpy()).view(flat.dtype)


def alike(tensor: torch.Tensor, view: torch.Tensor) -> bool:
    """Return whether a parameter or its gradient fits the place that it got."""
    return (tensor.dtype, tensor.shape, tensor.device) == (view.dtype, view.shape, view.device)


def described(tensor: torch.Tensor) -> str:
    """Describe a tensor in an error."""
    return f"{tensor.dtype}, shape {list(tensor.shape)}, on {tensor.device}"


def release_all(reductions: Sequence[Reduction]) -> None:
    """Release these reductions in the engine."""
    for reduction in reductions:
        reduction.release()


def copy_gradients(targets: list[torch.Tensor], sources: list[torch.Tensor], scale: float) -> None:
    """Copy gradients, times `scale`, to their places. Several are small ones."""
    if len(targets) > 1:
        torch._foreach_copy_(targets, sources)
        if scale != 1.0:
            torch._foreach_mul_(targets, scale)
    elif targets and scale != 1.0:
        torch.mul(sources[0], scale, out=targets[0])
    elif targets:
        targets[0].copy_(sources[0])


class Bucket:
    """One flat buffer and its gradients, plus one control element that signals a changed order to the peers.

    Results are in `flat`. Gradients are multiplied by `scale` when they are copied.
    """

    def __init__(
        self, spec: BucketSpec, flat: torch.Tensor, reduction: Reduction, options: ReduceOptions, *, scale: float = 1.0
    ) -> None:
        self.parameters = spec.parameters
        self.flat = flat
        self.reduction = reduction
        self.num_ready = 0
        self._scale = scale
        self._casts = spec.dtype is not spec.parameters[0].dtype
        self.converts = self._casts  # or a gradient is sparse: `.grad` is not a view of the result
        self._spec, self._names = spec, options.names
        # Where gradients are written: the buffer itself, or this turn's input of a direct reduction.
        self._is_direct = isinstance(reduction, SharedMemoryReduction) and reduction.out is not None
        self.places = [(flat, spec.views(flat))]
        if isinstance(reduction, SharedMemoryReduction) and reduction.out is not None:
            mine = [views[options.member] for views in reduction.places]
            self.places = [(place, spec.views(place)) for place in mine]
        # Values in the gaps and in the control element would affect the scale of the gradients in their block.
        self.gaps = [spec.gaps(place) for place, _ in self.places]
        feeds_back = self._casts and isinstance(options.compression, ErrorFeedback)
        self._residuals = [torch.zeros_like(p) for p in spec.parameters] if feeds_back else None
        self.small: list[int] = []  # gradients that arrived and are not copied yet
        self._was_moved = False  # the storage of the views, in this step
        self._lend()

    def _lend(self) -> None:
        """Make the views of `flat` that users get: on a storage of their own, which they can move or keep."""
        in_window = not self._casts and not self._is_private
        self._window = Window(self.flat) if in_window else None
        lent = apart(self.flat) if self._window is None else self._window.tensor
        self.storage = lent.untyped_storage()
        self.address = self.storage.data_ptr()
        self.views = self._spec.views(lent)
        del lent
        self._num_uses = use_count(self.storage._cdata)

    @property
    def _is_private(self) -> bool:
        """Return whether no other process has this memory."""
        return self._is_direct or isinstance(self.reduction, RequestedReduction)

    def begin(self) -> None:
        """Begin a step. Gradients of earlier steps that are referenced elsewhere than in `.grad` keep their memory."""
        self._was_moved = False
        num_uses = use_count(self.storage._cdata)
        if self.storage.data_ptr() != self.address:
            self._lend()
        elif num_uses != self._num_uses:
            for parameter, view in zip(self.parameters, self.views, strict=True):
                gradient = parameter.grad
                if gradient is not None and not gradient.is_sparse and gradient.is_set_to(view):
                    num_uses -= 1
            if num_uses > self._num_uses:
                self._give_away()

    def _follow(self) -> None:
        """Make other views where the storage of the last ones was moved."""
        if self.storage.data_ptr() != self.address:
            self._lend()
            self._was_moved = True

    def _give_away(self) -> None:
        """Leave the memory that users see to them."""
        if self._window is not None:
            self._window.keep()
        else:
            self.flat = torch.zeros_like(self.flat)
            assert isinstance(self.reduction, SharedMemoryReduction | RequestedReduction), self.reduction
            self.reduction.replace(self.flat)
            if not self._is_direct:
                self.places = [(self.flat, self._spec.views(self.flat))]
                self.gaps = [self._spec.gaps(self.flat)]
        self._lend()

    @property
    def turn(self) -> int:
        """Return the index of the buffer that takes this step's gradients."""
        reduction = self.reduction
        return reduction.turn if isinstance(reduction, SharedMemoryReduction) and len(self.places) > 1 else 0

    def complete(self) -> None:
        """Copy the remaining gradients; zero the gaps and the control element. The bucket is ready to be reduced."""
        if self.small:
            self.fill(self.small)
            self.small = []
        torch._foreach_zero_(self.gaps[self.turn])

    def fill(self, indices: Sequence[int]) -> None:
        """Copy gradients into the reduction's input. Unless the bucket casts, `.grad` becomes a view of the result."""
        self._follow()
        try:
            self._fill(indices, self.places[self.turn][1])
        except RuntimeError as error:
            for index in indices:
                parameter, view = self.parameters[index], self.views[index]
                if self._casts or alike(parameter, view):
                    continue
                raise ValueError(
                    f"{self._names[parameter]} is {described(parameter)} now, but its gradients are reduced as "
                    f"{described(view)}: wrap the optimizer again after converting a model"
                ) from error
            raise

    def _fill(self, indices: Sequence[int], places: Sequence[torch.Tensor]) -> None:
        targets, sources = [], []
        for index in indices:
            parameter, place = self.parameters[index], places[index]
            gradient = parameter.grad
            if gradient is None:
                place.zero_()
                parameter.grad = torch.zeros_like(parameter) if self._casts else self.views[index].data
                continue
            if gradient.is_sparse:  # stays sparse until `give_back`
                self.converts = True
                torch.mul(gradient.detach().to_dense(), self._scale, out=place)
                continue
            is_lent = gradient.is_set_to(self.views[index])
            if not is_lent and not self._casts:
                parameter.grad = self.views[index].data
            if not is_lent or self._is_direct:
                if gradient.requires_grad:
                    gradient = gradient.detach()
                if self._residuals is not None:
                    gradient.add_(self._residuals[index])
                targets.append(place)
                sources.append(gradient)
            elif self._scale != 1.0:
                place.mul_(self._scale)
        copy_gradients(targets, sources, self._scale)
        if self._residuals is not None:
            self._note_residuals(indices, places, self._residuals)

    def _note_residuals(
        self, indices: Sequence[int], places: Sequence[torch.Tensor], residuals: Sequence[torch.Tensor]
    ) -> None:
        """Keep the cast's rounding error for the next step; non-finite values are sent but kept out of the residual."""
        for index in indices:
            gradient = self.parameters[index].grad
            if gradient is not None and not gradient.is_sparse:
                torch.sub(gradient, places[index], out=residuals[index]).nan_to_num_(0.0, 0.0, 0.0)

    def restore_gradients(self) -> None:
        """Make results the gradients again whose memory was moved while they were reduced."""
        self._follow()
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None or (not gradient.is_sparse and gradient.is_set_to(view)):
                continue
            if not self._was_moved:
                raise ValueError(
                    f"the gradient of {self._names[parameter]} was replaced while it was reduced, between "
                    "backward() and step(): call optimizer.synchronize() before changing gradients"
                )
            parameter.grad = view.data

    def give_back(self) -> None:
        """Copy results to gradients that are not views of them."""
        for parameter, view in zip(self.parameters, self.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = view.to(parameter.dtype, copy=True)
            elif gradient.is_sparse:
                parameter.grad = view.to(parameter.dtype).to_sparse(1)
            elif not gradient.is_set_to(view):
                gradient.detach().copy_(view)


def make_buckets(runtime: engine.Runtime, options: ReduceOptions, specs: Sequence[BucketSpec]) -> list[Bucket]:
    """Create empty buckets, in shared memory if the members have some (collective)."""
    memory = _shared_memory(runtime, options, specs)
    if memory is not None:
        schedule = runtime.sets.schedule(memory, options.process_set_id)
        buckets = [_shared_bucket(schedule, options, spec, memory) for spec in specs]
        runtime.barrier(options.process_set_id)  # a reduction may start only once all members have created it
        return buckets
    # On GPUs gradients are copied together, so scaling them on the way would cost extra calls.
    scales, layouts = list[float](), list[Layout]()
    for spec in specs:
        scale, reduce = options.early_scaling(spec.dtype) if spec.device.type == "cpu" else (1.0, options.reduce)
        reduce = reduce._replace(code=options.code_in_buckets(spec.parameters))
        scales.append(scale)
        layouts.append(Layout(spec.name, spec.num_elements, spec.dtype, spec.device, reduce))
    flats, reductions = make_reductions(runtime, options, layouts)
    return [
        Bucket(spec, flat, reduction, options, scale=scale)
        for spec, flat, reduction, scale in zip(specs, flats, reductions, scales, strict=True)
    ]


def _shared_memory(runtime: engine.Runtime, options: ReduceOptions, specs: Sequence[BucketSpec]) -> SharedMemory | None:
    """Allocate shared memory for all members' buckets and their schedule."""
    if any(spec.device.type != "cpu" for spec in specs):
        return None
    size = options.num_members
    num_bytes = SharedMemory.space(ReductionSchedule.num_bytes(size), torch.uint8)
    for spec in specs:
        num_bytes += size * _num_turns(options, spec) * SharedMemory.space(spec.num_elements, spec.dtype)
    return runtime.sets.shared_memory(options.process_set_id, num_bytes)


class Layout(NamedTuple):
    """A tensor that is reduced in every step."""

    name: str
    num_elements: int
    dtype: torch.dtype
    device: torch.device
    reduce: Reduce = Reduce()
    kind: Kind = Kind.ALLREDUCE  # or half of one, from or to this member's slice


def make_reductions(
    runtime: engine.Runtime, options: ReduceOptions, layouts: Sequence[Layout]
) -> tuple[list[torch.Tensor], list[Reduction]]:
    """Create zeroed tensors and their reductions, in place, to run in this order in every step (collective).

    On CPUs of several hosts they need no announcement.
    """
    set_id, found = options.process_set_id, _host_memory(runtime, options, layouts)
    flats, made = list[torch.Tensor](), list[Reduction]()
    if found is None:
        for name, count, dtype, device, reduce, kind in layouts:
            flat = torch.zeros(count, dtype=dtype, device=device)
            sent = flat.chunk(options.num_members)[options.member] if kind is Kind.ALLGATHER else flat
            flats.append(flat)
            made.append(RequestedReduction(options, kind, sent, name=name, reduce=reduce))
        return flats, made
    memory, near = found
    schedule = runtime.sets.schedule(memory, set_id, near)
    link = runtime.sets.host_link(schedule)
    for name, count, dtype, _, reduce, kind in layouts:
        places = [memory.allocate(count, dtype, copied=m == schedule.member) for m in range(len(schedule.ranks))]
        flats.append(places[schedule.member])
        made.append(HostReduction(schedule, link, places, name=name, kind=kind, reduce=reduce))
    runtime.barrier(set_id)  # a reduction may start only once all members have created it
    return flats, made


def _host_memory(
    runtime: engine.Runtime, options: ReduceOptions, layouts: Sequence[Layout]
) -> tuple[SharedMemory, list[int]] | None:
    """Allocate memory for these tensors and a schedule that the members on this host share (collective).

    Also returns those members. None on GPUs, if the set does not span hosts, or if some host has too little memory.
    """
    set_id = options.process_set_id
    # Members own slices in the order of their numbers.
    in_order = any(layout.kind is not Kind.ALLREDUCE for layout in layouts)
    on_cpu = all(layout.device.type == "cpu" for layout in layouts)
    if not on_cpu or not runtime.spans_hosts(set_id, in_order=in_order):
        return None
    num_bytes = SharedMemory.space(ReductionSchedule.num_bytes(1), torch.uint8)
    num_bytes += sum(SharedMemory.space(layout.num_elements, layout.dtype) for layout in layouts)
    memory, near = runtime.sets.host_memory(set_id, num_bytes)
    everywhere = summed([memory is not None], options, "optimizer.memory")[0] == options.num_members
    return (memory, near) if everywhere and memory is not None else None


def _num_turns(options: ReduceOptions, spec: BucketSpec) -> int:
    """Return 2 for a direct reduction, in which each member reduces all data, and 1 for a sliced one."""
    if options.gradient_predivide_factor != 1.0:
        return 1  # gradients of a direct reduction are not scaled when they are copied
    return 2 if spec.num_elements * spec.dtype.itemsize * options.num_members <= _DIRECT_BYTES else 1


def _shared_bucket(
    schedule: ReductionSchedule, options: ReduceOptions, spec: BucketSpec, memory: SharedMemory
) -> Bucket:
    num_turns = _num_turns(options, spec)
    places = [  # a forked child sees gradients through a `Window` alone
        [memory.allocate(spec.num_elements, spec.dtype, copied=False) for _ in range(options.num_members)]
        for _ in range(num_turns)
    ]
    if num_turns == 1:
        scale, reduce = options.early_scaling(spec.dtype)
        sliced = SharedMemoryReduction(schedule, Kind.ALLREDUCE, places, name=spec.name, reduce=reduce)
        return Bucket(spec, places[0][options.member], sliced, options, scale=scale)
    out = torch.zeros(spec.num_elements, dtype=spec.dtype, device="cpu")
    direct = SharedMemoryReduction(schedule, Kind.ALLREDUCE, places, name=spec.name, reduce=options.reduce, out=out)
    return Bucket(spec, out, direct, options)


class Buckets(Reducer):
    """Reduces dense gradients in buckets, and all others (`others`) one by one.

    With `overlap` each bucket is reduced during backward once it is full, otherwise in `finish`.
    """

    def __init__(
        self, specs: Sequence[BucketSpec], buckets: Sequence[Bucket], others: Reducer | None, *, overlap: bool = True
    ) -> None:
        self.specs = tuple(specs)
        self.overlap = overlap
        self.change_wanted = False  # a rank has seen another order
        self._others = others
        self._where: dict[int, tuple[Bucket, int, int, bool]] = {}  # by the parameter's id
        for number, bucket in enumerate(buckets):
            for index, parameter in enumerate(bucket.parameters):
                is_small = parameter.numel() * bucket.flat.element_size() < SMALL_BYTES
                self._where[id(parameter)] = (bucket, number, index, is_small)
        self._buckets = buckets
        self._waits = [*(bucket.reduction.wait for bucket in buckets), *([] if others is None else [others.finish])]
        self._last = buckets[-1]
        self._finalizer = weakref.finalize(self, release_all, [bucket.reduction for bucket in buckets])
        self._in_order = True
        self._next = 0

    def ready(self, parameter: torch.Tensor) -> None:
        where = self._where.get(id(parameter))
        if where is None:
            assert self._others is not None
            self._others.ready(parameter)
            return
        bucket, number, index, is_small = where
        if not bucket.num_ready:
            bucket.begin()
        if is_small:
            bucket.small.append(index)
        else:
            bucket.fill((index,))
        bucket.num_ready += 1
        if bucket.num_ready == len(bucket.parameters):
            # An unexpected order is correct but slower: note it, and agree on a better one later.
            if number != self._next:
                self._in_order = False
            self._next += 1
            if bucket is not self._last:
                bucket.complete()
                if self.overlap:
                    bucket.reduction.start(background=True)

    def note_missing(self) -> None:
        """Note that a gradient is missing: its bucket could not be reduced during backward."""
        self._in_order = False

    def finish(self) -> None:
        self._last.complete()
        if not self._in_order:
            self._last.places[self._last.turn][0][-1] = 1.0
        self._in_order, self._next = True, 0
        for bucket in self._buckets:
            if not bucket.reduction.in_flight:
                bucket.reduction.start(background=False)
            bucket.num_ready = 0
        first_error: Exception | None = None
        for wait in self._waits:
            try:
                wait()
            except Exception as error:  # every reduction must be waited for, even if another fails
                first_error = first_error or error
        if first_error is not None:
            raise first_error
        self.change_wanted = self._last.flat[-1].item() != 0.0
        for bucket in self._buckets:
            if bucket.converts:
                bucket.give_back()
                continue
            try:
                is_there = all(map(is_set_to, map(gradient_of, bucket.parameters), bucket.views))
            except (RuntimeError, TypeError):  # sparse, or None
                is_there = False
            if not is_there or bucket.storage.data_ptr() != bucket.address:
                bucket.restore_gradients()

    def release(self) -> None:
        """Release the reductions; gradients that are views of the buckets keep the memory alive."""
        self._finalizer()
