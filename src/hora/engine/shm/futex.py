"""Counters in shared memory that one process writes and others wait for.

A `Counter` is a 64-bit number on a cache line of its own with a single writer. An aligned 8-byte store
publishes it, and whatever was written to shared memory before `set` is visible to a process that has seen the
new value: on x86-64 because the processor keeps that order, on 64-bit ARM because of a fence (`_FencedCounter`).
Waiting spins briefly, then sleeps in `futex` on the low 32 bits; `ctypes` releases the GIL there. On other
processors `supported()` is False and the engine uses torch.distributed instead.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

__all__ = ["LINE_BYTES", "SLICE_S", "Counter", "fence", "supported"]

LINE_BYTES = 64

_MACHINE = platform.machine()
_SYS_FUTEX = {"x86_64": 202, "AMD64": 202, "aarch64": 98}.get(_MACHINE, -1)
_NEEDS_FENCES = _MACHINE == "aarch64"
_FUTEX_WAIT = 0
_FUTEX_WAKE = 1
_ALL_WAITERS = 2**31 - 1
# A sleeping waiter looks up this often to ask its check_alive whether the peer it waits for is still alive.
SLICE_S = 0.05
# How many looks before sleeping, about 50 ns each. To be woken takes tens of microseconds, so spinning pays
# when peers are in step and have cores of their own. Otherwise it steals time from the peer that is waited for. So
# every counter finds out: after `patience` sleeps that were over soon it looks longer; when that has been in
# vain three times in a row it gives up again, and has twice the patience from then on.
_FEW_LOOKS = 30
_MANY_LOOKS = 600
_SOON_S = 100e-6
_MISSES = 3
_LEAST_PATIENCE = 4
_MOST_PATIENCE = 512


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_slice = _Timespec(int(SLICE_S), int(SLICE_S % 1 * 1e9))
_slice_pointer = ctypes.byref(_slice)
_none = ctypes.c_void_p(None)
_wait_call = ctypes.CDLL(None, use_errno=True).syscall  # releases the GIL: the wait may be long
_wake_call = ctypes.PyDLL(None).syscall  # keeps the GIL: handing it over costs more than the call


@lru_cache(maxsize=1)
def supported() -> bool:
    """Return whether counters work here: Linux, on a processor whose order of loads and stores is taken care of."""
    return sys.platform == "linux" and _SYS_FUTEX >= 0 and sys.byteorder == "little" and sys.maxsize > 2**32


class Counter:
    """One 64-bit number in shared memory. Only its owner may `set` it; any process may read it or wait for it.

    Made by `at`.
    """

    __slots__ = ("_address", "_looks", "_patience", "_tally", "_word")

    def __init__(self, memory: mmap.mmap, offset: int) -> None:
        assert offset % 8 == 0, offset
        # from_buffer keeps the mapping alive as long as this counter.
        self._word = ctypes.c_int64.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        self._looks = _FEW_LOOKS
        self._patience = _LEAST_PATIENCE
        self._tally = 0  # sleeps that were over soon, or long looks in vain

    @staticmethod
    def at(memory: mmap.mmap, offset: int) -> Counter:
        """The counter at this place, of the kind that this machine's processor needs."""
        return _FencedCounter(memory, offset) if _NEEDS_FENCES else Counter(memory, offset)

    @property
    def value(self) -> int:
        return self._word.value

    @property
    def address(self) -> int:
        """Return the number's address for native code, valid while this counter lives."""
        return ctypes.addressof(self._word)

    def store(self, value: int) -> None:
        """Publish `value` where no process sleeps on it."""
        self._word.value = value

    def set(self, value: int) -> None:
        """Publish `value` and wake every waiter."""
        self._word.value = value
        _wake_call(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL_WAITERS, _none, _none, 0)

    def wake(self) -> None:
        """Wake every waiter."""
        _wake_call(_SYS_FUTEX, self._address, _FUTEX_WAKE, _ALL_WAITERS, _none, _none, 0)

    def wake_any(self, asleep: Sequence[Counter]) -> None:
        """Wake every waiter, if one of these says that its member sleeps; a member says so before it looks a last
        time.
        """
        fence()  # either they see what was written before, or their being asleep is seen here
        for one in asleep:
            if one.value:
                self.wake()
                return

    def wait_beyond(self, seen: int) -> None:
        """Sleep until the value differs from `seen`, or for one short slice; the caller loops and checks."""
        word = self._word
        for _ in range(self._looks):
            if word.value != seen:
                self.found()
                return
        begin = time.monotonic()
        self.sleep(seen)
        self.learn(time.monotonic() - begin)

    def wait_for(self, target: int, *, check_alive: Callable[[], None], limit_s: float, what: str) -> None:
        """Wait until the value is at least `target`.

        `check_alive` is called while waiting and raises when waiting has become pointless (a peer died, a
        shutdown); after `limit_s` seconds TimeoutError names `what`.
        """
        word = self._word
        if self.look(target):
            return
        begin = time.monotonic()
        while (seen := word.value) < target:
            check_alive()
            if time.monotonic() - begin > limit_s:
                raise TimeoutError(f"waited {limit_s:g} s for {what} (at {seen}, needs {target})")
            self.sleep(seen)
        self.learn(time.monotonic() - begin)

    def look(self, target: int) -> bool:
        """Return whether the value is `target` or more now, or in a moment."""
        word = self._word
        for _ in range(self._looks):
            if word.value >= target:
                self.found()
                return True
        return False

    def found(self) -> None:
        """Looking was enough."""
        if self._looks == _MANY_LOOKS:
            self._tally = 0

    def learn(self, slept_s: float) -> None:
        """Look longer or shorter next time: looking was in vain, and then it took this long."""
        if self._looks == _MANY_LOOKS:
            self._tally += 1
            if self._tally >= _MISSES:
                self._looks, self._tally = _FEW_LOOKS, 0
                self._patience = min(2 * self._patience, _MOST_PATIENCE)
        elif slept_s < _SOON_S:
            self._tally += 1
            if self._tally >= self._patience:
                self._looks, self._tally = _MANY_LOOKS, 0
        else:
            self._tally = 0

    def sleep(self, seen: int) -> None:
        """Sleep for one slice, unless the value is not `seen` any more or its owner sets it."""
        low = ctypes.c_uint32(seen & 0xFFFFFFFF)
        _wait_call(_SYS_FUTEX, self._address, _FUTEX_WAIT, low, _slice_pointer, _none, 0)


class _FencedCounter(Counter):
    """For processors that change the order of loads and stores: nothing moves past a number that is read or written."""

    __slots__ = ()

    @property
    def value(self) -> int:
        value = self._word.value
        fence()
        return value

    def store(self, value: int) -> None:
        fence()
        super().store(value)

    def set(self, value: int) -> None:
        fence()
        super().set(value)

    def look(self, target: int) -> bool:
        found = super().look(target)
        fence()
        return found

    def wait_for(self, target: int, *, check_alive: Callable[[], None], limit_s: float, what: str) -> None:
        super().wait_for(target, check_alive=check_alive, limit_s=limit_s, what=what)
        fence()


def fence() -> None:
    """Full memory barrier: earlier reads and writes of this thread are visible to every processor before later ones.

    Python has no such instruction, but its locks are made of them. Nothing before may move past a release, nothing
    after may move ahead of an acquisition, and on ARM no acquisition moves ahead of a release before it. The lock is a
    new one, so that nothing else, be it a signal handler or the child of a fork, can ever find it taken.
    """
    lock = threading.Lock()
    lock.acquire()
    lock.release()
    lock.acquire()
