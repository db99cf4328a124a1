"""Progress: one thread at a time, the driver, makes it; the others sleep until it has finished something.

A thread that waits for a result becomes the driver, which saves two changes of thread. What no thread waits for is
driven by a background thread, which is started when it is first needed and sleeps when there is nothing to do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sized
from threading import get_ident
from typing import Any

__all__ = ["Progress"]

_WAITER_SLICE_S = 0.5
_STOP_LIMIT_S = 5.0


class Progress:
    """`drive(until)` works until `until.done`, or until there is no `work` any more. `wake_driver` ends its wait for
    other members; `put_away` is called once, by the last driver after `stop`. `core`: the background thread's."""

    def __init__(
        self,
        name: str,
        core: int | None,
        *,
        work: Sized,
        drive: Callable[[Any], None],
        wake_driver: Callable[[], None],
        put_away: Callable[[], None],
    ) -> None:
        self.lock = threading.Lock()  # held by the driver
        self.thread = 0  # the driver
        self.num_waiters = 0
        self.stopping = False
        self._name, self._core = name, core
        self._work = work
        self._drive = drive
        self._wake_driver = wake_driver
        self._put_away: Callable[[], None] | None = put_away
        self._finished = threading.Condition()  # for threads that wait while another one drives
        self._changed = threading.Condition()  # for the background thread
        self._parked = False
        self._background: threading.Thread | None = None

    def drive_or_wait(self, request: Any) -> None:
        """Bring a request nearer to its end, or let the driver do that."""
        if self.lock.acquire(blocking=False):
            try:
                self._drive(request)
            finally:
                self.release()
                self.hand_over()
            return
        self._wake_driver()
        with self._finished:
            self.num_waiters += 1
            if not request.done and self.lock.locked():
                self._finished.wait(_WAITER_SLICE_S)
            self.num_waiters -= 1

    def may_drive(self, limit_s: float) -> bool:
        """Become the driver. Not while this very thread is, in the lines that a signal has interrupted."""
        return self.thread != get_ident() and self.lock.acquire(timeout=limit_s)

    def release(self) -> None:
        """Let another thread be the driver. The last one puts away what is held."""
        put_away = self._put_away
        if self.stopping and put_away is not None:
            self._put_away = None
            put_away()
        self.lock.release()

    def hand_over(self) -> None:
        """This thread drives no more: let others go on, if there is something to do."""
        self.notify_waiters()
        if self._work:
            self.wake_background()

    def notify_waiters(self, *, all_threads: bool = False) -> None:
        """Something has been finished. `all_threads`: also those that are about to wait."""
        if self.num_waiters or all_threads:
            with self._finished:
                self._finished.notify_all()

    def wake_background(self) -> None:
        """Something has come that no thread waits for."""
        if self._background is None:
            with self._changed:
                if self._background is None and not self.stopping:
                    self._background = threading.Thread(target=self._run, name=self._name, daemon=True)
                    self._background.start()
        elif self._parked:
            with self._changed:
                self._changed.notify_all()

    def stop(self) -> None:
        """End the background thread, unless it is the caller, and what waits for other members."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        self._wake_driver()
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join(_STOP_LIMIT_S)

    def _run(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread only
        while True:
            with self._changed:
                self._parked = True
                # Idleness, not a wait for another rank: whatever comes and `stop` notify.
                self._changed.wait_for(lambda: self.stopping or bool(self._work))
                self._parked = False
            if self.stopping:
                return
            self.lock.acquire()  # a driver lets go of it, or its check ends its wait
            try:
                self._drive(None)
            finally:
                self.release()
            self.notify_waiters()
