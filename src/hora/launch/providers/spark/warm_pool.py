"""A fork server beside a Python worker of Spark: agents and ranks are forks of a clean, warm process.

Spark reuses its Python workers, and side effects of UDFs must not reach a rank. So the first job on a worker starts a
clean process, which imports the modules of ranks and waits (`agent.fork_server`). The agents of this and later jobs,
and their workers, are forks, which start in hundredths of a second. User code runs only in forks, which end with their
job. The process ends with the worker, which Spark keeps for a minute without work.

`begin` makes it load early, before the tasks meet; `agent` requests an agent and passes the agent's link and a socket.
The socket reports the agent's exit status; a byte sent into it kills the agent.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from hora.launch.agent.agent import serve_locally
from hora.launch.agent.fork_server import OWN, ForkServer, differ_only_in, fork, run_forked, serve
from hora.launch.controller.launcher import AgentProcess
from hora.launch.limits import END_S
from hora.launch.processes import exit_code, first_variables, module_command, name_process
from hora.launch.worker import work

# Variables that may differ in a rank, because no preloaded module has read them.
_LATE = (*OWN, "NCCL_", "GLOO_", "CUDA_VISIBLE_DEVICES", "PYTHONUNBUFFERED")
_NO_STATUS = 255


def begin(modules: Sequence[str], env: Mapping[str, str], python_path: str) -> None:
    """Start loading these modules in the warm process, if ranks with `env` can be forked from it."""
    if all(name.startswith(_LATE) for name in env):
        _warm_process(_own_variables(python_path)).ask(None, (), modules)


def agent(modules: Sequence[str], env: Mapping[str, str]) -> AgentProcess | None:
    """Return an agent forked from the warm process, which is started or replaced if necessary.

    None if a rank with this environment would differ from a fresh process.
    """
    own = _own_variables(env.get("PYTHONPATH", ""))
    if not differ_only_in(env, own, _LATE):
        return None
    return _WarmAgent(_warm_process(own), modules)


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
        """Tell whether it lives and was started with this environment."""
        return self._process.poll() is None and env == self._env

    def close(self) -> None:
        super().close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


_beside: _WarmProcess | None = None


class _WarmAgent:
    """A requested agent. See `launcher.AgentProcess`."""

    def __init__(self, server: _WarmProcess, modules: Sequence[str]) -> None:
        (self.sock, link), (self._control, control) = socket.socketpair(), socket.socketpair()
        given = [link.detach(), control.detach()]
        try:
            server.ask({}, given, modules)
        finally:
            for descriptor in given:
                os.close(descriptor)
        self._hearing = threading.Lock()
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        with self._hearing:
            if self._code is None:
                ready, _, _ = select.select([self._control], [], [], timeout)
                if not ready:
                    raise subprocess.TimeoutExpired("agent", timeout or 0.0)
                status = b""
                with self._control, contextlib.suppress(OSError):
                    status = self._control.recv(1)
                self._code = status[0] if status else _NO_STATUS
            return self._code

    def kill(self) -> None:
        with contextlib.suppress(OSError):  # it has ended
            self._control.send(b"k")


# In the process.


def _look_after_agent(request: dict[str, Any], descriptors: list[int], worker: socket.socket) -> NoReturn:
    """In a fork: start an agent as a child, kill it on request, and report its exit status."""
    worker.close()
    link, control = descriptors
    pid = fork()
    if pid == 0:
        _be_agent(link)
    os.close(link)
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
            heard = []  # the worker is gone, and the agent knows it by its own pipe


def _be_agent(link: int) -> NoReturn:
    """In a fork: run an agent with this link, whose workers are forks too."""
    status = 1
    try:
        os.setsid()
        name_process("hora-agent")
        os.dup2(link, 0)
        os.dup2(2, 1)
        os.closerange(3, os.sysconf("SC_OPEN_MAX"))
        status = serve_locally(execute=_be_worker)
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
    run_forked(env, work)


def _text_stream(descriptor: int) -> io.TextIOWrapper:
    raw = os.fdopen(descriptor, "wb", buffering=0)
    return io.TextIOWrapper(raw, encoding="utf-8", errors="backslashreplace", write_through=True)


if __name__ == "__main__":
    serve("hora-warm", (), _look_after_agent)
