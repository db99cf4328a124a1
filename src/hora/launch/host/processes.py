"""The processes of this machine, as a supervisor needs them: who descends from whom, and how to end them.

Linux only: /proc and prctl. Imports nothing heavy, because supervisors do.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal

__all__ = [
    "Processes",
    "adopt_orphans",
    "die_with_parent",
    "environment_value",
    "exit_code",
    "family",
    "name_process",
    "send_signal",
]

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

_libc = ctypes.CDLL(None, use_errno=True)


def adopt_orphans() -> None:
    """Descendants whose parents end become this process's children (instead of init's)."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int) -> bool:
    """Get this signal when the parent's forking thread ends. False if the parent is gone already."""
    _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` show for this process: 15 bytes at most."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or not ours any more
        os.kill(pid, number)


def exit_code(status: int) -> int:
    """What `waitpid` said, the way shells put it: death by signal s is 128 + s."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def family(pid: int) -> list[int]:
    """A process and its descendants, from its own list of children.

    Cheap, so that a worker's memory can be watched all the time, but a child may be missed while others end: to end
    processes, look at all of them with `Processes`.
    """
    found = [pid]
    with contextlib.suppress(OSError):  # it ended just now
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                for child in file.read().split():
                    found += family(int(child))
    return found


class Processes:
    """Who is whose child right now, on the whole machine, zombies left out."""

    def __init__(self) -> None:
        self._children: dict[int, list[int]] = {}
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        state, parent = file.read().rpartition(b")")[2].split()[:2]
                except (OSError, ValueError):  # it ended while we looked
                    continue
                if state not in (b"Z", b"X"):
                    self._children.setdefault(int(parent), []).append(int(name))

    def children(self, pid: int) -> list[int]:
        return self._children.get(pid, [])

    def descendants(self, pid: int) -> list[int]:
        found = list(self.children(pid))
        for child in found:  # grows while we walk through it
            found.extend(self.children(child))
        return found

    def terminate(self, pids: list[int]) -> None:
        for pid in pids:
            send_signal(pid, signal.SIGTERM)
            # A stopped process would not see the signal before it runs again.
            send_signal(pid, signal.SIGCONT)

    def kill(self, pids: list[int]) -> None:
        for pid in pids:
            send_signal(pid, signal.SIGKILL)


def environment_value(pid: int, name: str) -> str | None:
    """A variable of the environment that a process was started with."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            items = file.read().split(b"\0")
    except OSError:  # it ended
        return None
    prefix = os.fsencode(name) + b"="
    return next((os.fsdecode(item[len(prefix) :]) for item in items if item.startswith(prefix)), None)
