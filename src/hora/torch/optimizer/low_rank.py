"""Gradient reduction by low-rank factors: `Compression.powersgd`, between hosts, from its first step on.

The factors P of a bucket, with whatever travels as it is behind them, are sent when its last gradient is there, while
backward goes on. `finish` makes each bucket's part of the factors Q when its P are back, and sends all Q together. So
two trips follow the last gradient. Gradients are not copied: the error memory takes them up, and the product of the
factors is written over them.

    idle --all gradients are there--> P under way --finish--> Q under way --> idle

Like gradient buckets, factors on CPUs lie in the memory of each host, and their order is fixed: nothing is announced,
and a trip is one way through the link.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import torch

from hora import engine
from hora.engine.request import ReduceOp
from hora.engine.schedule import PersistentReduction
from hora.torch.optimizer.buckets import make_reductions, release_all
from hora.torch.optimizer.per_parameter import PerParameterReducer
from hora.torch.optimizer.powersgd import PowerSGDMemory, orthonormalise_, working_dtype
from hora.torch.optimizer.reducer import ReduceOptions, RequestedReduction

__all__ = ["BUCKET_BYTES", "LowRankReducer"]

# Of what travels. Buckets follow one another, each a trip through the link, so that smaller ones would make a long link
# slow.
BUCKET_BYTES = 512 * 2**10


class _Flat:
    """Layout of one buffer: a matrix of each of these shapes, and then room for some parameters as they are."""

    def __init__(
        self, name: str, shapes: Sequence[tuple[int, int]], rest: Sequence[torch.Tensor] = (), *, like: torch.Tensor
    ) -> None:
        self.name, self.dtype, self.device = name, working_dtype(like), like.device
        self._shapes, self._rest = shapes, rest
        self._sizes = [*(rows * columns for rows, columns in shapes), *(p.numel() for p in rest)]
        self.count = sum(self._sizes)

    def divide(self, flat: torch.Tensor) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the matrices and the room behind them, as views."""
        parts = flat.split(self._sizes)
        matrices = [part.view(shape) for part, shape in zip(parts, self._shapes, strict=False)]
        return matrices, [part.view(p.shape) for part, p in zip(parts[len(self._shapes) :], self._rest, strict=True)]


class _Sum:
    """The sum of one buffer over the members, in place, once in every step."""

    def __init__(self, reduction: PersistentReduction | RequestedReduction) -> None:
        self._reduction = reduction
        self._due = False

    def expect(self) -> None:
        """A step begins, in which all members make this sum."""
        self._due = True

    def start(self, *, background: bool) -> None:
        self._reduction.start(background=background)

    def wait(self) -> None:
        """Wait for it; start it if that has not happened. Once in a step: again it does nothing."""
        if self._due:
            self._due = False
            self._reduction.wait()


class _Bucket:
    """Some parameters whose factors P travel together. `second`: room for their factors Q, transposed."""

    def __init__(
        self,
        options: ReduceOptions,
        parameters: Sequence[torch.Tensor],
        memory: PowerSGDMemory,
        layout: _Flat,
        flat: torch.Tensor,
        made: _Sum,
        second: Sequence[torch.Tensor],
    ) -> None:
        self._options, self._memory, self._second = options, memory, second
        self.parameters = parameters
        self.matrices = [p for p in parameters if memory.rank_of(p)]
        self._rest = [p for p in parameters if not memory.rank_of(p)]
        self.sum, self._flat = made, flat
        self._first, self._places = layout.divide(flat)
        # By id: of a matrix its index, of the others' places the complement of theirs.
        self._index = {id(p): index for index, p in enumerate(self.matrices)}
        self._index |= {id(p): ~index for index, p in enumerate(self._rest)}
        self._factors: list[torch.Tensor] = []
        self.num_ready = 0

    def take(self, factors: list[torch.Tensor]) -> None:
        """Go on with these factors Q."""
        self._factors = factors

    def fill(self, parameter: torch.Tensor) -> None:
        """The gradient of one of them is there: make its P, or put it into its place."""
        index = self._index[id(parameter)]
        gradient = parameter.grad
        if index >= 0:
            error = self._memory.error(parameter)
            if gradient is not None:
                error.add_(gradient.detach())
            q = self._factors[index]
            orthonormalise_(q)
            torch.mm(_matrix(error), q, out=self._first[index])
        elif gradient is None:
            self._places[~index].zero_()
        else:
            self._places[~index].copy_(gradient.detach())
        self.num_ready += 1

    @property
    def complete(self) -> bool:
        return self.num_ready == len(self.parameters)

    def make_second(self) -> None:
        """Wait for P, and make this rank's Q."""
        self.num_ready = 0
        self.sum.wait()
        # An infinity on one rank is in the sum on all, which makes them decide alike: their gradients are then not
        # finite either, as a GradScaler wants it, and what the ranks still had to send is lost.
        finite = bool(torch.isfinite(self._flat.sum()))
        for parameter, p, q in zip(self.matrices, self._first, self._second, strict=True):
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
        for parameter, p, new, q in zip(self.matrices, self._first, self._second, self._factors, strict=True):
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
        if not all(bool(torch.isfinite(q.sum())) for q in self._factors):
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


class LowRankReducer:
    """Reduces dense gradients as factors, and sparse ones (`others`) one by one (made by all members together)."""

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
        layouts = [*first, *second]
        flats, reductions = make_reductions(
            runtime, options, [(flat.name, flat.count, flat.dtype, flat.device, "") for flat in layouts]
        )
        self._sums = [_Sum(reduction) for reduction in reductions]
        self._seconds = self._sums[len(first) :]
        room: dict[int, torch.Tensor] = {}
        for alike, layout, flat in zip(matrices.values(), second, flats[len(first) :], strict=True):
            room.update((id(p), place) for p, place in zip(alike, layout.divide(flat)[0], strict=True))
        self._buckets = [
            _Bucket(options, members, memory, layout, flat, made, [room[id(p)] for p in members if id(p) in room])
            for members, layout, flat, made in zip(planned, first, flats, self._sums, strict=False)
        ]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        self._in_step = False
        weakref.finalize(self, release_all, [one for one in reductions if isinstance(one, PersistentReduction)])

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
            if bucket.complete:  # the last one is sent by `finish`, in the thread that then waits for it
                bucket.sum.start(background=bucket is not self._buckets[-1])

    def _begin_step(self) -> None:
        self._in_step = self._memory.amid = True
        if self._runtime.num_joins != self._memory.num_joins:  # ranks that had joined have missed the others' factors
            self._memory.num_joins = self._runtime.num_joins
            self._memory.forget()
        for made in self._sums:
            made.expect()
        factors = iter(self._memory.factors([p for bucket in self._buckets for p in bucket.matrices]))
        for bucket in self._buckets:
            bucket.take([next(factors) for _ in bucket.matrices])

    def note_missing(self) -> None:
        pass

    def finish(self) -> None:
        self._in_step = False
        try:
            for bucket in self._buckets:
                bucket.make_second()
            for made in self._seconds:
                made.start(background=len(self._seconds) > 1)
            for made in self._seconds:
                made.wait()
            for bucket in self._buckets:
                bucket.write_back()
            if self._others is not None:
                self._others.finish()
            self._memory.amid = False
        except BaseException:
            for bucket in self._buckets:
                bucket.num_ready = 0
            for made in self._sums:  # the other members make all of them; the first error is on its way to the user
                with contextlib.suppress(Exception):
                    made.wait()
            self._memory.forget()
            self._memory.amid = False
            raise
