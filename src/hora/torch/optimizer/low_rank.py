"""Gradient reduction by low-rank factors: `Compression.powersgd`, between hosts, from its first step on.

A bucket's factors P, with whatever travels as it is behind them, are sent when its last gradient is there, while backward goes
on. When they are back, at a later gradient or in `finish`, the bucket's part of the factors Q is made of them; `finish` sends
all Q together. So two round trips follow the last gradient, however many buckets there are. Gradients are not copied: the
error memory takes them up, and the product of the factors is written over them.

    idle --all gradients are there--> P under way --P is there--> Q made --finish--> idle
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch

from hora import engine
from hora.engine.request import Kind, ReduceOp
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.per_parameter import PerParameterReducer
from hora.torch.optimizer.powersgd import PowerSGDMemory, orthonormalise_, working_dtype
from hora.torch.optimizer.reducer import ReduceOptions

__all__ = ["BUCKET_BYTES", "LowRankReducer"]

# Of gradients. Factors are a hundredth of that: smaller buckets would be many small requests, each a round trip.
BUCKET_BYTES = 16 * 2**20


class _Request:
    """A sum of one tensor over the members, in place, in every step anew."""

    def __init__(self, runtime: engine.Runtime, options: ReduceOptions, name: str, flat: torch.Tensor) -> None:
        self._runtime, self._options, self._name, self.flat = runtime, options, name, flat
        self._handle: int | None = None

    def start(self, *, background: bool = True) -> None:
        self._handle = self._runtime.submit(
            Kind.ALLREDUCE,
            [self.flat],
            outputs=[self.flat],
            name=self._name,
            op=ReduceOp.SUM,
            process_set_id=self._options.process_set_id,
            background=background,
        )

    @property
    def under_way(self) -> bool:
        return self._handle is not None

    @property
    def arrived(self) -> bool:
        return self._handle is not None and self._runtime.poll(self._handle)

    def wait(self) -> None:
        handle, self._handle = self._handle, None
        if handle is not None:
            self._runtime.synchronize(handle)


class _Bucket:
    """Some parameters whose factors P travel together. `second`: room for their factors Q, transposed."""

    def __init__(
        self,
        runtime: engine.Runtime,
        options: ReduceOptions,
        spec: BucketSpec,
        memory: PowerSGDMemory,
        second: Sequence[torch.Tensor],
    ) -> None:
        self._options, self._memory, self._second = options, memory, second
        self.parameters = spec.parameters
        self.matrices = [p for p in spec.parameters if memory.rank_of(p)]
        self._rest = [p for p in spec.parameters if not memory.rank_of(p)]
        self._first = _Flat(
            [(p.shape[0], memory.rank_of(p)) for p in self.matrices], self._rest, like=spec.parameters[0]
        )
        self.request = _Request(runtime, options, f"{spec.name} P", self._first.flat)
        self._factors: list[torch.Tensor] = []
        self.num_ready = 0

    def take(self, factors: list[torch.Tensor]) -> None:
        """Go on with these factors Q."""
        self._factors = factors

    def send(self) -> None:
        """All gradients are there: send P."""
        self.num_ready = 0
        for parameter, q, p in zip(self.matrices, self._factors, self._first.matrices, strict=True):
            error = self._memory.error(parameter)
            if parameter.grad is not None:
                error.add_(parameter.grad.detach())
            orthonormalise_(q)
            torch.mm(_matrix(error), q, out=p)
        for parameter, place in zip(self._rest, self._first.rest, strict=True):
            if parameter.grad is None:
                place.zero_()
            else:
                place.copy_(parameter.grad.detach())
        self.request.start()

    def make_second(self) -> None:
        """Wait for P, and make this rank's Q."""
        self.request.wait()
        # An infinity on one rank is in the sum on all, which makes them decide alike: their gradients are then not finite
        # either, as a GradScaler wants it, and what the ranks still had to send is lost.
        finite = bool(torch.isfinite(self._first.flat.sum()))
        for parameter, p, q in zip(self.matrices, self._first.matrices, self._second, strict=True):
            if finite:
                orthonormalise_(p)
                # Transposed: Pᵀ M takes half the time of Mᵀ P, whose reads of M jump from row to row.
                torch.mm(p.t(), _matrix(self._memory.error(parameter)), out=q)
            else:
                p.fill_(torch.nan)
                q.fill_(torch.nan)

    def write_back(self) -> None:
        """The sum of all Q is there: the gradients are the products of the factors."""
        size = self._options.num_members
        times = 1.0 if self._options.op == ReduceOp.AVERAGE else float(size)
        for parameter, p, new, q in zip(self.matrices, self._first.matrices, self._second, self._factors, strict=True):
            error = self._memory.error(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.detach()
            q.copy_(new.t()).div_(size)
            if gradient.is_contiguous() and gradient.dtype is error.dtype:
                torch.mm(p, q.t(), out=_matrix(gradient))
                error.sub_(gradient)
            else:
                product = torch.mm(p, q.t()).view(parameter.shape)
                gradient.copy_(product)
                error.sub_(product)
            if times != 1.0:
                gradient.mul_(times)
        if not all(bool(torch.isfinite(q.sum())) for q in self._factors):
            self._memory.forget(self.matrices)
        for parameter, place in zip(self._rest, self._first.rest, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(place.mul_(times / size))


class _Flat:
    """One buffer with a matrix of each of these shapes, and then room for some parameters as they are."""

    def __init__(
        self, shapes: Sequence[tuple[int, int]], rest: Sequence[torch.Tensor] = (), *, like: torch.Tensor
    ) -> None:
        sizes = [*(rows * columns for rows, columns in shapes), *(p.numel() for p in rest)]
        self.flat = torch.zeros(sum(sizes), dtype=working_dtype(like), device=like.device)
        parts = self.flat.split(sizes)
        self.matrices = [part.view(shape) for part, shape in zip(parts, shapes, strict=False)]
        self.rest = [part.view(p.shape) for part, p in zip(parts[len(shapes) :], rest, strict=True)]


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape[0], -1)


class LowRankReducer:
    """Reduces dense gradients as factors, and sparse ones (`others`) one by one."""

    def __init__(
        self,
        runtime: engine.Runtime,
        options: ReduceOptions,
        specs: Sequence[BucketSpec],
        memory: PowerSGDMemory,
        others: PerParameterReducer | None,
        *,
        label: str,
    ) -> None:
        self._runtime, self._memory, self._others = runtime, memory, others
        self._seconds: list[_Request] = []
        room = self._make_room(options, [p for spec in specs for p in spec.parameters if memory.rank_of(p)], label)
        self._buckets = [
            _Bucket(runtime, options, spec, memory, [room[id(p)] for p in spec.parameters if id(p) in room])
            for spec in specs
        ]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._in_step = False

    def _make_room(
        self, options: ReduceOptions, matrices: Sequence[torch.Tensor], label: str
    ) -> dict[int, torch.Tensor]:
        """Room for the factors Q of all parameters, in one request for each dtype and device; by the parameter's id."""
        room: dict[int, torch.Tensor] = {}
        kinds: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in matrices:
            kinds.setdefault((working_dtype(parameter), parameter.device), []).append(parameter)
        for number, alike in enumerate(kinds.values()):
            shapes = [(self._memory.rank_of(p), p.numel() // p.shape[0]) for p in alike]
            flat = _Flat(shapes, like=alike[0])
            self._seconds.append(_Request(self._runtime, options, f"{label}.Q.{number}", flat.flat))
            room.update((id(p), place) for p, place in zip(alike, flat.matrices, strict=True))
        return room

    def ready(self, parameter: torch.Tensor) -> None:
        if not self._in_step:
            self._begin_step()
        bucket = self._of.get(id(parameter))
        if bucket is None:
            assert self._others is not None
            self._others.ready(parameter)
            return
        for sent in self._buckets:
            if sent.request.arrived:
                sent.make_second()
        bucket.num_ready += 1
        if bucket.num_ready == len(bucket.parameters):
            bucket.send()

    def _begin_step(self) -> None:
        self._in_step = self._memory.amid = True
        if self._runtime.num_joins != self._memory.num_joins:  # ranks that had joined have missed the others' factors
            self._memory.num_joins = self._runtime.num_joins
            self._memory.forget()
        factors = iter(self._memory.factors([p for bucket in self._buckets for p in bucket.matrices]))
        for bucket in self._buckets:
            bucket.take([next(factors) for _ in bucket.matrices])

    def note_missing(self) -> None:
        pass

    def finish(self) -> None:
        self._in_step = False
        try:
            for bucket in self._buckets:
                if bucket.request.under_way:
                    bucket.make_second()
            for request in self._seconds:
                request.start(background=len(self._seconds) > 1)
            for request in self._seconds:
                request.wait()
            for bucket in self._buckets:
                bucket.write_back()
            if self._others is not None:
                self._others.finish()
            self._memory.amid = False
        except BaseException:
            for bucket in self._buckets:
                bucket.num_ready = 0
            for request in (*(bucket.request for bucket in self._buckets), *self._seconds):
                with contextlib.suppress(
                    Exception
                ):  # each must be collected; the first error is on its way to the user
                    request.wait()
            self._memory.forget()
            self._memory.amid = False
            raise
