"""The zygote: a process that loads, once, what every worker of a job imports anyway, and forks workers from there.

Sixteen ranks on a host then import torch once instead of sixteen times and share its memory. Only workers that run a
function come from here (commands are executed); their supervisor asks for them over the socket that is this process's
standard input, passing each one's stdout and stderr. A worker is forked twice, so that the supervisor, a subreaper,
becomes its parent and sees its end. Importing does not start threads that a fork would lose, and nothing is computed
here. Started by the supervisor, as `hora.launch.worker --zygote module …`.

`serve` is the process, `ZygoteClient` its supervisor's side, `run_forked` what a fork does before it is a worker (Spark's warm
Python workers fork ranks, too).

Request: {"worker", "env", "unset", "cwd", "supervisor"} with two descriptors. Answer: {"worker", "pid"}.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import signal
import socket
import sys
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from hora.launch.environment import module_command, replace_variables, variables
from hora.launch.host.processes import Spawned, die_with_parent, name_process, spawn

__all__ = ["ZygoteClient", "differ_only_in", "load", "run_forked", "serve"]

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


# What may differ between the environment that the zygote started with and a worker's.
_OWN = ("HOROVOD_", "HORA_")


class ZygoteClient:
    """A running zygote and the workers that were asked of it. `zygote` is its process."""

    def __init__(self, executable: str, modules: Sequence[str], env: Mapping[str, str], cwd: str | None) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            argv = module_command(executable, "hora.launch.worker", "--zygote", *modules)
            self.zygote = spawn(argv, env, cwd, stdin=theirs.fileno())
        ours.setblocking(False)
        self._socket = ours
        self._env = dict(env)
        self._executable, self._modules = executable, tuple(modules)
        self._waiting: deque[dict[str, Any]] = deque()
        self._output: dict[int, tuple[int, int]] = {}  # the worker asked for -> read ends of its output

    def fileno(self) -> int:
        return self._socket.fileno()

    def suits(self, executable: str, modules: Sequence[str], env: Mapping[str, str]) -> bool:
        """Whether a worker with this environment can come from here."""
        same = (executable, tuple(modules)) == (self._executable, self._modules)
        return same and differ_only_in(env, self._env, _OWN)

    def ask(self, worker: int, env: Mapping[str, str], cwd: str | None) -> None:
        """Ask for a worker."""
        request = {
            "worker": worker,
            "env": {name: value for name, value in env.items() if self._env.get(name) != value},
            "unset": [name for name in self._env if name not in env],
            "cwd": cwd,
            "supervisor": os.getpid(),
        }
        self._waiting.append(request)
        self._ask_next()

    def _ask_next(self) -> None:
        # One at a time: the zygote may be busy loading, and the socket holds only so much.
        if not self._waiting or self._output:
            return
        request = self._waiting.popleft()
        out, err = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
        self._output[request["worker"]] = out[0], err[0]
        # If the zygote is gone, so is its answer: `forked` tells.
        with contextlib.suppress(OSError):
            socket.send_fds(self._socket, [json.dumps(request).encode()], [out[1], err[1]])
        os.close(out[1])
        os.close(err[1])

    def forked(self) -> Iterator[tuple[int, Spawned]]:
        """Workers that run now. Ends with EOFError when the zygote is gone."""
        while True:
            try:
                data = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                raise EOFError
            answer = json.loads(data)
            output = self._output.pop(answer["worker"])
            for descriptor in output:
                os.set_blocking(descriptor, False)
            self._ask_next()
            yield answer["worker"], Spawned(answer["pid"], *output)

    def close(self) -> None:
        self._socket.close()
        for descriptors in self._output.values():
            for descriptor in descriptors:
                os.close(descriptor)


_ALWAYS = ("hora.launch.pickling",)


def load(modules: Iterable[str]) -> bool:
    """Load what a worker imports anyway, and these modules. False if that failed; the worker will say it better."""
    loaded = True
    for name in (*_ALWAYS, *modules):
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken installation raises
            print(f"hora: {name} could not be loaded in advance: {error!r}", file=sys.stderr)
            loaded = False
    return loaded


def differ_only_in(one: Mapping[str, str], other: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    """Whether two environments are the same but for variables with these prefixes. Any other one might have been read by
    what is loaded already."""
    changed = {name for name in {*one, *other} if one.get(name) != other.get(name)}
    return all(name.startswith(prefixes) for name in changed)


def run_forked(env: Mapping[str, str], work: Callable[[], NoReturn]) -> NoReturn:
    """In a fork that has its streams: be a worker with this environment. `work` is `worker.work`, which ends the process."""
    name_process(f"hora-rank-{env['HORA_WORKER']}")
    replace_variables(env)
    _reseed_generators()
    work()


def _reseed_generators() -> None:
    """Random numbers of this process's own, as one that has just started has them.

    Python sees to its own generator; NumPy's and torch's would give every rank, and every job, the same numbers.
    """
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()
