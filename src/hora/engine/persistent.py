"""A persistent reduction: what the optimizer reduces in every step, in memory that all members of a set have mapped.

Every member's data lies in that memory, so it is reduced where it is. What never changes is put together once, when the
reduction is bound; afterwards a step costs little more than an announcement. That all members have announced it also
says that all data is there, so no member waits before reading it.

Three ways. *Sliced* allreduce: member m reduces slice m into all members' data, and all wait for one another at the end.
*Direct* allreduce of little data: each member reduces all of it into a private result; none waits, because the data of
the next step goes to a second place, and the step after that is agreed on by members that are done with this one.
*Scatter*: each member reduces its slice; the caller sees to it that no member writes new data before all have read, or
has the reduction end together.
The last two need no order among requests, so a caller that would wait anyway meets the others at a barrier instead.

Members on several hosts (`transport.host_reduction`) have the data of their own host's members mapped.

The optimizer's buckets call `start` and `wait`. The queue of the set calls `_execute` when the members have agreed, also
on a rank that has joined and takes part in what it has not started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from hora.engine.plan import Batch, Part
from hora.engine.queue import OperationQueue
from hora.engine.request import Kind, Reduce, Request, Signature, dtype_name
from hora.engine.shm.barrier import SharedMemoryBarrier
from hora.engine.shm.reduction import Cut, cut_slice, reduce_slice, shared_slice
from hora.engine.transport.arithmetic import arithmetic_of, single_threaded
from hora.engine.transport.base import Transport
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter

__all__ = ["PersistentReduction"]


class PersistentReduction:
    """`places[t][m]` is where member m puts its data in turn t; `out` is private, None for a sliced allreduce.

    All members must have bound it before one starts it. `ends_together`: when it is done here, all members have read the
    data. `member`: this rank's index in the places, if it is not that in the set. In a step: idle --`start`--> in flight
    --`wait`--> idle; with a `barrier`, `wait` alone does the work.
    """

    def __init__(
        self,
        queue: OperationQueue,
        kind: Kind,
        places: Sequence[Sequence[torch.Tensor]],
        *,
        name: str,
        reduce: Reduce,
        out: torch.Tensor | None = None,
        barrier: SharedMemoryBarrier | None = None,
        ends_together: bool = False,
        member: int | None = None,
    ) -> None:
        example = places[0][0]
        self._member = queue.member if member is None else member
        self.places = places
        self._num_bytes = example.nbytes
        self.out = out
        self.barrier = barrier
        self._queue = queue
        self._name = name
        self._signature = Signature(
            int(kind),
            kind.name.lower(),
            name,
            (dtype_name(example.dtype),),
            ((example.numel(),),),
            reduce.op,
            reduce.prescale,
            reduce.postscale,
            bound=True,
            code=reduce.code,
        )
        self._reduce = reduce
        self._arithmetic = arithmetic_of(reduce, example.dtype, len(places[0]))
        self._scatters = kind is Kind.REDUCESCATTER
        self._ends_together = ends_together or out is None
        self._direct: list[Callable[[], None]] = []  # the work of each turn, where all members reduce all data
        if out is not None and len(places) > 1:
            self._direct = [self._arithmetic.reduction(views, out) for views in places]
        self._slice: Callable[[], None] | None = None  # the work of a member that reduces its slice
        self._turn = 0
        self._cuts: list[Cut] | None = None
        self._request: Request | None = None  # in flight
        queue.bound[name] = self._execute

    @property
    def turn(self) -> int:
        """Which place takes the data of the next step. At a barrier, the number of those that came before: a rank that
        had joined knows it, although it did not take part."""
        return self.barrier.num_passed % len(self.places) if self.barrier is not None else self._turn

    @property
    def in_flight(self) -> bool:
        """Whether it was started and not yet waited for."""
        return self._request is not None

    @property
    def done(self) -> bool:
        """Whether it was started and `wait` would return at once."""
        return self._request is not None and self._request.done

    def start(self, *, background: bool) -> None:
        """This rank's data is in its place: reduce it. Without `background` only `wait` drives it."""
        mine = self.places[self.turn][self._member]
        request = Request(self._signature, (mine,))
        self._queue.submit(request, background=background)
        self._request = request

    def wait(self) -> torch.Tensor:
        """The result, when it is there. What was not started is carried out here and now, at the barrier if it has one."""
        if self._request is None:
            if self.barrier is not None:
                return self._wait_at(self.barrier)
            self.start(background=False)
        request, self._request = self._request, None
        assert request is not None, self._name
        self._queue.result(request)
        return request.tensors[0] if self.out is None else self.out

    def release(self) -> None:
        """Let the queue forget it; the memory goes with the last view of it."""
        self._queue.bound.pop(self._name, None)
        if self.barrier is not None:
            self._queue.barriers.discard(self.barrier)

    def _execute(self, part: Part, request: Request | None, transport: Transport) -> None:
        """All members have agreed on it; `request` is None if this rank has joined and adds nothing."""
        views = self.places[self.turn]
        if request is None:
            views[self._member].zero_()
        if any(announced is None for announced in part.signatures):
            transport.barrier()  # a rank that has joined has cleared its data just now
        self._carry_out(views, transport)
        self._turn = (self._turn + 1) % len(self.places)

    def _carry_out(self, views: Sequence[torch.Tensor], transport: Transport) -> None:
        with single_threaded():
            if self._scatters:
                self._reduce_own_slice()
            elif self._direct:
                self._direct[self.turn]()
            else:
                assert isinstance(transport, ShmTransport), transport
                transport.allreduce_in_place(views, self._signature.reduce, self._own_cuts())
        if self._ends_together and self.out is not None:
            transport.barrier()

    def _wait_at(self, barrier: SharedMemoryBarrier) -> torch.Tensor:
        """A direct or scattered reduction, in the calling thread, without agreement."""
        barrier.guard()
        recorder, signature = self._queue.recorder, self._signature
        if recorder.timeline is None:
            return self._reduce_at(barrier)
        part = Part(signature.key(0), 0, (signature,))
        recorder.arrived(self._queue.member, part.key, signature)
        with recorder.batch(Batch(Kind(signature.kind), signature, [part]), "shm"):
            return self._reduce_at(barrier)

    def _reduce_at(self, barrier: SharedMemoryBarrier) -> torch.Tensor:
        turn = self.turn
        absent = barrier.wait()
        began = time.perf_counter()
        with single_threaded():
            result = self._reduce_without(absent, turn) if absent else self._reduce_now(turn)
        lasted_s = time.perf_counter() - began
        meter.reduce_s += lasted_s
        meter.transport_s += lasted_s
        meter.num_bytes += self._num_bytes
        return result

    def _reduce_now(self, turn: int) -> torch.Tensor:
        assert self.out is not None, self._name
        if self._scatters:
            return self._reduce_own_slice()
        self._direct[turn]()
        return self.out

    def _reduce_without(self, absent: Sequence[int], turn: int) -> torch.Tensor:
        """Some members have joined."""
        assert self.out is not None, self._name
        if self._scatters:
            joined = ", ".join(str(self._queue.ranks[peer]) for peer in absent)
            raise HorovodInternalError(
                f"REDUCESCATTER is not supported with Join: rank(s) {joined} have joined already ({self._name})"
            )
        views = [torch.zeros_like(view) if peer in absent else view for peer, view in enumerate(self.places[turn])]
        self._arithmetic.reduction(views, self.out)()
        return self.out

    def _reduce_own_slice(self) -> torch.Tensor:
        assert self.out is not None, self._name
        if self._arithmetic.sum is None or self._arithmetic.prescales:
            reduce_slice(self._own_cuts(), self._arithmetic, self.out)
            return self.out
        if self._slice is None:  # the native part needs no pieces
            begin, end = shared_slice(self.places[0][0].numel(), len(self.places[0]), self._member)
            assert self.out.numel() == end - begin, self._name
            self._slice = self._arithmetic.reduction([view[begin:end] for view in self.places[0]], self.out)
        self._slice()
        return self.out

    def _own_cuts(self) -> list[Cut]:
        """The pieces of this member's slice, the same in every step: only direct reductions have several places."""
        if self._cuts is None:
            self._cuts = cut_slice(self.places[0], self._member)
        return self._cuts
