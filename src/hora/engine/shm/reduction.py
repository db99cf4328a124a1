"""Reduction of data in shared memory that all members of a set on one host have mapped: gradient buckets.

Data is reduced in place, in one of three ways. *Sliced* allreduce: member m reduces slice m into all members' data, and
all wait for one another at the end. *Direct* allreduce of little data: each member reduces all of it into a private
result. No member waits, because the data of the next step goes to a second place, and a member in the step after that
has finished this one. *Scatter*: each member reduces its slice. The caller ensures that no member writes new data
before all have read the old, or uses `ends_together`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from hora.engine.request import Kind, Reduce
from hora.engine.schedule import PersistentReduction, ReductionSchedule
from hora.engine.shm.counters import LINE_BYTES
from hora.engine.shm.native import Sum, native_part
from hora.engine.shm.segment import aligned
from hora.engine.transport.arithmetic import HALVES, arithmetic_of
from hora.errors import HorovodInternalError

Tensors = Sequence[torch.Tensor]


def shared_slice(count: int, num_members: int, member: int) -> tuple[int, int]:
    """Return begin and end of the part of `count` elements that `member` reduces.

    Rounded to as many elements as a cache line has bytes, so that two members never write to one line.
    """
    share = aligned(-(-count // num_members), LINE_BYTES)
    return min(count, member * share), min(count, (member + 1) * share)


class SharedMemoryReduction(PersistentReduction):
    """`places[t][m]` holds the data of member m in turn t; `out` is private, None for a sliced allreduce.

    `ends_together`: it is done only when all members have read the data.
    """

    def __init__(
        self,
        schedule: ReductionSchedule,
        kind: Kind,
        places: Sequence[Tensors],
        *,
        name: str,
        reduce: Reduce,
        out: torch.Tensor | None = None,
        ends_together: bool = False,
    ) -> None:
        super().__init__(schedule, kind, places[0][schedule.member], name=name, reduce=reduce, out=out)
        self.places = places
        self._scatters = kind is Kind.REDUCESCATTER
        self._ends_together = ends_together or out is None
        arithmetic = arithmetic_of(reduce, places[0][0].dtype, len(places[0]))
        assert arithmetic.sum is not None, f"{reduce} is not a sum of floating-point numbers"
        self._native, self._sum = native_part(), arithmetic.sum
        if arithmetic.prescales:
            assert arithmetic.dtype in HALVES, "the caller scales other numbers on their way"
            self._sum = Sum(reduce.prescale, self._sum.factor, self._sum.dtype, self._sum.finish)
        self._work = [self._prepared(views) for views in places]  # per turn

    @property
    def turn(self) -> int:
        """Return the index of the place for the next step's data."""
        return self.schedule.turn(self._index, len(self.places))

    def replace(self, out: torch.Tensor) -> None:
        """Write results to this tensor from now on."""
        self.out = out
        self._work = [self._prepared(views) for views in self.places]

    def execute_scheduled(self, number: int, absent: Sequence[int]) -> bool:
        turn = self.schedule.turn_of(number, len(self.places)) if len(self.places) > 1 else 0
        if absent:
            self._reduce_without(absent, number, turn)
            return True
        self._work[turn]()
        if self._ends_together:
            self.schedule.end_together(number)
        return True

    def _prepared(self, views: Tensors) -> Callable[[], None]:
        """Return this member's part of the work as a function."""
        native, what, out = self._native, self._sum, self.out
        if not self._scatters and out is not None:
            return native.reduction(what, views, out)
        begin, end = shared_slice(views[0].numel(), len(views), self.schedule.member)
        if out is None:
            return native.reduction_everywhere(what, views, begin, end)
        assert out.numel() == end - begin, self._name
        return native.reduction(what, [view[begin:end] for view in views], out)

    def _reduce_without(self, absent: Sequence[int], number: int, turn: int) -> None:
        """Reduce without the members that have joined."""
        if self._scatters:
            joined = ", ".join(str(self.schedule.ranks[peer]) for peer in absent)
            raise HorovodInternalError(
                f"REDUCESCATTER is not supported with Join: rank(s) {joined} have joined already ({self._name})"
            )
        views = [torch.zeros_like(view) if peer in absent else view for peer, view in enumerate(self.places[turn])]
        result = torch.empty_like(views[0]) if self.out is None else self.out
        self._native.reduction(self._sum, views, result)()
        if self.out is None:
            self.schedule.end_together(number)  # all have read the data
            self._mine.copy_(result)
