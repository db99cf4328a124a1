"""Collectives that survive the end of a world: each is remembered until every rank has its result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora.torch.distributed.work import Work


class Call:
    """One collective of a protected group.

    begun --finished--> finished --every rank has begun a call after it--> forgotten
      |  ^
      +--+ its world ends: begun again in the next one, or its result is copied from a rank that has it

    `begin` starts it in the group's present world, from the caller's tensors, which stay as they are until it is
    finished. It writes `results`. `deliver` then hands them to the caller.
    """

    __slots__ = ("begin", "deliver", "finished", "needed_from", "number", "results", "work")

    def __init__(
        self,
        begin: Callable[[], Work],
        results: Sequence[torch.Tensor],
        deliver: Callable[[], object] = lambda: None,
    ) -> None:
        self.begin, self.results, self.deliver = begin, results, deliver
        self.number = self.needed_from = -1
        self.work: Work | None = None  # None: it could not begin, because the world had ended
        self.finished = False

    @property
    def has_result(self) -> bool:
        """Return whether it was carried out in the world in which it began."""
        return self.work is not None and self.work.is_success()


class CallLog:
    """The calls of one rank that another rank may still need, in the order in which all ranks make them.

    A rank that begins call n has the results of all calls that it waited for before. So when n is finished, which takes
    every rank, these results need not be kept.
    """

    def __init__(self) -> None:
        self.next_number = 0
        self._calls: dict[int, Call] = {}

    def add(self, call: Call) -> None:
        call.number = self.next_number
        self.next_number += 1
        call.needed_from = next((one.number for one in self._calls.values() if not one.finished), call.number)
        self._calls[call.number] = call

    def finish(self, call: Call) -> None:
        """Hand over the result of a call, and forget the calls whose results every rank has by now."""
        call.finished, call.work = True, None
        call.deliver()
        for number in [number for number in self._calls if number < call.needed_from]:
            del self._calls[number]

    def drop(self, call: Call) -> None:
        """Forget a call that failed although the world goes on: its error is the user's."""
        self._calls.pop(call.number, None)

    def unfinished(self) -> list[Call]:
        return [call for call in self._calls.values() if not call.finished]

    def kept(self) -> list[int]:
        """Return the numbers of the calls whose results are here."""
        return [call.number for call in self._calls.values() if call.finished]

    def call(self, number: int) -> Call:
        return self._calls[number]


class ProtectedWork(Work):
    """The work of a protected call. `finish` waits for it, through any number of worlds."""

    def __init__(self, call: Call, tensors: Sequence[Any], group: Any, finish: Callable[[Call], None]) -> None:
        super().__init__(tensors, (), group)
        self._call, self._finish_call = call, finish

    def wait(self, timeout: Any = None) -> bool:
        self._finish_call(self._call)
        return True

    def is_completed(self) -> bool:
        work = self._call.work
        return self._call.finished or (work is not None and work.is_completed())

    def exception(self) -> Exception | None:
        return None

    def get_future(self) -> Any:
        self.wait()
        return super().get_future()
