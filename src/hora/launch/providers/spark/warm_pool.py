"""A fork server beside a Python worker of Spark: agents and ranks are forks of a clean, warm process.

Spark reuses its Python workers, and side effects of UDFs must not reach a rank. So the first job on a worker starts a
clean process, which imports the modules of ranks and waits (`agent.fork_server`). The agents of this and later jobs,
and their workers, are forks, which start in hundredths of a second. User code runs only in forks, which end with their
job. The process ends with the worker, which Spark keeps for a minute without work.
"""

from __future__ import annotations

import atexit
import functools
import io
import os
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hora.launch.agent.fork_server import OWN, ForkServer, differ_only_in, serve
from hora.launch.agent.protocol import Invitation
from hora.launch.agent.session import obey
from hora.launch.environment import first_variables, replace_variables
from hora.launch.limits import END_S
from hora.launch.processes import module_command, name_process
from hora.launch.worker import run_forked

# Variables that may differ in a rank, because no preloaded module has read them.
_LATE = (*OWN, "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED")


def begin(modules: Sequence[str], env: Mapping[str, str], python_path: str) -> None:
    """Start loading these modules before the tasks meet, in the warm process, if ranks with `env` can be its forks."""
    if all(name.startswith(_LATE) for name in env):
        _warm_process(_own_variables(python_path)).request(None, (), modules)


def agent(modules: Sequence[str], python_path: str, invitation: Invitation, more: Mapping[str, str]) -> WarmAgent:
    """Return an agent forked from the warm process, which is started or replaced if necessary.

    `more`: variables of the agent. Its workers are forks too, unless their environment would differ from that of a
    fresh process.
    """
    late = {name: value for name, value in first_variables().items() if name.startswith(_LATE)}
    return WarmAgent(_warm_process(_own_variables(python_path)), modules, late | dict(more), invitation)


def _own_variables(python_path: str) -> dict[str, str]:
    """The environment of the process."""
    own = {name: value for name, value in first_variables().items() if not name.startswith(_LATE)}
    return own | {"PYTHONPATH": python_path}


def _warm_process(env: Mapping[str, str]) -> _WarmProcess:
    global _beside
    if _beside is None or not _beside.suits(env):
        if _beside is not None:
            _beside.close()
        _beside = _WarmProcess(env)
    return _beside


class _WarmProcess(ForkServer):
    """The fork server, seen from the worker."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._env = dict(env)
        super().__init__(self._start)

    def _start(self, stdin: int) -> None:
        command = module_command(sys.executable, __name__)
        self._process = subprocess.Popen(command, stdin=stdin, stdout=subprocess.DEVNULL, env=self._env)

    def suits(self, env: Mapping[str, str]) -> bool:
        """Return whether it is alive and was started with this environment."""
        return self._process.poll() is None and env == self._env

    def close(self) -> None:
        super().close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_beside: _WarmProcess | None = None


class WarmAgent:
    """A requested agent, used like a `Popen`. It holds the other end of `_life`, where its pid and its status come."""

    def __init__(
        self, server: _WarmProcess, modules: Sequence[str], env: Mapping[str, str], invitation: Invitation
    ) -> None:
        (lifeline, theirs), (self._life, life) = socket.socketpair(), socket.socketpair(type=socket.SOCK_SEQPACKET)
        complaints, stderr = os.pipe()
        self.pid = 0  # not forked yet
        self._status: int | None = None
        self.stdin, self.stderr = lifeline.makefile("wb", buffering=0), os.fdopen(complaints, "rb", buffering=0)
        lifeline.close()  # the file holds it
        with theirs, life, os.fdopen(stderr, "wb", buffering=0):
            fork = {"env": dict(env), "invitation": invitation._asdict()}
            server.request(fork, [theirs.fileno(), stderr, life.fileno()], modules)

    def wait(self, timeout: float | None = None) -> int:
        """Return the agent's exit status."""
        while self._status is None:
            if not select.select([self._life], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("agent", timeout or 0.0)
            said = self._life.recv(64)
            if said and not self.pid:
                self.pid = int(said)
            else:
                self._status = int(said or 128 + signal.SIGKILL)
                self._life.close()
        return self._status


# In the process.


def _be_agent(request: dict[str, Any], descriptors: list[int], worker: socket.socket) -> NoReturn:
    """In a fork: run an agent, whose workers are forks too."""
    status = 1
    try:
        worker.close()
        lifeline, stderr, life = descriptors
        os.write(life, str(os.getpid()).encode())
        own = first_variables()
        replace_variables(own | request["env"])
        os.setsid()
        name_process("hora-agent")
        for target, source in ((0, lifeline), (2, stderr), (1, stderr), (3, life)):
            os.dup2(source, target, inheritable=target < 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        invitation = Invitation(**request["invitation"])
        suits = functools.partial(differ_only_in, own, prefixes=_LATE)
        status = obey(invitation, report=3, fork=_be_worker, suits=suits, has_fork_server=False)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # this process has no caller to tell, only the executor's log
        os.write(2, traceback.format_exc().encode())
    finally:
        os._exit(status)


def _be_worker(file: str, argv: list[str], env: Mapping[str, str]) -> NoReturn:
    """Instead of exec: run what `python -m hora.launch.worker` would run."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    atexit._clear()
    # As a Python that has just started has them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    sys.argv = ["-m"]
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), _text_stream(1), _text_stream(2)
    run_forked(env)


def _text_stream(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", buffering=0)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


if __name__ == "__main__":
    serve("hora-warm", (), _be_agent)
