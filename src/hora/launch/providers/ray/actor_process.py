"""Location of a Ray actor, as reported by itself."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

__all__ = ["ActorProcess", "this_process", "node_id"]


@dataclass(frozen=True, kw_only=True)
class ActorProcess:
    """An actor's process. `node`: Ray's hexadecimal id of the node; `gpus`: the ids that Ray gave it there."""

    node: str
    hostname: str
    pid: int
    gpus: tuple[str, ...] = ()

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
