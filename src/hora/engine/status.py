"""The state of the world: running, shutting down, or broken. Shared by everything that waits in a runtime.

    open --a rank shuts down--> closing --a second passes, or nothing agreed is left--> closed
    open --a rank is lost, stalls or cannot do its part--> broken

The runtime tells it what the hub and the launcher report; the queues tell it what ends the job here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from hora.errors import HorovodInternalError

__all__ = ["WorldStatus"]

# What was agreed before a shutdown is still executed, because the others have done their part already.
_GRACE_S = 1.0


class WorldStatus:
    """`tell` sends the reason to the other ranks; `wake` wakes the threads that wait for them, after every change."""

    def __init__(self, rank: int, *, tell: Callable[[str], None], wake: Callable[[], None]) -> None:
        self._rank = rank
        self._tell = tell
        self._wake = wake
        self._lock = threading.RLock()  # a signal's handler may shut down in the middle of it
        self.is_open = True  # neither broken nor closing
        self.broken = self.closing = False
        self._fault = self._closing = ""  # why
        self._closing_since = 0.0

    @property
    def reason(self) -> str:
        return self._fault or self._closing or "Horovod has been shut down"

    def close(self, text: str) -> None:
        """This rank, or another one, shuts down."""
        with self._lock:
            if self.closing:
                return
            self._closing_since = time.monotonic()
            self._closing = text
            self.closing, self.is_open = True, False
        self._wake()

    def fault(self, text: str, *, tell: bool = False) -> None:
        """The world is broken, and with `tell` the others have to learn it from here.

        The first reason is what users see.
        """
        with self._lock:
            if self.is_open:
                self._fault = text
                self.broken, self.is_open = True, False
        if tell:
            self._tell(text)
        self._wake()

    def stalled(self, ranks: Sequence[int], text: str) -> None:
        """End the job on all ranks because these keep the others waiting."""
        self.fault(f"rank(s) {', '.join(map(str, ranks))} {text}; Horovod has been shut down", tell=True)

    def failed(self, text: str) -> None:
        """End the job on all ranks because this one could not execute what was agreed."""
        self.fault(f"a collective failed on rank {self._rank}: {text}; Horovod has been shut down", tell=True)

    def interrupted(self, by: str) -> None:
        """End the job on all ranks because this one was stopped in its part, which cannot be done again."""
        text = f"rank {self._rank} was interrupted ({by}) in the middle of a collective that the others need it for"
        self.fault(f"{text}; Horovod has been shut down, and hvd.init() on all ranks begins anew", tell=True)

    def error(self) -> HorovodInternalError:
        return HorovodInternalError(self.reason)

    def check_open(self) -> None:
        """Raise when nothing new may begin."""
        if not self.is_open:
            raise self.error()

    def check_alive(self) -> None:
        """Raise when it has become pointless to wait for a peer."""
        if self.broken or (self.closing and time.monotonic() - self._closing_since > _GRACE_S):
            raise self.error()
