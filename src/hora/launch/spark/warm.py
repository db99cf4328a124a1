"""Ranks forked from a warm Spark Python worker instead of started afresh: hundredths of a second, not seconds.

Spark keeps its Python workers, and Hora's stages have workers of their own (`stage`), in which nothing but `task` ever
runs. So torch can be imported there once, by the first job that needs it, and every rank is a fork of that clean
process: user code runs in the fork only, and the fork is gone when its job is over. Called by `task`; where a fork would
not be the same as a fresh process, `prepare` says so and nothing here is used. Through Connect `standby` is.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import select
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from hora.launch.environment import variables
from hora.launch.host.connection import SupervisorProcess
from hora.launch.host.processes import exit_code, name_process
from hora.launch.host.supervisor import supervise
from hora.launch.host.zygote import differ_only_in, load, run_forked
from hora.launch.worker import work

__all__ = ["LATE", "be_supervisor", "fork_supervisor", "prepare"]

# What a rank's environment may have beside this process's.
LATE = ("HOROVOD_", "HORA_", "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED", "PYTHONPATH")


def prepare(modules: Sequence[str], env: Mapping[str, str]) -> bool:
    """Load the modules here, and tell whether a rank with this environment can be forked from this process."""
    if not differ_only_in(env, variables(), LATE) or not load(modules):
        return False
    # Only the forking thread lives on in a fork, and with it whatever the others held.
    return len(os.listdir("/proc/self/task")) == 1


def fork_supervisor() -> SupervisorProcess:
    """A supervisor, for a launcher on this machine, that is a fork of this process, as its workers will be."""
    return _ForkedSupervisor()


class _ForkedSupervisor:
    """A supervisor in a fork of this process, with the part of `subprocess.Popen`'s face that a HostConnection needs."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def __init__(self) -> None:
        ours_in, ours_out, ours_err = (os.pipe() for _ in range(3))
        self._pid = os.fork()
        if self._pid == 0:
            be_supervisor(ours_in[0], ours_out[1], ours_err[1])
        for descriptor in (ours_in[0], ours_out[1], ours_err[1]):
            os.close(descriptor)
        self.stdin = os.fdopen(ours_in[1], "wb", buffering=0)
        self.stdout = os.fdopen(ours_out[0], "rb", buffering=0)
        self.stderr = os.fdopen(ours_err[0], "rb", buffering=0)
        self._pidfd = os.pidfd_open(self._pid)
        self._reaping = threading.Lock()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        with self._reaping:
            if self._code is None:
                ready, _, _ = select.select([self._pidfd], [], [], timeout)
                if not ready:
                    raise subprocess.TimeoutExpired("supervisor", timeout or 0.0)
                self._code = exit_code(os.waitpid(self._pid, 0)[1])
                os.close(self._pidfd)
            return self._code

    def kill(self) -> None:
        if self._code is None:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


def be_supervisor(stdin: int, stdout: int, stderr: int) -> NoReturn:
    """In a fork: be a supervisor with these streams, whose workers are forks as well."""
    status = 1
    try:
        os.setsid()
        name_process("hora-supervisor")
        for source, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
            os.dup2(source, target)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))  # Spark's connections above all
        gc.freeze()  # what is loaded stays in pages that the workers share
        status = supervise(execute=_be_worker)
    except BaseException:  # this process has no caller to tell, only the pipe
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _be_worker(file: str, argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """In place of exec: what `python -m hora.launch.worker` would be, from here."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    atexit._clear()
    # As a Python that has just started has them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.argv = ["-m"]
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), _text_stream(1), _text_stream(2)
    run_forked(env, work)


def _text_stream(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", buffering=0)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)
