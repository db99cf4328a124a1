"""Counters in shared memory, with which the ranks of one host wait for one another.

A `Counter` is a 64-bit number on its own cache line, which one process advances and others wait for. A process that
sees the new value also sees everything written to shared memory before it: x86-64 keeps that order by itself, 64-bit
ARM needs a fence. `Counters` are the counters of a group's members: each member advances its own and waits until all
have reached the same value. Waits spin for a moment and then sleep in the kernel; the native part does
both, without the GIL (`struct group` of native.c).

Layout of a member's part, `stride` bytes from the next one's: the counter on its own line; at the end of the next line,
whether the member sleeps. The owner of the counters may use the bytes between them.

A member announces that it will sleep, then checks once more. A publishing member checks for sleepers after it has
published. So the sleeper either sees the number or is woken (`verify/schedule.pml`).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import platform
import time
import weakref
from collections.abc import Callable

from hora.engine.shm.native import GroupStruct, native_part, new_spin_policy

LINE_BYTES = 64
MEMBER_BYTES = 2 * LINE_BYTES  # processors fetch lines in pairs: this keeps members apart
# A sleeping waiter wakes up this often to check whether the peer that it waits for is alive.
SLICE_S = 0.05
SLICE_NS = int(SLICE_S * 1e9)
# No wait for a member of a set takes longer. Members have agreed before they wait for one another, so a wait is short
# unless a member is stopped, which the stall report names. The liveness check notices a dead member at once.
COLLECTIVE_LIMIT_S = 24 * 3600.0
# No member waits for a counter with this value. Its low 32 bits are unique: sleepers compare only those.
OPEN = 2**63 - 1
_SLEEPS_AT = 120  # SLEEPS_AT in native.c
_ONE_HAS_JOINED = 2  # results of hora_wait in native.c
_WEAKLY_ORDERED = platform.machine() != "x86_64"


def wait_until(come: Callable[[], int], check_alive: Callable[[], None], missing: Callable[[], str]) -> int:
    """Call `come`, which waits for a slice of time, until it returns something other than 0; returns that.

    `check_alive` raises in between if waiting is pointless. After the limit TimeoutError names what is `missing`.
    """
    begin = 0.0
    while not (found := come()):
        check_alive()
        now = time.monotonic()
        begin = begin or now
        if now - begin > COLLECTIVE_LIMIT_S:
            raise TimeoutError(f"waited {COLLECTIVE_LIMIT_S:g} s for {missing()}")
    return found


class Counter:
    """One 64-bit number in shared memory. Only its owner may change it; any process may read it or wait for it."""

    __slots__ = ("_native", "_policy", "_policy_at", "_word", "address")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        assert offset % 8 == 0, offset
        self._native = native_part()
        self._word = ctypes.c_int64.from_buffer(memory, offset)  # keeps the mapping alive as long as this counter
        self.address = ctypes.addressof(self._word)
        self._policy = new_spin_policy()
        self._policy_at = ctypes.addressof(self._policy)

    @property
    def value(self) -> int:
        value = self._word.value
        if _WEAKLY_ORDERED:
            self._native.fence()
        return value

    def store(self, value: int) -> None:
        """Publish `value`; no process may sleep on it."""
        if _WEAKLY_ORDERED:
            self._native.fence()
        self._word.value = value

    def set(self, value: int) -> None:
        """Publish `value` and wake every waiter."""
        self.store(value)
        self.wake()

    def wake(self) -> None:
        """Wake every waiter."""
        self._native.wake(self.address)

    def wake_if(self, asleep: Counter) -> None:
        """Wake every waiter if `asleep` is not zero; a waiter sets it before its last check."""
        self._native.fence()  # either the waiter sees the preceding writes, or this process sees that it sleeps
        if asleep.value:
            self.wake()

    def wait_beyond(self, seen: int) -> bool:
        """Return whether the value exceeds `seen`, or does so within one short slice of time; the caller loops."""
        return bool(self._native.wait_for(self.address, seen + 1, self._policy_at, SLICE_NS))

    def wait_for(self, target: int, *, check_alive: Callable[[], None], what: str) -> None:
        """Wait until the value is at least `target`.

        `check_alive` is called while waiting and raises if waiting is pointless (a peer died, a shutdown). After the
        limit TimeoutError names `what`.
        """
        wait_until(
            lambda: self.wait_beyond(target - 1), check_alive, lambda: f"{what} (at {self.value}, needs {target})"
        )


_open: dict[int, weakref.ref[Counters]] = {}  # of this process, by id


def interrupt_waits() -> None:
    """Wake all threads of this process that wait for other members, so that they recheck the world's status."""
    for reference in list(_open.values()):
        counters = reference()
        if counters is not None:
            counters.interrupt()


class Counters:
    """The counters of a group, for member number `member`, at `offset` in memory that all members map."""

    def __init__(
        self, memory: mmap.mmap, offset: int, member: int, num_members: int, *, stride: int = MEMBER_BYTES
    ) -> None:
        self.counters = [Counter(memory, offset + peer * stride) for peer in range(num_members)]
        self.own = self.counters[member]
        self._own_sleep = Counter(memory, offset + member * stride + _SLEEPS_AT)
        self.address = self.counters[0].address
        self.group = GroupStruct(self.address, stride, member, num_members, new_spin_policy(num_members))
        self._native = native_part()
        self._group_at = ctypes.addressof(self.group)
        self._late = ctypes.c_int32()
        self._late_at = ctypes.addressof(self._late)
        _open[id(self)] = weakref.ref(self)

    def publish(self, value: int) -> None:
        """Advance this member's counter, and wake sleeping members."""
        self._native.publish(self._group_at, value)

    def meet(self, value: int, check_alive: Callable[[], None], *, what: str) -> bool:
        """Publish `value`, and wait until all members have reached it; returns whether one of them has joined (OPEN).

        `check_alive` raises if waiting is pointless.
        """
        found = wait_until(
            lambda: self._native.meet(self._group_at, value, self._late_at, SLICE_NS),
            check_alive,
            lambda: f"member {', '.join(map(str, self.missing(value)))} in {what}",
        )
        return found == _ONE_HAS_JOINED

    def missing(self, value: int) -> list[int]:
        """Return the members that have not reached this number."""
        return [peer for peer, counter in enumerate(self.counters) if counter is not self.own and counter.value < value]

    def interrupt(self) -> None:
        """Wake the thread of this process that sleeps here, so that it looks around. Any thread."""
        with contextlib.suppress(AttributeError):  # closed meanwhile
            if self._own_sleep.value:
                self._own_sleep.set(0)  # where a repeated call sleeps; others sleep at the counters
                for counter in self.counters:
                    counter.wake()

    def close(self) -> None:
        """Release the memory."""
        _open.pop(id(self), None)
        self.counters = []
        del self.own, self._own_sleep
