"""What has become of the world: going on, shutting down, or broken. Shared by everything that waits in a runtime.

open --a rank shuts down--> closing --a second passes, or nothing agreed is left--> closed
open, closing --a rank is lost, a stall shutdown--> broken
"""

from __future__ import annotations

import threading
import time

from hora.errors import HorovodInternalError

__all__ = ["WorldStatus"]

# What was agreed before a shutdown is still carried out, because the others have done their part already.
_GRACE_S = 1.0


class WorldStatus:
    """Written by the hub's thread and `shutdown`, read by every wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fault = ""
        self._closing = ""
        self._closing_since = 0.0

    @property
    def is_open(self) -> bool:
        return not self._fault and not self._closing

    @property
    def closing(self) -> bool:
        return bool(self._closing)

    @property
    def broken(self) -> bool:
        return bool(self._fault)

    @property
    def reason(self) -> str:
        return self._fault or self._closing or "Horovod has been shut down"

    def close(self, text: str) -> None:
        with self._lock:
            if not self._closing:
                self._closing_since = time.monotonic()
                self._closing = text

    def fault(self, text: str) -> None:
        """The world is broken. The first reason is the one that is told."""
        with self._lock:
            if not self._fault and not self._closing:
                self._fault = text

    def error(self) -> HorovodInternalError:
        return HorovodInternalError(self.reason)

    def check_open(self) -> None:
        """Raise when nothing new may begin."""
        if not self.is_open:
            raise self.error()

    def guard(self) -> None:
        """Raise when it has become pointless to wait for a peer."""
        if self._fault or (self._closing and time.monotonic() - self._closing_since > _GRACE_S):
            raise self.error()
