"""The actor that runs one worker of an elastic job. The function runs in the actor's own process, so that it can use
Ray: objects, datasets, the queue of `ray_logger`.

Ray carries the function, its arguments and the executable. The worker's place in the job, its result and its exception
go through the job's rendezvous, as with every launcher (`hora.launch.worker`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hora.launch import worker
from hora.launch.environment import set_variables
from hora.platforms.detect import keep_secret


@dataclass(frozen=True, kw_only=True)
class ActorProcess:
    """An actor's process."""

    node: str  # Ray's hexadecimal id of the node
    hostname: str
    pid: int
    gpus: tuple[str, ...] = ()  # the ids that Ray gave it there

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname} (Ray node {self.node[:12]})"


def this_process() -> ActorProcess:
    """Return this process."""
    import ray

    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    return ActorProcess(node=node_id(), hostname=socket.gethostname(), pid=os.getpid(), gpus=gpus)


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())


_call: Callable[[], Any] | None = None


class RayWorker:
    """A worker's process. It is not reused, so one training cannot affect the next."""

    def place(self) -> ActorProcess:
        return this_process()

    def work(self, env: Mapping[str, str], secret: bytes, call: Callable[[], Any]) -> int:
        """Run a worker of the job to its end; return the exit status."""
        global _call
        _call = call
        set_variables({**env, "HORA_SECRET": secret.hex()})
        keep_secret()
        return worker.main()


def perform() -> Any:
    """The job's function for the rendezvous: run the call that Ray carried here."""
    assert _call is not None
    return _call()
