"""The fork server: a process that imports a rank's modules once and forks the requested processes.

Sixteen ranks on a host then import torch once instead of sixteen times and share its memory. An agent has a fork server
for workers that run a function, and with `--spares` for those of a command, which are executed otherwise:
`hora.launch.worker --fork-server module …`. A Python worker of Spark has one for its agents (`warm_pool`). Importing
starts no threads that a fork would lose, and nothing is computed here. Requests arrive at the socket that is the
server's standard input.

`serve` is the server, `ForkServer` the client, `WorkerForks` the client of an agent.

Request: {"load": modules, "fork": None or what the role needs}, and the descriptors that the fork gets. A worker
(`hora.launch.worker`) is requested by {"env", "unset", "cwd", "agent", "argv"} with stdout and stderr; the answer is
its pid, 0 if it could not be forked. A server that cannot fork at all ends, and its client does without it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn

from hora.launch.processes import Spawned, module_command, name_process, spawn

_MAX_REQUEST_BYTES = 256 * 1024
_MAX_DESCRIPTORS = 4

# Runs in a fork with the request, the descriptors, and the socket for an answer.
Role = Callable[[dict[str, Any], list[int], socket.socket], NoReturn]


def serve(name: str, modules: Iterable[str], role: Role) -> None:
    """Load these modules, and more on request, and fork processes, which do the role, until the client is gone."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forked processes end independently
    _load_and_share(name, modules)
    with socket.socket(fileno=os.dup(0)) as asker:
        while True:
            data, descriptors, _, _ = socket.recv_fds(asker, _MAX_REQUEST_BYTES, _MAX_DESCRIPTORS)
            if not data:
                return
            request = json.loads(data)
            if request["load"]:
                _load_and_share(name, request["load"])
            try:
                is_fork = request["fork"] is not None and fork() == 0
            except OSError as error:
                sys.exit(f"hora: the fork server cannot fork ({error.strerror}); see `ulimit -u`")
            if is_fork:
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                role(request["fork"], descriptors, asker)
            for descriptor in descriptors:
                os.close(descriptor)


def _load_and_share(name: str, modules: Iterable[str]) -> None:
    name_process(name)
    for module in ("hora.net.noise", *modules):  # every worker of a function connects to its launcher
        try:
            importlib.import_module(module)
        except Exception as error:  # whatever a broken installation raises; the worker's own error is clearer
            print(f"hora: {module} could not be loaded in advance: {error!r}", file=sys.stderr)
    if "hora.net.noise" in sys.modules:
        sys.modules["hora.net.noise"].warm_up()
    name_process(name)  # torch 2.3 renames the process at import
    gc.collect()
    gc.freeze()  # keep loaded objects in pages that the forks share


def fork() -> int:
    with warnings.catch_warnings():
        # Newer Pythons warn about threads; those of NumPy's BLAS handle a fork correctly.
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class ForkServer:
    """The client's end of a fork server. `start` starts its process with this descriptor as standard input."""

    def __init__(self, start: Callable[[int], None]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            start(theirs.fileno())

    def request(self, fork: Mapping[str, Any] | None, descriptors: Sequence[int], modules: Sequence[str] = ()) -> None:
        """Have the server load these modules and fork; the descriptors are closed if the server has ended."""
        with contextlib.suppress(OSError):
            request = {"load": list(modules), "fork": fork}
            socket.send_fds(self.socket, [json.dumps(request).encode()], descriptors)

    def close(self) -> None:
        """Let it end."""
        self.socket.close()


# Variables that may differ between a worker's environment and the server's.
OWN = (
    *("HOROVOD_", "HORA_", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("OMPI_COMM_WORLD_", "OMPI_UNIVERSE_SIZE"),
)


class WorkerForks(ForkServer):
    """An agent's fork server. `process` is the server's.

    `forked` is called, in a thread, with each requested worker and its process; None: it must be executed.
    """

    def __init__(
        self,
        executable: str,
        modules: Sequence[str],
        env: Mapping[str, str],
        cwd: str | None,
        forked: Callable[[int, Spawned | None], None],
    ) -> None:
        argv = module_command(executable, "hora.launch.worker", "--fork-server", *modules)

        def start(stdin: int) -> None:
            self.process = spawn(argv, env, cwd, stdin=stdin)

        super().__init__(start)
        self._forked, self._env, self._program = forked, dict(env), (executable, *modules)
        self._requests: queue.SimpleQueue[tuple[int, dict[str, Any]]] = queue.SimpleQueue()
        threading.Thread(target=self._fork_all, name="hora-agent-forks", daemon=True).start()

    def fork(
        self, worker: int, argv: Sequence[str], modules: Sequence[str], env: Mapping[str, str], cwd: str | None
    ) -> bool:
        """Have this worker forked. Return False if its program or its environment is another one."""
        if (argv[0], *modules) != self._program or not differ_only_in(env, self._env, OWN):
            return False
        request = {
            "env": {name: value for name, value in env.items() if self._env.get(name) != value},
            "unset": [name for name in self._env if name not in env],
            "cwd": cwd,
            "agent": os.getpid(),
            "argv": list(argv),
        }
        self._requests.put((worker, request))
        return True

    def _fork_all(self) -> None:
        # One at a time: the server may be busy loading, and the socket holds only so much.
        while True:
            worker, request = self._requests.get()
            self._forked(worker, self._fork(request))

    def _fork(self, request: dict[str, Any]) -> Spawned | None:
        pipes: list[tuple[int, int]] = []
        pid = 0
        with contextlib.suppress(OSError):  # no descriptor is left, or the server is gone
            for _ in range(2):
                pipes.append(os.pipe2(os.O_CLOEXEC))
            self.request(request, [write_end for _, write_end in pipes])
            pid = int(self.socket.recv(64) or 0)  # 0 at its end: the server is gone
        for read_end, write_end in pipes:
            os.close(write_end)
            if pid:
                os.set_blocking(read_end, False)
            else:
                os.close(read_end)
        return Spawned(pid, pipes[0][0], pipes[1][0]) if pid else None


def differ_only_in(one: Mapping[str, str], other: Mapping[str, str], prefixes: tuple[str, ...]) -> bool:
    """Return whether two environments differ only in variables with these prefixes, which loaded code does not read."""
    changed = {name for name in {*one, *other} if one.get(name) != other.get(name)}
    return all(name.startswith(prefixes) for name in changed)
