"""Resources of this machine: usable cores and memory, and the GPUs that no other session has assigned."""

from __future__ import annotations

import errno
import os
import shutil
import socket
import subprocess
from collections.abc import Collection, Mapping

from hora.memory import total_bytes
from hora.net import sockets
from hora.workers.capacity import Capacity

__all__ = ["GpuClaims", "measure"]


def measure(environ: Mapping[str, str]) -> Capacity:
    """Return the capacity of this machine within the limits of its container."""
    return Capacity(cores=tuple(sorted(os.sched_getaffinity(0))), memory_gib=total_bytes() / 2**30, gpus=_gpus(environ))


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return tuple(item.strip() for item in visible.split(",") if item.strip() and item.strip() != "-1")
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    try:
        found = subprocess.run([program, "-L"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    lines = [line for line in found.stdout.splitlines() if line.startswith("GPU ")]
    return tuple(str(number) for number in range(len(lines)))


class GpuClaims:
    """The GPUs that this session has claimed for its workers.

    A claim is a local socket, so that sessions of all users of this machine see each other's claims and can name the
    holder.
    """

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def claim(self, gpu: str) -> str:
        """Claim this GPU; return the session that holds it already, or an empty string on success."""
        if gpu in self._held:
            return ""
        try:
            claim = sockets.listen(f"hora-gpu-{gpu}")  # never accepted from: a connection asks only for its holder
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return f"GPU {gpu}: {_holder(gpu)}"
        self._held[gpu] = claim
        return ""

    def keep(self, gpus: Collection[str]) -> None:
        """Release all claims but these."""
        for gpu in set(self._held).difference(gpus):
            self._held.pop(gpu).close()


def _holder(gpu: str) -> str:
    return str(sockets.holder(f"hora-gpu-{gpu}") or "a process that does not answer")
