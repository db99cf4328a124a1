"""Which GPUs other sessions of this machine have given away.

A claim is an abstract local socket of the GPU's name, which only one process can hold and which vanishes with that
process, however it ends. Called by `local_backend`.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Collection

__all__ = ["GpuClaims"]


class GpuClaims:
    """The GPUs that this session has for its workers."""

    def __init__(self) -> None:
        self._held: dict[str, socket.socket] = {}

    def claim(self, gpu: str) -> bool:
        """False if another session has it."""
        if gpu in self._held:
            return True
        claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            claim.bind(f"\0hora-gpu-{gpu}")
        except OSError as error:
            claim.close()
            if error.errno != errno.EADDRINUSE:
                raise
            return False
        self._held[gpu] = claim
        return True

    def keep(self, gpus: Collection[str]) -> None:
        """Give up all but these."""
        for gpu in set(self._held).difference(gpus):
            self._held.pop(gpu).close()
