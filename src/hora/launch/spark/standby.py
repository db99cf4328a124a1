"""A warm process beside a Spark Python worker in which the user's functions run as well: ranks are forked from it.

Spark Connect gives us no Python workers of our own (`warm` has them, on classic Spark), and what a UDF did to one must not
reach a rank. So the first job on such a worker has it start a clean process, which loads what ranks import and waits. This
and every later job's supervisor there, and with it the ranks, is a fork of that process. It ends with the worker, which Spark
keeps for a minute without work. `begin` is called by `lead`, before the tasks meet, which takes a second; `supervisor` by
`task`; the rest happens in the process.

Request: a JSON list of modules to load; with the supervisor's stdin, stdout, stderr and a socket, where one is wanted. Through
the socket comes how the supervisor ended; a byte sent into it kills the supervisor.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, NoReturn

from hora.launch.environment import first_variables, module_command
from hora.launch.host.connection import SupervisorProcess
from hora.launch.host.processes import exit_code, name_process
from hora.launch.host.zygote import differ_only_in, load
from hora.launch.spark.warm import LATE, be_supervisor

__all__ = ["begin", "supervisor"]

_LATE = tuple(name for name in LATE if name != "PYTHONPATH")  # it is read when a process starts
_NO_STATUS = 255
_MAX_REQUEST_BYTES = 64 * 1024
_END_LIMIT_S = 10.0


def begin(modules: Sequence[str], env: Mapping[str, str], python_path: str) -> None:
    """Have the process beside this one load these modules already, if ranks that are given `env` can come from it."""
    if all(name.startswith(_LATE) for name in env):
        _standby(_own_variables(python_path)).ask(modules)


def supervisor(modules: Sequence[str], env: Mapping[str, str]) -> SupervisorProcess | None:
    """A supervisor for this machine from the process beside this one, which is started, or replaced, where need be.

    None if a rank with this environment would not be the same as a fresh process.
    """
    own = _own_variables(env.get("PYTHONPATH", ""))
    if not differ_only_in(env, own, _LATE):
        return None
    return _Supervisor(_standby(own), modules)


def _own_variables(python_path: str) -> dict[str, str]:
    """The environment of the process."""
    own = {name: value for name, value in first_variables().items() if not name.startswith(_LATE)}
    return own | {"PYTHONPATH": python_path}


def _standby(env: Mapping[str, str]) -> _Standby:
    global _beside
    if _beside is None or not _beside.suits(env):
        if _beside is not None:
            _beside.close()
        _beside = _Standby(env)
    return _beside


class _Standby:
    """The process, seen from the worker."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                module_command(sys.executable, __name__),
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env=self._env,
            )

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether it lives and was started with this environment."""
        return self._process.poll() is None and env == self._env

    def ask(self, modules: Sequence[str], descriptors: Sequence[int] = ()) -> None:
        """Have it load these modules, and then be a supervisor with these descriptors, if they are given."""
        with contextlib.suppress(OSError):  # it has ended
            socket.send_fds(self._socket, [json.dumps(list(modules)).encode()], descriptors)

    def close(self) -> None:
        self._socket.close()
        try:
            self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_beside: _Standby | None = None


class _Supervisor:
    """A supervisor that was asked for, with the part of `subprocess.Popen`'s face that a HostConnection needs."""

    stdin: IO[bytes] | None
    stdout: IO[bytes] | None
    stderr: IO[bytes] | None

    def __init__(self, standby: _Standby, modules: Sequence[str]) -> None:
        (their_in, our_in), (our_out, their_out), (our_err, their_err) = (os.pipe() for _ in range(3))
        self._control, theirs = socket.socketpair()
        given = [their_in, their_out, their_err, theirs.detach()]
        try:
            # If the process is gone, so is the other end of all of these, which says it.
            standby.ask(modules, given)
        finally:
            for descriptor in given:
                os.close(descriptor)
        self.stdin = os.fdopen(our_in, "wb", buffering=0)
        self.stdout = os.fdopen(our_out, "rb", buffering=0)
        self.stderr = os.fdopen(our_err, "rb", buffering=0)
        self._hearing = threading.Lock()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        with self._hearing:
            if self._code is None:
                ready, _, _ = select.select([self._control], [], [], timeout)
                if not ready:
                    raise subprocess.TimeoutExpired("supervisor", timeout or 0.0)
                said = b""
                with self._control, contextlib.suppress(OSError):
                    said = self._control.recv(1)
                self._code = said[0] if said else _NO_STATUS
            return self._code

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(b"k")


def _serve() -> None:
    """In the process: load modules and fork supervisors on request until the worker is gone."""
    name_process("hora-standby")
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the forks end when they like
    with socket.socket(fileno=os.dup(0)) as worker:
        while True:
            data, descriptors, _, _ = socket.recv_fds(worker, _MAX_REQUEST_BYTES, 4)
            if not data:
                return
            load(json.loads(data))  # where that fails, a rank says it better
            gc.collect()
            gc.freeze()  # what is loaded stays in pages that the ranks share
            if descriptors and _fork() == 0:
                worker.close()
                _look_after_supervisor(*descriptors)
            for descriptor in descriptors:
                os.close(descriptor)


def _look_after_supervisor(stdin: int, stdout: int, stderr: int, control: int) -> NoReturn:
    """In a fork: have a supervisor for a child, kill it when told to, and tell how it ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    pid = _fork()
    if pid == 0:
        be_supervisor(stdin, stdout, stderr)
    for descriptor in (stdin, stdout, stderr):
        os.close(descriptor)
    ended, heard = os.pidfd_open(pid), [control]
    while True:
        ready, _, _ = select.select([ended, *heard], [], [])
        if ended in ready:
            with contextlib.suppress(OSError):  # the worker is gone
                os.write(control, bytes([exit_code(os.waitpid(pid, 0)[1])]))
            os._exit(0)
        if os.read(control, 1):
            signal.pidfd_send_signal(ended, signal.SIGKILL)
        else:
            heard = []  # the worker is gone, and the supervisor knows it by its own pipe


def _fork() -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn of threads, and NumPy's BLAS has some, which take care of themselves in a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


if __name__ == "__main__":
    _serve()
