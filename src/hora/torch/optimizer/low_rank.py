"""Gradient reduction by low-rank factors: `Compression.powersgd`, between hosts, from its first step on.

Two requests per bucket and step: the factors P, with whatever travels as it is behind them, then the factors Q. A bucket's
first request starts when its last gradient is there, and its second when the first is done: seen at the next gradient, or
in `finish`. The engine fuses the requests that wait. Gradients are not copied: the error memory takes them up, and the
product of the factors is written over them.

    idle --all gradients are there--> P under way --P is there--> Q under way --Q is there--> idle
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


class _Bucket:
    """Some parameters whose factors travel together."""

    def __init__(
        self, runtime: engine.Runtime, options: ReduceOptions, spec: BucketSpec, memory: PowerSGDMemory
    ) -> None:
        self._runtime, self._options, self._name, self._memory = runtime, options, spec.name, memory
        self.parameters = spec.parameters
        self.matrices = [p for p in spec.parameters if memory.rank_of(p)]
        self._rest = [p for p in spec.parameters if not memory.rank_of(p)]
        self._first = _Flat([(p.shape[0], memory.rank_of(p)) for p in self.matrices], self._rest, like=spec)
        # Transposed: Pᵀ M takes half the time of Mᵀ P, whose reads of M jump from row to row.
        self._second = _Flat([(memory.rank_of(p), p.numel() // p.shape[0]) for p in self.matrices], (), like=spec)
        self._factors: list[torch.Tensor] = []
        self._handle: int | None = None
        self.phase = 0
        self.num_ready = 0

    def take(self, factors: list[torch.Tensor]) -> None:
        """Go on with these factors Q."""
        self._factors = factors

    def begin(self) -> None:
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
        self._send("P", self._first.flat)

    def _send(self, what: str, flat: torch.Tensor) -> None:
        self.phase += 1
        self._handle = self._runtime.submit(
            Kind.ALLREDUCE,
            [flat],
            outputs=[flat],
            name=f"{self._name} {what}",
            op=ReduceOp.SUM,
            process_set_id=self._options.process_set_id,
        )

    @property
    def arrived(self) -> bool:
        return self._handle is not None and self._runtime.poll(self._handle)

    def go_on(self) -> None:
        """Wait for what is under way, and do what comes next."""
        assert self._handle is not None, self._name
        handle, self._handle = self._handle, None
        self._runtime.synchronize(handle)
        if self.phase == 1:
            self._send_second()
        else:
            self.phase = 0
            self._write_back()

    def _send_second(self) -> None:
        # An infinity on one rank is in the sum on all, which makes them decide alike: their gradients are then not finite
        # either, as a GradScaler wants it, and what the ranks still had to send is lost.
        finite = bool(torch.isfinite(self._first.flat.sum()))
        for parameter, p, q in zip(self.matrices, self._first.matrices, self._second.matrices, strict=True):
            if finite:
                orthonormalise_(p)
                torch.mm(p.t(), _matrix(self._memory.error(parameter)), out=q)
            else:
                p.fill_(torch.nan)
                q.fill_(torch.nan)
        self._send("Q", self._second.flat)

    def _write_back(self) -> None:
        size = self._options.num_members
        times = 1.0 if self._options.op == ReduceOp.AVERAGE else float(size)
        self._second.flat.div_(size)
        for parameter, p, new, q in zip(
            self.matrices, self._first.matrices, self._second.matrices, self._factors, strict=True
        ):
            error = self._memory.error(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.detach()
            if gradient.is_contiguous() and gradient.dtype is error.dtype:
                torch.mm(p, new, out=_matrix(gradient))
                error.sub_(gradient)
            else:
                product = torch.mm(p, new).view(parameter.shape)
                gradient.copy_(product)
                error.sub_(product)
            if times != 1.0:
                gradient.mul_(times)
            q.copy_(new.t())
        if not bool(torch.isfinite(self._second.flat.sum())):
            self._memory.forget(self.matrices)
        for parameter, place in zip(self._rest, self._first.rest, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(place.mul_(times / size))

    def give_up(self) -> None:
        """Forget this step; a handle must be collected whatever becomes of it."""
        handle, self._handle, self.phase, self.num_ready = self._handle, None, 0, 0
        if handle is not None:
            with contextlib.suppress(Exception):  # the first error is on its way to the user
                self._runtime.synchronize(handle)


class _Flat:
    """One buffer with a matrix of each of these shapes, and then room for some parameters as they are."""

    def __init__(self, shapes: Sequence[tuple[int, int]], rest: Sequence[torch.Tensor], *, like: BucketSpec) -> None:
        sizes = [*(rows * columns for rows, columns in shapes), *(p.numel() for p in rest)]
        self.flat = torch.zeros(sum(sizes), dtype=working_dtype(like.parameters[0]), device=like.device)
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
    ) -> None:
        self._runtime, self._memory, self._others = runtime, memory, others
        self._buckets = [_Bucket(runtime, options, spec, memory) for spec in specs]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._begun: list[_Bucket] = []
        self._in_step = False

    def ready(self, parameter: torch.Tensor) -> None:
        if not self._in_step:
            self._begin_step()
        bucket = self._of.get(id(parameter))
        if bucket is None:
            assert self._others is not None
            self._others.ready(parameter)
            return
        for under_way in self._begun:
            if under_way.arrived:
                under_way.go_on()
        bucket.num_ready += 1
        if bucket.num_ready == len(bucket.parameters):
            bucket.begin()
            self._begun.append(bucket)

    def _begin_step(self) -> None:
        self._in_step = True
        if self._runtime.num_joins != self._memory.num_joins:  # ranks that had joined have missed the others' factors
            self._memory.num_joins = self._runtime.num_joins
            self._memory.forget()
        factors = iter(self._memory.factors([p for bucket in self._buckets for p in bucket.matrices]))
        for bucket in self._buckets:
            bucket.take([next(factors) for _ in bucket.matrices])

    def note_missing(self) -> None:
        pass

    def finish(self) -> None:
        begun, self._begun, self._in_step = self._begun, [], False
        try:
            for phase in (1, 2):
                for bucket in begun:
                    if bucket.phase == phase:
                        bucket.go_on()
            if self._others is not None:
                self._others.finish()
        except BaseException:
            for bucket in self._buckets:
                bucket.give_up()
            self._memory.forget()
            raise
