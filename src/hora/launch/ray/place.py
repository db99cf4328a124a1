"""Where a Ray actor runs, as it tells itself. Asked by the launcher and by the executors of a fixed size."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Place", "find_place", "kill_actor", "node_id"]


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


def kill_actor(pid: int) -> None:
    """End an actor's process on this node, unless that number has become another one's."""
    with contextlib.suppress(OSError):
        if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::"):
            os.kill(pid, signal.SIGKILL)


def node_id() -> str:
    import ray

    return str(ray.get_runtime_context().get_node_id())
