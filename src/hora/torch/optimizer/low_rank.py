"""Gradient reduction by low-rank factors: `Compression.powersgd` between hosts, after its warm-up.

A bucket's factors P, followed by its uncompressed gradients, are sent once its last gradient is ready, while backward
continues. `finish` computes each bucket's factors Q when its P are reduced and sends all Q together. So two round trips
follow the last gradient. Gradients are not copied: they are added to the residual, and the product of the factors
overwrites them.

    idle --all gradients are ready--> P in flight --finish--> Q in flight --> idle

Like gradient buckets, factors on CPUs lie in the memory of each host and are sent in a fixed order, without
announcements.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import torch

from hora import engine
from hora.engine.request import ReduceOp
from hora.torch.optimizer.buckets import Layout, make_reductions, release_all
from hora.torch.optimizer.per_parameter import PerParameterReducer
from hora.torch.optimizer.powersgd import PowerSGDMemory, orthonormalise_, working_dtype
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, Reduction

# Of the data sent. Each bucket is a round trip, so smaller ones would be slow on a link with high latency.
BUCKET_BYTES = 512 * 2**10


class _Flat:
    """Layout of one buffer: a matrix for each shape, followed by uncompressed parameters."""

    def __init__(
        self, name: str, shapes: Sequence[tuple[int, int]], rest: Sequence[torch.Tensor] = (), *, like: torch.Tensor
    ) -> None:
        self._shapes, self._rest = shapes, rest
        self._sizes = [*(rows * columns for rows, columns in shapes), *(p.numel() for p in rest)]
        self.layout = Layout(name, sum(self._sizes), working_dtype(like), like.device)

    def divide(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the matrices and the uncompressed part as views."""
        parts = flat.split(self._sizes)
        matrices = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=False)]
        return matrices, [part.view(p.shape) for part, p in zip(parts[len(self._shapes) :], self._rest, strict=True)]


class _Bucket:
    """Parameters whose factors P are sent together. `second` holds their factors Q, transposed."""

    def __init__(
        self,
        options: ReduceOptions,
        parameters: Sequence[torch.Tensor],
        memory: PowerSGDMemory,
        layout: _Flat,
        flat: torch.Tensor,
        reduction: Reduction,
        second: Sequence[torch.Tensor],
    ) -> None:
        self._options, self._memory, self._second = options, memory, second
        self.parameters = parameters
        self.matrices = [p for p in parameters if memory.rank_of(p)]
        self._rest = [p for p in parameters if not memory.rank_of(p)]
        self.reduction, self._flat = reduction, flat
        self._first, self._places = layout.divide(flat)
        # By id: the index of a matrix, or the complement of the index of an uncompressed parameter.
        self._index = {id(p): index for index, p in enumerate(self.matrices)}
        self._index |= {id(p): ~index for index, p in enumerate(self._rest)}
        self.factors: list[torch.Tensor] = []  # Q of this step
        self.num_ready = 0

    def fill(self, parameter: torch.Tensor) -> None:
        """Compute P from a parameter's gradient, or copy an uncompressed gradient into the buffer."""
        index = self._index[id(parameter)]
        gradient = parameter.grad
        if index >= 0:
            error = self._memory.error(parameter)
            if gradient is not None:
                error.add_(gradient.detach())
            q = self.factors[index]
            orthonormalise_(q)
            torch.mm(_matrix(error), q, out=self._first[index])
        elif gradient is None:
            self._places[~index].zero_()
        else:
            self._places[~index].copy_(gradient.detach())
        self.num_ready += 1

    def make_second(self) -> None:
        """Compute this rank's Q, once the sum of all P is complete."""
        self.num_ready = 0
        # An infinity on one rank makes the sum infinite on all, so they decide alike. Gradients then become non-finite,
        # as a GradScaler expects, and the residuals are lost.
        finite = bool(torch.isfinite(self._flat.sum()))
        for parameter, p, q in zip(self.matrices, self._first, self._second, strict=True):
            if finite:
                orthonormalise_(p)
                # Transposed: Pᵀ M takes half the time of Mᵀ P, which reads M across rows.
                torch.mm(p.t(), _matrix(self._memory.error(parameter)), out=q)
            else:
                p.fill_(torch.nan)
                q.fill_(torch.nan)

    def write_back(self) -> None:
        """Write the products of the factors into the gradients, once the sum of all Q is complete."""
        size = self._options.num_members
        times = 1.0 if self._options.op == ReduceOp.AVERAGE else float(size)
        for parameter, p, new, q in zip(self.matrices, self._first, self._second, self.factors, strict=True):
            error = self._memory.error(parameter)
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = parameter.grad.detach()
            new.div_(size)
            q.copy_(new.t())
            if gradient.is_contiguous() and gradient.dtype is error.dtype:
                torch.mm(p, new, out=_matrix(gradient))
            else:
                gradient.copy_(torch.mm(p, new).view(parameter.shape))
            _matrix(error).addmm_(p, new, alpha=-1)
            if times != 1.0:
                gradient.mul_(times)
        if not all(bool(torch.isfinite(q.sum())) for q in self.factors):
            self._memory.forget(self.matrices)
        for parameter, place in zip(self._rest, self._places, strict=True):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.detach().copy_(place.mul_(times / size))


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape[0], -1)


def _plan(parameters: Sequence[torch.Tensor], memory: PowerSGDMemory) -> list[list[torch.Tensor]]:
    """Divide the parameters, in this order, into buckets of one dtype and device."""
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    buckets = []
    for parameter in parameters:
        kind = (working_dtype(parameter), parameter.device)
        if num_bytes.get(kind, BUCKET_BYTES) >= BUCKET_BYTES:
            filling[kind], num_bytes[kind] = [], 0
            buckets.append(filling[kind])
        filling[kind].append(parameter)
        rank = memory.rank_of(parameter)
        num_bytes[kind] += kind[0].itemsize * (rank * parameter.shape[0] if rank else parameter.numel())
    return buckets


class LowRankReducer(Reducer):
    """Reduces dense gradients as factors and sparse ones (`others`) one by one; all members create it together."""

    def __init__(
        self,
        runtime: engine.Runtime,
        options: ReduceOptions,
        parameters: Sequence[torch.Tensor],
        memory: PowerSGDMemory,
        others: PerParameterReducer | None,
        *,
        label: str,
    ) -> None:
        self._runtime, self._memory, self._others = runtime, memory, others
        planned = _plan(parameters, memory)
        first = [self._first(members, f"{label}.P.{number}") for number, members in enumerate(planned)]
        matrices: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for parameter in parameters:
            if memory.rank_of(parameter):
                matrices.setdefault((working_dtype(parameter), parameter.device), []).append(parameter)
        second = [self._second(alike, f"{label}.Q.{number}") for number, alike in enumerate(matrices.values())]
        layouts = [flat.layout for flat in (*first, *second)]
        flats, self._reductions = make_reductions(runtime, options, layouts)
        self._seconds = self._reductions[len(first) :]
        self._due: list[Reduction] = []  # of this step; all members compute them
        room: dict[int, torch.Tensor] = {}
        for alike, layout, flat in zip(matrices.values(), second, flats[len(first) :], strict=True):
            room.update((id(p), place) for p, place in zip(alike, layout.divide(flat)[0], strict=True))
        self._buckets = [
            _Bucket(options, members, memory, layout, flat, each, [room[id(p)] for p in members if id(p) in room])
            for members, layout, flat, each in zip(planned, first, flats, self._reductions, strict=False)
        ]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._in_step = False
        weakref.finalize(self, release_all, self._reductions)

    def _first(self, members: Sequence[torch.Tensor], name: str) -> _Flat:
        ranks = [(p, self._memory.rank_of(p)) for p in members]
        shapes = [(p.shape[0], rank) for p, rank in ranks if rank]
        return _Flat(name, shapes, [p for p, rank in ranks if not rank], like=members[0])

    def _second(self, matrices: Sequence[torch.Tensor], name: str) -> _Flat:
        return _Flat(name, [(self._memory.rank_of(p), p.numel() // p.shape[0]) for p in matrices], like=matrices[0])

    def ready(self, parameter: torch.Tensor) -> None:
        if not self._in_step:
            self._begin_step()
        bucket = self._of.get(id(parameter))
        if bucket is None:
            assert self._others is not None
            self._others.ready(parameter)
        else:
            bucket.fill(parameter)
            if bucket.num_ready == len(bucket.parameters):
                # `finish` sends the last bucket on the thread that waits for it.
                bucket.reduction.start(background=bucket is not self._buckets[-1])

    def _begin_step(self) -> None:
        self._in_step = self._memory.amid = True
        if self._runtime.num_joins != self._memory.num_joins:  # joined ranks have missed the others' factors
            self._memory.num_joins = self._runtime.num_joins
            self._memory.forget()
        self._due = list(self._reductions)
        factors = iter(self._memory.factors([p for bucket in self._buckets for p in bucket.matrices]))
        for bucket in self._buckets:
            bucket.factors = [next(factors) for _ in bucket.matrices]

    def _wait(self, reduction: Reduction) -> None:
        """Wait for a reduction of this step, starting it if needed."""
        if reduction in self._due:
            self._due.remove(reduction)
            reduction.wait()

    def finish(self) -> None:
        self._in_step = False
        try:
            for bucket in self._buckets:
                self._wait(bucket.reduction)
                bucket.make_second()
            for reduction in self._seconds:
                reduction.start(background=len(self._seconds) > 1)
            for reduction in self._seconds:
                self._wait(reduction)
            for bucket in self._buckets:
                bucket.write_back()
            if self._others is not None:
                self._others.finish()
            self._memory.amid = False
        except BaseException:
            for bucket in self._buckets:
                bucket.num_ready = 0
            for reduction in list(self._due):  # the other members compute all; the first error is being raised
                with contextlib.suppress(Exception):
                    self._wait(reduction)
            self._memory.forget()
            self._memory.amid = False
            raise
