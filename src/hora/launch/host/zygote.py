"""The zygote: a process that loads, once, what every worker of a job imports anyway, and forks workers from there.

Sixteen ranks on a host then import torch once instead of sixteen times and share its memory. Only workers that run a
function come from here (commands are executed); their supervisor asks for them over the socket that is this process's
standard input, passing each one's stdout and stderr. A worker is forked twice, so that the supervisor, a subreaper,
becomes its parent and sees its end. Importing does not start threads that a fork would lose, and nothing is computed
here. Started by `supervisor` as `python -m hora.launch.worker --zygote module …`.

Request: {"worker", "env", "unset", "cwd", "supervisor"} with two descriptors. Answer: {"worker", "pid"}.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable
from typing import Any, NoReturn

from hora.launch.environment import variables
from hora.launch.host.processes import die_with_parent, name_process
from hora.launch.host.run_forked import load, run_forked

__all__ = ["serve"]

_MAX_REQUEST_BYTES = 256 * 1024


def serve(modules: list[str], work: Callable[[], NoReturn]) -> None:
    """Load the modules, then fork workers, which do this work, on request until the supervisor is gone."""
    load(modules)
    del sys.argv[1:]  # they are no arguments of the user's function
    gc.collect()
    gc.freeze()  # what is loaded stays in pages that the workers share
    name_process("hora-zygote")
    with socket.socket(fileno=os.dup(0)) as supervisor:
        while True:
            data, descriptors, _, _ = socket.recv_fds(supervisor, _MAX_REQUEST_BYTES, 2)
            if not data:
                return
            request = json.loads(data)
            if _fork(request, supervisor):
                break
            for descriptor in descriptors:
                os.close(descriptor)
    _become_worker(request, descriptors, work)


def _fork(request: dict[str, Any], supervisor: socket.socket) -> bool:
    """Fork a worker whose parent is the supervisor. True in the worker."""
    with warnings.catch_warnings():
        # Newer Pythons warn of threads, and NumPy's BLAS has some, which take care of themselves in a fork.
        warnings.simplefilter("ignore", DeprecationWarning)
        middle = os.fork()
        if middle:
            os.waitpid(middle, 0)
            return False
        middle = os.getpid()
        pid = os.fork()
    if pid:
        supervisor.send(json.dumps({"worker": request["worker"], "pid": pid}).encode())
        os._exit(0)
    while os.getppid() == middle:  # it has nothing left to do but to end
        os.sched_yield()
    return True


def _become_worker(request: dict[str, Any], descriptors: list[int], work: Callable[[], NoReturn]) -> NoReturn:
    """In the worker: put on its environment and work."""
    os.setsid()
    if not die_with_parent(request["supervisor"], signal.SIGKILL):
        os._exit(128 + signal.SIGKILL)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in zip((nothing, *descriptors), (0, 1, 2), strict=True):
        os.dup2(source, target)
        os.close(source)
    if request["cwd"] is not None:
        os.chdir(request["cwd"])
    inherited = {name: value for name, value in variables().items() if name not in request["unset"]}
    run_forked(inherited | request["env"], work)
