"""The stall watch of a queue: it warns of ranks that keep the others waiting, and ends the job where the user wants that.

What is late is decided by the `StallInspector`, which only the first member of a set has; here it is told to users.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from hora.engine.agree.agreement import Agreement
from hora.engine.plan import Pending, Planner
from hora.engine.request import Key
from hora.engine.stall import StallInspector
from hora.engine.status import WorldStatus
from hora.telemetry.meters import meter

__all__ = ["StallWatch"]

log = logging.getLogger("hora")


class StallWatch:
    """Of the member number `member` of these ranks. Between `begin` and `end` a batch is executed."""

    def __init__(
        self, inspector: StallInspector | None, ranks: Sequence[int], member: int, status: WorldStatus
    ) -> None:
        self.inspects = inspector is not None
        self._inspector = inspector
        self._ranks = ranks
        self._member = member
        self._status = status
        self._since = 0.0
        self._what = ""
        self._lone_seen: dict[Key, float] = {}  # since when members wait for lone requests
        self._num_warnings = 0  # about the batch that runs now

    def begin(self, what: str) -> None:
        self._since, self._what, self._num_warnings = time.monotonic(), what, 0

    def end(self) -> float:
        """How long it took."""
        lasted_s, self._since = time.monotonic() - self._since, 0.0
        return lasted_s

    def check_pending(self, planner: Planner, agreement: Agreement | None = None) -> None:
        """Look at what some members have announced and others have not, and with an agreement at what members wait for
        alone. The driver calls it."""
        inspector = self._inspector
        if inspector is None or not inspector.due(planner.now):
            return
        lone = [] if agreement is None else self._lone_requests(agreement, planner.now)
        report = inspector.inspect([*planner.pending(), *lone], planner.joined, planner.now)
        if report is None:
            return
        log.log(logging.ERROR if report.shutdown else logging.WARNING, "%s", report.text)
        meter.stalled(report.ranks)
        if report.shutdown:
            self._status.stalled(report.ranks, f"stalled for more than {inspector.shutdown_s:g} s")

    def _lone_requests(self, agreement: Agreement, now: float) -> list[Pending]:
        """What members wait for without having announced it."""
        found = []
        seen, self._lone_seen = self._lone_seen, {}
        for (signature, instance), signatures in agreement.lone_requests().items():
            key = signature.key(instance)
            entry = Pending(key, len(self._ranks), seen.get(key, now))
            entry.signatures = signatures
            self._lone_seen[key] = entry.first_seen
            found.append(entry)
        return found

    def check_execution(self) -> None:
        """Look at a batch that has begun and does not end: a member has been stopped inside it. Any thread."""
        since, inspector = self._since, self._inspector
        if inspector is None or not since:
            return
        waited_s = time.monotonic() - since
        if inspector.shutdown_s and waited_s > inspector.shutdown_s:
            others = [rank for member, rank in enumerate(self._ranks) if member != self._member]
            text = f"(one of them) kept {self._what} waiting for more than {inspector.shutdown_s:g} s"
            self._status.stalled(others, text)
        elif waited_s > inspector.warning_s * (self._num_warnings + 1):
            self._num_warnings += 1
            what = f"{list(self._ranks)} have been in {self._what} for {waited_s:.0f} s"
            log.warning("the ranks %s; one of them is slow or stopped", what)
