"""The background thread of a queue: it drives what no other thread waits for, and sleeps when there is nothing."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

__all__ = ["BackgroundThread"]

_STOP_LIMIT_S = 5.0


class BackgroundThread:
    """Started when it is first needed. `has_work` and `work` are the queue's; `core`: where it runs."""

    def __init__(self, name: str, core: int | None, *, has_work: Callable[[], bool], work: Callable[[], None]) -> None:
        self._name = name
        self._core = core
        self._has_work = has_work
        self._work = work
        self._changed = threading.Condition()
        self._parked = False
        self._stopping = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """There is work. Any thread."""
        if self._thread is None:
            with self._changed:
                if self._thread is None and not self._stopping:
                    self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._thread.start()
        elif self._parked:
            with self._changed:
                self._changed.notify_all()

    def stop(self, wake: Callable[[], None]) -> None:
        """Wait for its end, unless it is the caller; `wake` ends its wait for other members."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        wake()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_STOP_LIMIT_S)

    def _run(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread only
        while True:
            with self._changed:
                self._parked = True
                # Idleness, not a wait for another rank: every submission and `stop` notify.
                self._changed.wait_for(lambda: self._stopping or self._has_work())
                self._parked = False
            if self._stopping:
                return
            self._work()
