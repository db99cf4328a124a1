"""Counters of the members of a group on one host: each member advances its own, and waits until all have come as far.

This is the one way in which members of a host wait for one another, natively (`struct group` of native.c) and in
Python. Memory of a member, `stride` bytes from the next one's: its counter on a line of its own, and on the next line,
at its end, whether the member sleeps. Between them is room for what the owner of the counters keeps there.

A member that is about to sleep says so first and then looks once more; a member that publishes looks for sleepers
afterwards. So either the sleeper sees the number, or it is seen to sleep and is woken (`verify/schedule.pml`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import time
import weakref
from collections.abc import Callable

from hora.engine.shm.futex import LINE_BYTES, SLICE_S, Counter, fence
from hora.engine.shm.native import GroupStruct, library, new_spin_policy

__all__ = ["MEMBER_BYTES", "OPEN", "Counters", "interrupt_waits"]

MEMBER_BYTES = 2 * LINE_BYTES  # processors fetch lines in pairs: this keeps members apart
# Nobody waits for a member with this number; its low half, which a sleeper watches, is no other number's.
OPEN = 2**63 - 1
_SLEEPS_AT = 120  # SLEEPS_AT of native.c
_ONE_HAS_JOINED = 2  # of all_have of native.c
_SLICE_NS = int(SLICE_S * 1e9)


_open: dict[int, weakref.ref[Counters]] = {}  # of this process, by id


def interrupt_waits() -> None:
    """Have every thread of this process that waits for other members look up: the world has changed."""
    for reference in list(_open.values()):
        counters = reference()
        if counters is not None:
            counters.interrupt()


class Counters:
    """Of member number `member`, at `offset` in memory that all members map."""

    def __init__(
        self, memory: mmap.mmap, offset: int, member: int, num_members: int, *, stride: int = MEMBER_BYTES
    ) -> None:
        self.counters = [Counter.at(memory, offset + peer * stride) for peer in range(num_members)]
        asleep = [Counter.at(memory, offset + peer * stride + _SLEEPS_AT) for peer in range(num_members)]
        self.own, self.own_sleep = self.counters[member], asleep[member]
        # Each member begins with the next one, so that not all of them look at member 0 first.
        order = [(member + distance) % num_members for distance in range(1, num_members)]
        self._bootstrap = [(peer, self.counters[peer]) for peer in order]
        self._asleep = [asleep[peer] for peer in order]
        self.address = self.counters[0].address
        self.group = GroupStruct(self.address, stride, member, num_members, new_spin_policy(num_members))
        self._native = library()
        self._group_at = ctypes.addressof(self.group)
        self._late = ctypes.c_int32()
        self._late_at = ctypes.addressof(self._late)
        _open[id(self)] = weakref.ref(self)

    def publish(self, value: int) -> None:
        """Advance the own counter, and wake members that sleep."""
        self.own.store(value)
        self.own.wake_any(self._asleep)

    def meet(self, value: int, check_alive: Callable[[], None], *, limit_s: float, what: str) -> bool:
        """Publish `value`, and return when all members have come as far: whether one of them has joined (OPEN).

        `check_alive` raises when that has become pointless.
        """
        if self._native is None:
            self.publish(value)
            self.wait(value, check_alive, limit_s=limit_s, what=what)
            return OPEN in [counter.value for counter in self.counters]
        begin = 0.0
        while not (found := self._native.meet(self._group_at, value, self._late_at, _SLICE_NS)):
            begin = self._look_up(begin, value, check_alive, limit_s, what)
        return bool(found == _ONE_HAS_JOINED)

    def missing(self, value: int) -> list[int]:
        """The members that have not published this number."""
        return [peer for peer, counter in self._bootstrap if counter.value < value]

    def wait(self, value: int, check_alive: Callable[[], None], *, limit_s: float, what: str) -> None:
        """Return when all members have published `value` or more.

        `check_alive` raises when that has become pointless.
        """
        begin = 0.0
        while not (self._look(value) if self._native is None else self._look_natively(value)):
            begin = self._look_up(begin, value, check_alive, limit_s, what)

    def _look_up(self, begin: float, value: int, check_alive: Callable[[], None], limit_s: float, what: str) -> float:
        """While this member waits, since `begin` if that is known."""
        check_alive()
        now = time.monotonic()
        if begin and now - begin > limit_s:
            late = ", ".join(map(str, self.missing(value)))
            raise TimeoutError(f"waited {limit_s:g} s for member {late} in {what}")
        return begin or now

    def _look_natively(self, value: int) -> bool:
        assert self._native is not None
        return bool(self._native.wait(self._group_at, value, self._late_at, _SLICE_NS))

    def _look(self, value: int) -> bool:
        """Return whether all have come; if not, a slice of time has passed."""
        for _, counter in self._bootstrap:
            if counter.value < value and not counter.look(value) and not self._sleep(counter, value):
                return False
        return True

    def _sleep(self, counter: Counter, value: int) -> bool:
        begin = time.monotonic()
        self.own_sleep.store(1)
        fence()
        before = -1
        try:
            while before != (seen := counter.value) < value and time.monotonic() - begin < SLICE_S:
                before = seen
                counter.sleep(seen)
        finally:
            self.own_sleep.store(0)
        counter.learn(time.monotonic() - begin)
        return seen >= value

    def interrupt(self) -> None:
        """Have the thread of this process that sleeps here look up. Any thread."""
        with contextlib.suppress(AttributeError):  # closed meanwhile
            if self.own_sleep.value:
                self.own_sleep.set(0)  # where a repeated call sleeps; others sleep at the counters
                for _, counter in self._bootstrap:
                    counter.wake()

    def close(self) -> None:
        """Let go of the memory."""
        _open.pop(id(self), None)
        self.counters, self._bootstrap, self._asleep = [], [], []
        del self.own, self.own_sleep
