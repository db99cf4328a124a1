"""Fork and exec of a worker: a session of its own, dead when its parent dies, its output in two pipes.

Why not `subprocess`: the child must set its parent-death signal between fork and exec, which is safe here
because a supervisor has one thread. Called by `supervisor` only.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, NoReturn

from hora.launch.host.processes import die_with_parent

__all__ = ["Execute", "Spawned", "spawn"]

# Turns the forked process into the worker and does not return.
Execute = Callable[[str, list[str], Mapping[str, str]], NoReturn]

_RESET = ("SIGPIPE", "SIGXFSZ", "SIGCHLD", "SIGTERM", "SIGINT", "SIGHUP")


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
    out, err, trouble = (os.pipe2(os.O_CLOEXEC) for _ in range(3))
    pid = os.fork()
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
    """In the forked child: turn into the worker, or say why not."""
    parent = os.getppid()
    try:
        os.setsid()
        if not die_with_parent(parent, signal.SIGKILL):
            os._exit(128 + signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        for name in _RESET:
            signal.signal(getattr(signal, name), signal.SIG_DFL)
        stdin, stdout, stderr = streams
        nothing = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((nothing if stdin is None else stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        if cwd is not None:
            os.chdir(cwd)
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


def _advice(program: str) -> str:
    """What to do about a file that is there and yet cannot be run."""
    if not os.path.isfile(program):
        return ""
    if program.endswith(".py") and not os.access(program, os.X_OK):
        return f"; put its interpreter in front: python {program}"
    if os.sep not in program:
        return f"; the file in this directory is called ./{program}"
    if not os.access(program, os.X_OK):
        return f"; make it executable (chmod +x {program}) or put its interpreter in front"
    return "; does its first line name an interpreter that is there, as in #!/bin/sh?"
