"""Processes of this machine: starting them, finding descendants, ending them.

`module_command` is the argv of a new process that runs one of our modules. `spawn` forks and
executes a worker in its own session, with PDEATHSIG and its output in two pipes. `guard` makes this process the
guardian of an agent: it ends the processes that a killed agent leaves behind.

Linux only: /proc and prctl. Agents and probes must start fast and import this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import NamedTuple, NoReturn

from hora.launch.limits import UNANSWERED_S

_PR_SET_PDEATHSIG, _PR_SET_NAME, _PR_SET_CHILD_SUBREAPER = 1, 15, 36

_LOOK_S = 1.0

_libc = ctypes.CDLL(None, use_errno=True)


# As `python -m`, which however looks for modules in the current directory first: in a folder that others can write to
# (/tmp, a shared project) a planted file would run as the user. `-P` says the same from Python 3.11 on.
_RUN_MODULE = (
    "import sys; sys.path[:] = [entry for entry in sys.path if entry]; del sys.argv[0]; import runpy; "
    "runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)


def module_command(executable: str, module: str, *args: str) -> tuple[str, ...]:
    """Return the argv of a Python that runs this module and imports nothing from the current directory."""
    return (executable, "-c", _RUN_MODULE, module, *args)


def output_of(command: Sequence[str], *, limit_s: float) -> str:
    """Return what a command prints; an empty text if it cannot be run or takes too long."""
    import subprocess  # here: agents do without

    try:
        found = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return found.stdout


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, instead of init."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int, number: int) -> bool:
    """Request this signal for when the parent's forking thread ends. Return False if the parent is already gone."""
    _prctl(_PR_SET_PDEATHSIG, number)
    return os.getppid() == parent


def name_process(name: str) -> None:
    """Set the name that `ps -o comm` and `top` show for this process: 15 bytes at most."""
    _libc.prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()), 0, 0, 0)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl({option}): {os.strerror(number)}")


def send_signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # gone already, or not ours any more
        os.kill(pid, number)


def exit_code(status: int) -> int:
    """Convert a `waitpid` status to a shell's exit code: death by signal s is 128 + s."""
    return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def family(pid: int) -> list[int]:
    """A process and its descendants: cheap enough for watching memory, but a child may be missed while others end."""
    found = [pid]
    with contextlib.suppress(OSError):  # it ended just now
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{task}/children", "rb") as file:
                for child in file.read().split():
                    found += family(int(child))
    return found


class Processes:
    """Snapshot of the machine's process tree, without zombies."""

    def __init__(self) -> None:
        self.children: dict[int, list[int]] = defaultdict(list)
        for name in os.listdir("/proc"):
            if name.isdigit():
                try:
                    with open(f"/proc/{name}/stat", "rb") as file:
                        state, parent = file.read().rpartition(b")")[2].split()[:2]
                except (OSError, ValueError):  # it ended while we looked
                    continue
                if state not in (b"Z", b"X"):
                    self.children[int(parent)].append(int(name))

    def descendants(self, pid: int) -> list[int]:
        found = list(self.children[pid])
        for child in found:  # grows while we walk through it
            found.extend(self.children[child])
        return found


def send_to_all(pids: list[int], number: int) -> None:
    """Send a signal to processes, stopped ones included: they would not see SIGTERM before they run again."""
    for pid in pids:
        send_signal(pid, number)
        send_signal(pid, signal.SIGCONT)


# Turns the forked process into the worker and does not return.
Execute = Callable[[str, list[str], Mapping[str, str]], NoReturn]

_RESET = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Spawned(NamedTuple):
    """A started process and the read ends of its stdout and stderr (not blocking)."""

    pid: int
    stdout: int
    stderr: int


def spawn(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    *,
    stdin: int | None = None,
    execute: Execute = os.execvpe,
) -> Spawned:
    """Start a process. OSError, with a text for users, if it cannot be executed."""
    pipes: list[tuple[int, int]] = []
    try:
        for _ in range(3):
            pipes.append(os.pipe2(os.O_CLOEXEC))
        pid = os.fork()
    except OSError as error:
        for descriptor in itertools.chain(*pipes):
            os.close(descriptor)
        raise OSError(f"cannot start {argv[0]!r}: {error.strerror}; see `ulimit -n` and `ulimit -u`") from None
    out, err, trouble = pipes
    if pid == 0:
        _become(argv, env, cwd, (stdin, out[1], err[1]), trouble[1], execute)
    for _, write_end in (out, err, trouble):
        os.close(write_end)
    # The end of this pipe without a word means that exec has closed it.
    problem = os.read(trouble[0], 4096).decode(errors="replace")
    os.close(trouble[0])
    if problem:
        os.waitpid(pid, 0)
        os.close(out[0])
        os.close(err[0])
        raise OSError(problem)
    os.set_blocking(out[0], False)
    os.set_blocking(err[0], False)
    return Spawned(pid, out[0], err[0])


def _become(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: str | None,
    streams: tuple[int | None, int, int],
    trouble: int,
    execute: Execute,
) -> NoReturn:
    """In the forked child: execute the worker, or report why that failed."""
    parent = os.getppid()
    try:
        signal.set_wakeup_fd(-1)
        for number in _RESET:
            signal.signal(number, signal.SIG_DFL)
        enter(parent, streams, cwd)
        execute(argv[0], list(argv), env)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        if cwd is None or os.path.isdir(cwd):
            problem = f"cannot run {argv[0]!r}: {why}{_advice(argv[0])}"
        else:
            problem = f"cannot enter the directory {cwd!r}: {why}"
        os.write(trouble, problem.encode(errors="replace"))
    finally:
        os._exit(127)


def enter(parent: int, streams: Sequence[int | None], cwd: str | None) -> None:
    """Give a forked process its session, its death with the parent, its streams (None: /dev/null) and its directory."""
    os.setsid()
    if not die_with_parent(parent, signal.SIGKILL):
        os._exit(128 + signal.SIGKILL)
    with open(os.devnull, "rb") as nothing:
        for target, source in enumerate(streams):
            os.dup2(nothing.fileno() if source is None else source, target)
    if cwd is not None:
        os.chdir(cwd)


def _advice(program: str) -> str:
    """Return advice about an existing file that cannot be executed."""
    if not os.path.isfile(program):
        return ""
    if program.endswith(".py") and not os.access(program, os.X_OK):
        return f"; put its interpreter in front: python {program}"
    if os.sep not in program:
        return f"; the file in this directory is called ./{program}"
    if not os.access(program, os.X_OK):
        return f"; make it executable (chmod +x {program}) or put its interpreter in front"
    return "; does its first line name an interpreter that is there, as in #!/bin/sh?"


def remove_folder(path: str) -> None:
    """Remove a folder of temporary files, if it is there."""
    if os.path.isdir(path):
        import shutil  # slow to import, and hardly ever needed

        shutil.rmtree(path, ignore_errors=True)


def guard(agent: int, controller: int | None = None) -> int:
    """Wait for the agent, then for all its orphans; return the agent's status.

    `controller`: our parent, which the agent serves. Once that has gone or has sent SIGTERM, an agent that does not end
    is killed: it may be stopped. Without a controller on this machine only one that is stopped is killed,
    because its ranks may take long to leave.
    """
    asked: list[int] = []

    def end(number: int, _: FrameType | None) -> None:
        asked.append(number)
        send_signal(agent, signal.SIGTERM)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, end)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])  # it ends a wait below, also if it comes before
    for descriptor in (0, 1):
        os.close(descriptor)
    code, limit = None, math.inf
    while code is None:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == agent:
            code = exit_code(status)
        elif not pid:
            gone = controller is not None and os.getppid() != controller
            overdue = gone or (bool(asked) and (controller is not None or is_stopped(agent)))
            limit = min(limit, time.monotonic() + UNANSWERED_S) if overdue else math.inf
            if time.monotonic() >= limit:
                send_signal(agent, signal.SIGKILL)
            signal.sigtimedwait([signal.SIGCHLD], _LOOK_S)
    with contextlib.suppress(ChildProcessError):
        while True:
            send_to_all(Processes().descendants(os.getpid()), signal.SIGKILL)
            os.waitpid(-1, 0)
    return code


def is_stopped(pid: int) -> bool:
    """Return whether a signal or a debugger has stopped this process."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    return False


class Signals:
    """Signal handler. `first`: called instead of ending the job when the first SIGTERM arrives."""

    first: Callable[[], None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        first, self.first = self.first, None
        if number != signal.SIGTERM or first is None:
            raise SystemExit(128 + number)
        first()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Signals]:
    """Within it, SIGTERM and SIGHUP raise SystemExit (128 + signal) in the main thread.

    Handlers of the program itself stay, and nothing changes outside the main thread: there the process dies by default,
    and the agents of its workers notice.
    """
    signals, in_main = Signals(), threading.current_thread() is threading.main_thread()
    both = (signal.SIGTERM, signal.SIGHUP)
    ours = [number for number in both if in_main and signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
