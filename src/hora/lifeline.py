"""A lifeline: a word in shared memory that reports a process's death before its memory is freed.

When a process is killed, Linux closes its connections and notifies its parent only after freeing its memory: 50 ms for
300 MB. Before that it walks the robust futexes of each thread (get_robust_list(2)): it marks each word owned by the
thread and wakes the waiters. So a thread of the worker owns such a word as long as the process exists, and a thread of
its agent waits for it:

    unowned (0) --own--> the thread's (its number) --the process ends or executes another program--> marked
    any of these --close--> over

A stopped process still owns it. A forked child does not, because it has other threads. This module imports nothing
large, because agents do not.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
import platform
import threading
from collections.abc import Callable

_SYS_FUTEX, _SYS_SET_ROBUST_LIST = {"x86_64": (202, 273), "aarch64": (98, 99)}.get(platform.machine(), (-1, -1))
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1
_HAS_WAITERS, _OWNER_DIED = 1 << 31, 1 << 30  # bits of a robust futex
_OVER = _OWNER_DIED - 1  # no thread has this number
_STOP_LIMIT_S = 1.0
_libc = ctypes.CDLL(None, use_errno=True)
_owned: dict[str, mmap.mmap] = {}  # until the end of this process


class _RobustList(ctypes.Structure):
    """A `struct robust_list_head`, and the only entry of its list, `futex_offset` bytes before its word."""

    _fields_ = (
        ("first", ctypes.c_void_p),
        ("futex_offset", ctypes.c_long),
        ("pending", ctypes.c_void_p),
        ("entry", ctypes.c_void_p),
    )


def own(path: str) -> None:
    """Own the lifeline at this path unless it is owned: the agent then notices this process's death."""
    if path in _owned:
        return
    with open(path, "r+b", buffering=0) as file:
        _owned[path] = memory = mmap.mmap(file.fileno(), mmap.PAGESIZE)
    word = ctypes.c_uint32.from_buffer(memory)
    if word.value == 0:
        threading.Thread(target=_own, args=(word,), name="hora-lifeline", daemon=True).start()


def _own(word: ctypes.c_uint32) -> None:
    robust = _RobustList()
    head, entry = ctypes.addressof(robust), ctypes.addressof(robust) + _RobustList.entry.offset
    robust.first, robust.entry, robust.futex_offset = entry, head, ctypes.addressof(word) - entry
    if _libc.syscall(_SYS_SET_ROBUST_LIST, ctypes.c_void_p(head), ctypes.c_size_t(_RobustList.entry.offset)) == 0:
        word.value = threading.get_native_id() | _HAS_WAITERS
        _futex(word, _FUTEX_WAKE, 1)
        threading.Event().wait()  # until the end of this process


class Lifeline:
    """The agent's end, at `path`. `dead` is called once, on a separate thread, if the owner dies."""

    def __init__(self, dead: Callable[[], None]) -> None:
        self._dead = dead
        self._descriptor = os.memfd_create("hora-lifeline", os.MFD_CLOEXEC)
        os.ftruncate(self._descriptor, mmap.PAGESIZE)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"
        self._word = ctypes.c_uint32.from_buffer(mmap.mmap(self._descriptor, mmap.PAGESIZE))
        self._thread = threading.Thread(target=self._watch, name="hora-lifeline", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread and release the memory."""
        self._word.value = _OVER
        _futex(self._word, _FUTEX_WAKE, 1)
        self._thread.join(_STOP_LIMIT_S)
        del self._word  # and with it the mapping, which has its own descriptor
        os.close(self._descriptor)

    def _watch(self) -> None:
        while (seen := self._word.value) != _OVER:
            if seen & _OWNER_DIED:
                self._dead()
                return
            # No limit: death and `close` wake it.
            result = _futex(self._word, _FUTEX_WAIT, seen)
            if result < 0 and ctypes.get_errno() == errno.ENOSYS:
                return


def _futex(word: ctypes.c_uint32, operation: int, value: int) -> int:
    none = ctypes.c_void_p(None)
    return int(_libc.syscall(_SYS_FUTEX, ctypes.byref(word), operation, ctypes.c_uint32(value), none, none, 0))


def status_of_dying(pid: int) -> int:
    """Return the status of a process that is ending, as `waitpid` will report it; 0 if it is not known yet."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        return int(file.read().split()[-1])
    return 0
