"""Location of a Ray actor, by its own account. Asked by the launcher and by the executors of a fixed size."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass

__all__ = ["Place", "find_place", "node_id"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """An actor's process. `node`: Ray's hexadecimal id of the node; `gpus`: the ids that Ray gave it there."""

    node: str
    hostname: str
    pid: int
    gpus: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"process {self.pid} on {self.hostname} (Ray node {self.node[:12]})"


def find_place() -> Place:
    """This process's."""
    import ray

    gpus = tuple(str(gpu) for gpu in ray.get_gpu_ids())
    return Place(node=node_id(), hostname=socket.gethostname(), pid=os.getpid(), gpus=gpus)


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
