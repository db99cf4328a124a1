"""The progress engine: one thread at a time drives a queue or a schedule; the others wait for it."""

from __future__ import annotations

import os
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence, Sized
from threading import get_ident
from typing import Any

from hora.engine.shm.counters import interrupt_waits
from hora.errors import HorovodInternalError
from hora.telemetry.meters import meter

_WAITER_SLICE_S = 0.5
_STOP_LIMIT_S = 5.0
_CLOSE_LIMIT_S = 5.0


class ProgressEngine(ABC):
    """Base class of a queue or a schedule of these ranks. There is something to do while there is `work`.

    One thread at a time, the driver, makes progress; the others sleep until it has finished something. A thread that
    waits for a result becomes the driver, which saves two thread switches. Work that no thread waits for is driven by a
    background thread, on `core` if given, which starts on first use and sleeps when there is nothing to do.
    """

    driver = 0  # its thread
    num_waiters = 0
    stopping = False
    _is_put_away = False
    _parked = False
    _background: threading.Thread | None = None

    def __init__(self, name: str, core: int | None, ranks: Sequence[int], work: Sized) -> None:
        self.driving = threading.Lock()  # held by the driver
        self._name, self._core, self._waits_for = name, core, ranks
        self._work = work
        self._finished = threading.Condition()  # for threads that wait while another one drives
        self._changed = threading.Condition()  # for the background thread

    @abstractmethod
    def _step(self) -> None:
        """Do the next piece of work, or wait a while for other members. Runs on the driver's thread."""

    @abstractmethod
    def _fail(self, error: HorovodInternalError) -> None:
        """Fail everything in flight with this error. Thread-safe."""

    @abstractmethod
    def _error(self) -> HorovodInternalError:
        """Return the error for work in flight when this is stopped."""

    @abstractmethod
    def _put_away(self) -> None:
        """Release all resources. Called once, by the last driver after `_end`."""

    @abstractmethod
    def wake(self) -> None:
        """End the driver's wait for other members."""

    def interrupt(self) -> None:
        """Wake all waiters so that they recheck the status. Thread-safe."""
        self.wake()
        interrupt_waits()

    @property
    def num_in_flight(self) -> int:
        return len(self._work)

    def wait(self, request: Any) -> None:
        """Wait until a request is `done`; drive unless another thread does."""
        since, moving_s = time.perf_counter(), meter.transport_s
        meter.blocked = request, since, self._waits_for
        try:
            while not request.done:
                self.drive_or_wait(request)
        finally:
            meter.blocked = None
            meter.waited(since, moving_s)

    def drive_or_wait(self, request: Any) -> None:
        """Make progress on a request, or wait for the driver to do so."""
        if self.driving.acquire(blocking=False):
            try:
                self.drive(request)
            finally:
                self.release()
                self.hand_over()
            return
        self.wake()
        with self._finished:
            self.num_waiters += 1
            if not request.done and self.driving.locked():
                self._finished.wait(_WAITER_SLICE_S)
            self.num_waiters -= 1

    def drive(self, until: Any) -> None:
        """Work until `until.done`, or until there is nothing left to do. Called with the lock held."""
        self.driver = get_ident()
        try:
            while self._work and not (until is not None and until.done) and not self.stopping:
                self._step()
            if self.stopping:
                self._fail(self._error())
        except HorovodInternalError as error:
            self._fail(error)
        finally:
            self.driver = 0

    def may_drive(self, limit_s: float) -> bool:
        """Become the driver, unless this very thread already is one that a signal has interrupted."""
        return self.driver != get_ident() and self.driving.acquire(timeout=limit_s)

    def release(self) -> None:
        """Stop being the driver. The last driver releases all resources."""
        if self.stopping and not self._is_put_away:
            self._is_put_away = True
            self._put_away()
        self.driving.release()

    def hand_over(self) -> None:
        """Wake other threads if there is work left: this thread stops driving."""
        self.notify_waiters()
        if self._work:
            self.wake_background()

    def notify_waiters(self, *, all_threads: bool = False) -> None:
        """Notify waiters of progress. `all_threads`: also those that are about to wait."""
        if self.num_waiters or all_threads:
            with self._finished:
                self._finished.notify_all()

    def wake_background(self) -> None:
        """Wake or start the background thread for work that no thread waits for."""
        if self._background is None:
            with self._changed:
                if self._background is None and not self.stopping:
                    self._background = threading.Thread(target=self._run_in_background, name=self._name, daemon=True)
                    self._background.start()
        elif self._parked:
            with self._changed:
                self._changed.notify_all()

    def _end(self) -> None:
        """Fail work in flight, end the background thread unless it is the caller, and release resources."""
        with self._changed:
            self.stopping = True
            self._changed.notify_all()
        self.interrupt()
        if self._background is not None and self._background is not threading.current_thread():
            self._background.join(_STOP_LIMIT_S)
        self._fail(self._error())
        if self.may_drive(_CLOSE_LIMIT_S):
            self.release()

    def _run_in_background(self) -> None:
        if self._core is not None:
            os.sched_setaffinity(0, {self._core})  # of this thread only
        while True:
            with self._changed:
                self._parked = True
                # Idle, not waiting for another rank: new work and `_end` notify.
                self._changed.wait_for(lambda: self.stopping or bool(self._work))
                self._parked = False
            if self.stopping:
                return
            self.driving.acquire()  # a driver releases it, or its check ends its wait
            try:
                self.drive(None)
            finally:
                self.release()
            self.notify_waiters()
