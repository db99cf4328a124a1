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
import math
import weakref
from collections.abc import Mapping, Sequence

import torch

from hora import engine
from hora.engine.request import ReduceOp
from hora.torch.optimizer.bucket_plan import filled
from hora.torch.optimizer.buckets import Layout, make_reductions, release_all
from hora.torch.optimizer.powersgd import PowerSGDMemory, orthonormalise_, working_dtype
from hora.torch.optimizer.reducer import ReduceOptions, Reducer, Reduction

# Of the data sent. Each bucket is a round trip, so smaller ones would be slow on a link with high latency.
BUCKET_BYTES = 512 * 2**10

_Kind = tuple[torch.dtype, torch.device]


class _Bucket:
    """Parameters whose factors P are sent together, followed by the uncompressed ones. Tensors are found by id."""

    def __init__(
        self,
        options: ReduceOptions,
        memory: PowerSGDMemory,
        parameters: Sequence[torch.Tensor],
        flat: torch.Tensor,
        reduction: Reduction,
    ) -> None:
        self._options, self._memory, self._flat = options, memory, flat
        self.parameters, self.reduction = parameters, reduction
        self.matrices = [p for p in parameters if memory.rank_of(p)]
        # P of a matrix, and the gradients of others.
        self._first = _divided(flat, {id(p): _first_shape(p, memory) for p in parameters})
        self.second: dict[int, torch.Tensor] = {}  # Q of a matrix, transposed
        self.factors: dict[int, torch.Tensor] = {}  # Q of this step
        self.num_ready = 0

    def fill(self, parameter: torch.Tensor) -> None:
        """Compute P from a parameter's gradient, or copy an uncompressed gradient into the buffer."""
        gradient, place = parameter.grad, self._first[id(parameter)]
        q = self.factors.get(id(parameter))
        if q is not None:
            error = self._memory.error(parameter)
            if gradient is not None:
                error.add_(gradient.detach())
            orthonormalise_(q)
            torch.mm(_matrix(error), q, out=place)
        elif gradient is None:
            place.zero_()
        else:
            place.copy_(gradient.detach())
        self.num_ready += 1

    def make_second(self) -> None:
        """Compute this rank's Q, once the sum of all P is complete."""
        self.num_ready = 0
        # An infinity on one rank makes the sum infinite on all, so they decide alike. Gradients then become non-finite,
        # as a GradScaler expects, and the residuals are lost.
        finite = bool(torch.isfinite(self._flat.sum()))
        for parameter in self.matrices:
            p, q = self._first[id(parameter)], self.second[id(parameter)]
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
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient, p = parameter.grad.detach(), self._first[id(parameter)]
            q = self.factors.get(id(parameter))
            if q is None:
                gradient.copy_(p.mul_(times / size))
                continue
            error, new = self._memory.error(parameter), self.second[id(parameter)]
            new.div_(size)
            q.copy_(new.t())
            if gradient.is_contiguous() and gradient.dtype is error.dtype:
                torch.mm(p, new, out=_matrix(gradient))
            else:
                gradient.copy_(torch.mm(p, new).view(parameter.shape))
            _matrix(error).addmm_(p, new, alpha=-1)
            if times != 1.0:
                gradient.mul_(times)
        if not all(bool(torch.isfinite(q.sum())) for q in self.factors.values()):
            self._memory.forget(self.matrices)


def _matrix(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(tensor.shape[0], -1)


def _first_shape(parameter: torch.Tensor, memory: PowerSGDMemory) -> tuple[int, ...]:
    """Return the shape of P, or that of an uncompressed gradient."""
    rank = memory.rank_of(parameter)
    return (parameter.shape[0], rank) if rank else tuple(parameter.shape)


def _divided(flat: torch.Tensor, shapes: Mapping[int, tuple[int, ...]]) -> dict[int, torch.Tensor]:
    """Return consecutive views of these shapes."""
    parts = flat.split([math.prod(shape) for shape in shapes.values()])
    return {key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)}


def _plan(parameters: Sequence[torch.Tensor], memory: PowerSGDMemory) -> list[list[torch.Tensor]]:
    """Divide the parameters, in this order, into buckets of one dtype and device, the compressed ones first in each."""

    def num_bytes(parameter: torch.Tensor) -> int:
        return working_dtype(parameter).itemsize * math.prod(_first_shape(parameter, memory))

    found = filled(parameters, lambda p: (working_dtype(p), p.device), num_bytes, BUCKET_BYTES)
    return [sorted(bucket, key=lambda p: not memory.rank_of(p)) for bucket in found]


class LowRankReducer(Reducer):
    """Reduces dense gradients as factors and sparse ones (`others`) one by one; all members create it together."""

    def __init__(
        self,
        runtime: engine.Runtime,
        options: ReduceOptions,
        parameters: Sequence[torch.Tensor],
        memory: PowerSGDMemory,
        others: Reducer | None,
        *,
        label: str,
    ) -> None:
        self._runtime, self._memory, self._others = runtime, memory, others
        planned, layouts = _plan(parameters, memory), list[Layout]()
        for number, members in enumerate(planned):
            size = sum(math.prod(_first_shape(p, memory)) for p in members)
            layouts.append(Layout(f"{label}.P.{number}", size, working_dtype(members[0]), members[0].device))
        seconds: dict[_Kind, dict[int, tuple[int, ...]]] = {}  # shapes of Q, transposed; each dtype and device together
        for p in parameters:
            if rank := memory.rank_of(p):
                seconds.setdefault((working_dtype(p), p.device), {})[id(p)] = (rank, p.numel() // p.shape[0])
        for number, (kind, shapes) in enumerate(seconds.items()):
            layouts.append(Layout(f"{label}.Q.{number}", sum(map(math.prod, shapes.values())), *kind))
        flats, self._reductions = make_reductions(runtime, options, layouts)
        self._seconds = self._reductions[len(planned) :]
        self._due: list[Reduction] = []  # of this step; all members compute them
        self._buckets = [
            _Bucket(options, memory, members, flat, reduction)
            for members, flat, reduction in zip(planned, flats, self._reductions, strict=False)
        ]
        self._of = {id(parameter): bucket for bucket in self._buckets for parameter in bucket.parameters}
        for shapes, flat in zip(seconds.values(), flats[len(planned) :], strict=True):
            for key, place in _divided(flat, shapes).items():
                self._of[key].second[key] = place
        weakref.finalize(self, release_all, self._reductions)

    def ready(self, parameter: torch.Tensor) -> None:
        if not self._memory.amid:
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
        self._memory.amid = True
        if self._runtime.num_joins != self._memory.num_joins:  # joined ranks have missed the others' factors
            self._memory.num_joins = self._runtime.num_joins
            self._memory.forget()
        self._due = list(self._reductions)
        factors = iter(self._memory.factors([p for bucket in self._buckets for p in bucket.matrices]))
        for bucket in self._buckets:
            bucket.factors = {id(parameter): next(factors) for parameter in bucket.matrices}

    def _wait(self, reduction: Reduction) -> None:
        """Wait for a reduction of this step, starting it if needed."""
        if reduction in self._due:
            self._due.remove(reduction)
            reduction.wait()

    def finish(self) -> None:
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
        except BaseException:
            for bucket in self._buckets:
                bucket.num_ready = 0
            for reduction in list(self._due):  # the other members compute all; the first error is being raised
                with contextlib.suppress(Exception):
                    self._wait(reduction)
            self._memory.forget()
            raise
        finally:
            self._memory.amid = False
