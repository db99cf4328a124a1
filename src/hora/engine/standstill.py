"""Standstills: two ranks that each wait in a collective which the other one has not reached.

The stall report says after a minute which ranks are missing. If such a rank itself waits for one that is stuck, neither
can ever go on: one has left the training loop and averages a metric, for example, while the other still reduces
gradients. While its training thread waits, rank 0 asks the ranks that it waits for what theirs wait in, and warns
early, once per wait. Pairs without rank 0 are left to the stall report.

An operation counts only while it waits for members, not once it is executed. Both answers must be the same twice: a
thread that still waits has done nothing in between.
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from hora.engine.progress import ProgressEngine
from hora.engine.queue import OperationQueue
from hora.engine.request import Key, Kind
from hora.engine.schedule import Item, ReductionSchedule
from hora.net.wire import Header
from hora.telemetry.meters import meter
from hora.telemetry.stacks import current_line, rank_condition

log = logging.getLogger("hora")

_FIRST_S, _EVERY_S = 2.0, 5.0  # of a wait, until the first question, and between later ones
_MAX_ASKED = 16
_WAIT = ProgressEngine.wait.__code__

Queues = Mapping[int, OperationQueue]  # of this rank, by the set's serial number
RequestOfRanks = Callable[[Sequence[int], Header], Mapping[int, bytes]]


class Blocked(NamedTuple):
    """The operation that a rank's training thread waits in, for members that have not reached it."""

    serial: int  # of the set
    operation: str
    name: str | int
    number: int  # of the item of a schedule; 0: a request
    what: str  # the name that users see
    since: float  # by the rank's own clock: distinguishes two waits
    step: int
    line: str
    condition: str  # an `if` around the line that asks for the rank

    @property
    def key(self) -> Key:
        return self.operation, self.name

    def where(self) -> str:
        step = f"step {self.step}, " if self.step else ""
        return f"{self.what} ({step}{self.line})"


class Waiting(NamedTuple):
    """The same with its queue and the ranks that this rank waits for, as far as it knows."""

    blocked: Blocked
    queue: OperationQueue
    missing: Sequence[int]


def find_waiting(queues: Queues) -> Waiting | None:
    """Return the operation that the training thread waits in; None if it works, or if the operation is executed."""
    engine, request, since = _wait_of_main_thread()
    queue = engine.queue if isinstance(engine, ReductionSchedule) else engine
    serial = next((serial for serial, one in queues.items() if one is queue), None)
    if serial is None or not isinstance(queue, OperationQueue):
        return None
    found = _of_item(engine, request) if isinstance(engine, ReductionSchedule) else _of_request(queue, request.key)
    if found is None:
        return None
    key, number, what, members = found
    others = [queue.ranks[member] for member in members] or [rank for rank in queue.ranks if rank != queue.world.rank]
    return Waiting(
        Blocked(serial, *key, number, what, since, meter.num_steps, current_line(), rank_condition()),
        queue,
        others[:_MAX_ASKED],
    )


def _wait_of_main_thread() -> tuple[Any, Any, float]:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None:
        if frame.f_code is _WAIT and "since" in (known := frame.f_locals):
            return known["self"], known["request"], known["since"]
        frame = frame.f_back
    return None, None, 0.0


def _of_item(schedule: ReductionSchedule, item: Item) -> tuple[Key, int, str, Sequence[int]] | None:
    if item.done or item.reduction is None:
        return None
    members = schedule.late_for(item)
    return None if members is None else (item.reduction.signature.key(0), item.number, item.name, members)


def _of_request(queue: OperationQueue, key: Key) -> tuple[Key, int, str, Sequence[int]] | None:
    request = queue.in_flight.get(key)
    if request is None or request.done or request.signature.kind == Kind.JOIN or queue.is_executing:
        return None
    return key, 0, request.name, queue.planner.missing(key)


def has_reached(queues: Queues, blocked: Blocked) -> bool:
    """Return whether this rank has submitted this operation, or cannot know."""
    queue = queues.get(blocked.serial)
    if queue is None or blocked.key in queue.keys_in_flight():
        return True
    schedules = [*queue.schedules] if blocked.number else []
    return any(schedule.has_started(blocked.key, blocked.number) for schedule in schedules)


def answer(queues: Queues, question: Header) -> bytes:
    """Answer rank 0: has this rank reached its operation, and what does the training thread wait in?"""
    asked = Blocked(*question["blocked"])
    waiting = find_waiting(queues)
    return json.dumps([has_reached(queues, asked), waiting and waiting.blocked]).encode()


class StandstillWatch:
    """Rank 0's watch. `look` is called once a second, and does not block."""

    def __init__(self, queues: Callable[[], Queues], request: RequestOfRanks) -> None:
        self._queues, self._request = queues, request
        self._since = self._next_s = 0.0  # the wait, and how long it must have lasted for the next question
        self._suspects: dict[int, Blocked] = {}  # by rank, in this wait
        self._asking = threading.Lock()

    def look(self) -> None:
        """Ask the ranks that the training thread has waited for, if it is time."""
        waiting = None if self._asking.locked() else find_waiting(self._queues())
        if waiting is None:
            return
        waited_s = time.perf_counter() - waiting.blocked.since
        if waiting.blocked.since != self._since:
            self._since, self._next_s, self._suspects = waiting.blocked.since, _FIRST_S, {}
        if waited_s >= self._next_s:
            self._next_s = waited_s + min(waited_s, _EVERY_S)
            threading.Thread(target=self._question, args=(waiting,), name="hora-standstill", daemon=True).start()

    def _question(self, waiting: Waiting) -> None:
        with self._asking, contextlib.suppress(RuntimeError):  # the interpreter ends
            known, self._suspects = self._suspects, self._find_suspects(waiting)
            sure = {rank: its for rank, its in self._suspects.items() if rank in known and known[rank] == its}
            if sure:
                self._next_s = float("inf")
                text = standstill_text(waiting.blocked, sure)
                meter.event("drift", text)
                log.warning("%s", text)
            elif self._suspects:
                self._next_s = 0.0  # make sure at once

    def _find_suspects(self, waiting: Waiting) -> dict[int, Blocked]:
        mine, queues = waiting.blocked, self._queues()
        found: dict[int, Blocked] = {}
        for rank, data in self._request(waiting.missing, {"want": "standstill", "blocked": mine}).items():
            reached, fields = json.loads(data) if data else (True, None)
            if reached or fields is None:
                continue
            its = Blocked(*fields)
            if not has_reached(queues, its):
                found[rank] = its
        return found


def standstill_text(mine: Blocked, others: Mapping[int, Blocked]) -> str:
    """Return the warning of rank 0."""
    first, *more = sorted(others)
    same = f" (likewise ranks {', '.join(map(str, more))})" if more else ""
    condition = mine.condition or others[first].condition
    if condition:
        hint = f"only some ranks run what is inside {condition}"
    else:
        hint = "do they make the same number of steps, and leave the loop in the same epoch?"
    return (
        f"neither rank 0 nor rank {first} can go on: rank 0 waits in {mine.where()}, which rank {first} has not "
        f"reached, and rank {first} waits in {others[first].where()}, which rank 0 has not reached{same}. All ranks "
        f"must make the same calls in the same order: {hint}"
    )
