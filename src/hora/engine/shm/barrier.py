"""A barrier in shared memory: where the members of a set on one host wait for one another, by counters alone.

What all members have set up, blocks its caller and is passed by all of them in the same order needs no agreement: each
member says how often it has come and looks at the others' numbers, which takes microseconds. Persistent reductions use it.

Joining: a member that joins leaves the barrier open and says how often it really came. Those that come later take it for
absent. When all have joined, all go on from the highest number.
"""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from hora.engine.shm.futex import LINE_BYTES, SLICE_S, Counter, fence
from hora.engine.shm.native import Library, Meeting, library, new_patience
from hora.engine.shm.segment import Segment
from hora.engine.transport.base import Guard
from hora.telemetry.meters import meter

__all__ = ["SharedMemoryBarrier"]

log = logging.getLogger("hora")

_OPEN = 2**63 - 1  # whose low half, which a sleeping member watches, is not that of any number it may have seen
_MISSING, _MET = 0, 1  # what `meet` of the native part says
_SLICE_NS = int(SLICE_S * 1e9)
_LIMIT_S = 24 * 3600.0  # a slow member is the stall report's business, a dead one the guard's


class SharedMemoryBarrier:
    """`name` is what a stall report says is waited for. `stalled(ranks, text)` ends the job."""

    def __init__(
        self,
        segment: Segment,
        offset: int,
        *,
        member: int,
        ranks: Sequence[int],
        name: str,
        guard: Guard,
        warning_s: float,
        shutdown_s: float,
        stalled: Callable[[Sequence[int], str], None],
    ) -> None:
        self.name = name
        self.guard = guard
        self.num_passed = 0
        self._member = member
        self._ranks = ranks
        self._warning_s, self._shutdown_s = warning_s, shutdown_s
        self._stalled = stalled
        places = [offset + 2 * LINE_BYTES * peer for peer in range(len(ranks))]
        self._came = [Counter.at(segment.memory, place) for place in places]
        self._really_came = [Counter.at(segment.memory, place + LINE_BYTES) for place in places]
        asleep = [Counter.at(segment.memory, place + LINE_BYTES + 8) for place in places]  # seldom written, as its line
        self._own_sleep = asleep[member]
        self._peers = [(peer, self._came[peer]) for peer in range(len(ranks)) if peer != member]
        self._asleep = [asleep[peer] for peer, _ in self._peers]
        self._library = library()
        self._meeting = Meeting(self._came[0].address, member, len(ranks), new_patience(len(ranks)))
        self._meeting_at = ctypes.addressof(self._meeting)

    @staticmethod
    def num_bytes(num_members: int) -> int:
        """What a barrier needs of shared memory."""
        return 2 * LINE_BYTES * num_members

    def wait(self) -> list[int]:
        """Return when every member has come as often as this one; gives the members that are absent (joined)."""
        self.num_passed = number = self.num_passed + 1
        if self._library is None:
            self._meet_in_python(number)
        elif self._meet_natively(self._library, number):
            return []
        return [
            peer for peer, counter in self._peers if counter.value >= _OPEN and self._really_came[peer].value < number
        ]

    def leave(self) -> None:
        """This member joins: the others need not wait for it."""
        self._really_came[self._member].store(self.num_passed)
        self._came[self._member].set(_OPEN)

    def come_back(self) -> None:
        """All members have left: go on together. No member may `wait` before all have come back."""
        self.num_passed = max(counter.value for counter in self._really_came)
        self._came[self._member].set(self.num_passed)

    def _meet_natively(self, library: Library, number: int) -> bool:
        """Wait for all members; False if one of them has joined."""
        begin = time.monotonic()
        met = library.meet(self._meeting_at, number, _SLICE_NS)
        if met == _MISSING:
            with self._blocked(begin) as look_around:
                while met == _MISSING:
                    look_around(number)
                    met = library.meet(self._meeting_at, number, _SLICE_NS)
        meter.wait_s += time.monotonic() - begin
        return bool(met == _MET)

    def _meet_in_python(self, number: int) -> None:
        own = self._came[self._member]
        own.store(number)
        own.wake_any(self._asleep)
        for _, counter in self._peers:
            if counter.value < number and not counter.look(number):
                self._sleep_until(counter, number)

    def _sleep_until(self, counter: Counter, number: int) -> None:
        begin = time.monotonic()
        with self._blocked(begin) as look_around:
            self._own_sleep.store(1)
            fence()
            try:
                guard = partial(look_around, number)
                counter.wait_for(number, guard=guard, limit_s=_LIMIT_S, what=self.name, looks=0)
            finally:
                self._own_sleep.store(0)
                lasted_s = time.monotonic() - begin
                meter.wait_s += lasted_s
        counter.learn(lasted_s)

    @contextmanager
    def _blocked(self, begin: float) -> Iterator[Callable[[int], None]]:
        """While this member waits since `begin`. What it gives is to be called now and then."""
        warned = begin

        def look_around(number: int) -> None:
            nonlocal warned
            self.guard()
            now = time.monotonic()
            if not self._warning_s or now - warned < self._warning_s:
                return
            warned = now
            missing = [self._ranks[peer] for peer, other in self._peers if other.value < number]
            log.warning(
                "Some ranks have not submitted tensors for which others have waited more than %g s. Either the ranks "
                "run different code, or these ranks are slow or stuck.\nMissing ranks:\n%s",
                self._warning_s,
                "\n".join(f"{rank}: [{self.name}]" for rank in missing),
            )
            meter.stalled(missing)
            if self._shutdown_s and now - begin > self._shutdown_s:
                self._stalled(missing, f"stalled for more than {self._shutdown_s:g} s")

        meter.blocked = self, begin, self._ranks
        try:
            yield look_around
        finally:
            meter.blocked = None
