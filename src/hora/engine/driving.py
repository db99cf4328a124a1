"""Who drives a queue: one thread at a time, which holds the lock and makes progress.

A thread that waits for a result drives the queue itself, which saves two changes of thread. While another thread drives, it
sleeps until that one has finished something. What no thread waits for is driven by the background thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sized
from threading import get_ident

from hora.engine.background import BackgroundThread
from hora.engine.request import Request

__all__ = ["Driving"]

_WAITER_SLICE_S = 0.5


class Driving:
    """`drive(until)` makes progress until that request is done, or nothing is `in_flight`. `put_away` is called once, by the
    last driver after `stopping`."""

    def __init__(
        self,
        name: str,
        core: int | None,
        *,
        in_flight: Sized,
        drive: Callable[[Request | None], None],
        wake_driver: Callable[[], None],
        put_away: Callable[[], None],
    ) -> None:
        self.lock = threading.Lock()  # held by the driver
        self.thread = 0  # the driver
        self.num_waiters = 0
        self.stopping = False
        self._in_flight = in_flight
        self._drive = drive
        self._wake_driver = wake_driver
        self._put_away: Callable[[], None] | None = put_away
        self._finished = threading.Condition()  # for threads that wait while another one drives
        self._background = BackgroundThread(
            name, core, has_work=lambda: bool(in_flight), work=self._drive_in_background
        )

    def drive_or_wait(self, request: Request) -> None:
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
        """Let another thread be the driver. The last one puts away what the queue holds."""
        put_away = self._put_away
        if self.stopping and put_away is not None:
            self._put_away = None
            put_away()
        self.lock.release()

    def hand_over(self) -> None:
        """This thread drives no more: let others go on, if there is something to do."""
        self.notify_waiters()
        if self._in_flight:
            self._background.wake()

    def wake_background(self) -> None:
        """Something has come that no thread waits for."""
        self._background.wake()

    def notify_waiters(self, *, all_threads: bool = False) -> None:
        """Something has been finished. `all_threads`: also those that are about to wait."""
        if self.num_waiters or all_threads:
            with self._finished:
                self._finished.notify_all()

    def stop(self) -> None:
        """End the background thread, and what waits for other members."""
        self.stopping = True
        self._background.stop(self._wake_driver)

    def _drive_in_background(self) -> None:
        self.lock.acquire()  # a driver lets go of it, or a guard ends its wait
        try:
            self._drive(None)
        finally:
            self.release()
        self.notify_waiters()
