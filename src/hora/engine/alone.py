"""A thread alone: it has a queue to itself for the time of one lone request (`lone`), and puts nothing in flight.

It is the driver meanwhile, and no request of this rank is announced. If it is interrupted (Ctrl-C) while it waits for the
other members, what it has begun is left in flight as an ordinary blocking request would be: whoever drives the queue next
goes on with it.

    free --begin--> alone --end--> free
                    alone --leave, end--> unfinished --finish, by the next driver--> free
"""

from __future__ import annotations

from collections.abc import Callable
from threading import get_ident
from typing import NamedTuple

from hora.engine.driving import Driving
from hora.engine.plan import Planner
from hora.engine.recorder import Recorder
from hora.engine.request import Request
from hora.engine.status import WorldStatus
from hora.engine.submission import Submission

__all__ = ["Alone"]


class _Unfinished(NamedTuple):
    """What a thread was interrupted in. `go_on` says whether all members have agreed on it, and then it is done."""

    request: Request
    instance: int
    go_on: Callable[[], bool]


class Alone:
    """Of one queue. `on_idle` is called when nothing is in flight any more while the world is closing."""

    def __init__(
        self,
        submission: Submission,
        driving: Driving,
        planner: Planner,
        recorder: Recorder,
        status: WorldStatus,
        on_idle: Callable[[], None],
    ) -> None:
        self._submission = submission
        self._in_flight = submission.in_flight
        self._driving = driving
        self._planner = planner
        self._recorder = recorder
        self._status = status
        self._on_idle = on_idle
        self._unfinished: _Unfinished | None = None

    def begin(self) -> bool:
        """Become the driver of a queue in which nothing happens; False where something does."""
        driving = self._driving
        if self._in_flight or self._recorder.timeline is not None or not driving.lock.acquire(False):
            return False
        driving.thread = get_ident()
        self._submission.alone = True
        if self._in_flight or driving.stopping or not self._status.is_open or not self._planner.idle:
            self.end()
            return False
        return True

    def end(self) -> None:
        """Stop to be the driver, and announce what other threads have submitted meanwhile."""
        if self._unfinished is None:
            self._submission.end_alone()
        driving = self._driving
        driving.thread = 0
        driving.release()
        if self._in_flight or driving.num_waiters:
            driving.hand_over()
        if self._status.closing and not self._in_flight:
            self._on_idle()

    def leave(self, request: Request, instance: int, go_on: Callable[[], bool]) -> None:
        """The thread has been interrupted after its record was published. `end` comes next."""
        self._submission.hold(request, request.signature.key(instance))
        self._unfinished = _Unfinished(request, instance, go_on)

    def finish(self) -> Request | None:
        """Go on with what was left unfinished; the request, if it is done now. The driver calls it."""
        unfinished = self._unfinished
        if unfinished is None:
            return None
        request, instance, go_on = unfinished
        done = go_on()
        self._unfinished = None
        self._submission.end_alone()
        if done:
            return request
        with self._submission.lock:
            self._submission.announce(request.signature, instance)
        return None
