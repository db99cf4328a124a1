"""A zygote, seen from its supervisor: asks it for workers and takes its answers.

Called by `supervisor` only; what the zygote does is in `zygote`.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hora.launch.host.run_forked import differ_only_in
from hora.launch.host.spawn import Spawned, spawn
from hora.launch.python import module_command

__all__ = ["ZygoteClient"]

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
