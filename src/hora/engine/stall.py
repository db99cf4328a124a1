"""The stall report: which ranks keep which tensors waiting.

The first member of each process set reports on what was announced. It warns once per warning interval and, if the user
has set a limit, ends the job. `StallInspector` decides, from the pending requests and the time alone; `StallWatch`
tells.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hora.config import EngineConfig
from hora.engine.agree.agreement import Agreement
from hora.engine.plan import Pending, Planner
from hora.engine.request import Key, full_names
from hora.engine.status import WorldStatus
from hora.telemetry.meters import meter

__all__ = ["StallInspector", "StallLimits", "StallReport", "StallWatch"]

log = logging.getLogger("hora")

_MAX_NAMES = 6


@dataclass(frozen=True)
class StallLimits:
    """After how long a wait is reported, and after how long it ends the job; 0 for never."""

    warning_s: float
    shutdown_s: float

    @classmethod
    def of(cls, config: EngineConfig) -> StallLimits:
        """Return the user's settings. A shutdown before the first warning is refused."""
        shutdown_s = config.stall_shutdown_s if config.stall_shutdown_s >= config.stall_warning_s else 0.0
        return cls(0.0 if config.stall_check_disable else config.stall_warning_s, shutdown_s)


@dataclass(frozen=True)
class StallReport:
    """One warning; `shutdown` when the job has to end because of it. `ranks` are the missing ones."""

    text: str
    ranks: tuple[int, ...]
    shutdown: bool


class StallInspector:
    """Decides when pending requests are worth a warning. `ranks`: the members' global ranks."""

    def __init__(self, ranks: Sequence[int], limits: StallLimits) -> None:
        self._ranks = tuple(ranks)
        self.warning_s, self.shutdown_s = limits.warning_s, limits.shutdown_s
        self._next = 0.0

    def due(self, now: float) -> bool:
        """Return whether it is time to look; at most twice per warning interval, and not more than four times a
        second.
        """
        if now < self._next:
            return False
        self._next = now + max(min(self.warning_s, self.shutdown_s or self.warning_s) / 2, 0.25)
        return True

    def inspect(self, pending: Iterable[Pending], joined: frozenset[int], now: float) -> StallReport | None:
        """A report on what has waited longer than the warning time, or None."""
        late = [entry for entry in pending if now - entry.first_seen > self.warning_s]
        if not late:
            return None
        doomed = [entry for entry in late if self.shutdown_s and now - entry.first_seen > self.shutdown_s]
        self._next = now + self.warning_s if not self.shutdown_s else self._next
        missing: dict[int, list[str]] = {}
        guilty: set[int] = set()
        for entry in late:
            names = full_names(*entry.key, len(entry.any_signature().dtypes))
            for member in entry.missing():
                if member not in joined:
                    missing.setdefault(self._ranks[member], []).extend(names)
                    if entry in doomed:
                        guilty.add(self._ranks[member])
        lines = [
            f"Some ranks have not submitted tensors for which others have waited more than {self.warning_s:g} s. "
            "Either the ranks run different code, or these ranks are slow or stuck.",
            "Missing ranks:",
        ]
        for rank in sorted(missing):
            shown = missing[rank][:_MAX_NAMES] + (["..."] if len(missing[rank]) > _MAX_NAMES else [])
            lines.append(f"{rank}{'!' if rank in guilty else ''}: [{', '.join(shown)}]")
        return StallReport("\n".join(lines), tuple(sorted(guilty or missing)), bool(doomed))


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
        self._waiting_since: dict[Key, float] = {}  # since when members wait for repeated calls
        self._num_warnings = 0  # about the batch that runs now

    def begin(self, what: str) -> None:
        self._since, self._what, self._num_warnings = time.monotonic(), what, 0

    def end(self) -> float:
        """Return how long it took."""
        lasted_s, self._since = time.monotonic() - self._since, 0.0
        return lasted_s

    def check_pending(self, planner: Planner, agreement: Agreement | None = None) -> None:
        """Look at what some members have announced and others have not, and with an agreement at what members wait for
        in repeated calls."""
        inspector = self._inspector
        if inspector is None or not inspector.due(planner.now):
            return
        repeated = [] if agreement is None else self._repeated_calls(agreement, planner.now)
        report = inspector.inspect([*planner.pending(), *repeated], planner.joined, planner.now)
        if report is None:
            return
        log.log(logging.ERROR if report.shutdown else logging.WARNING, "%s", report.text)
        meter.stalled(report.ranks)
        if report.shutdown:
            self._status.stalled(report.ranks, f"stalled for more than {inspector.shutdown_s:g} s")

    def _repeated_calls(self, agreement: Agreement, now: float) -> list[Pending]:
        """Return the repeated calls that members wait in without having announced them."""
        found = []
        seen, self._waiting_since = self._waiting_since, {}
        for (signature, instance), signatures in agreement.unannounced_requests().items():
            key = signature.key(instance)
            entry = Pending(key, len(self._ranks), seen.get(key, now))
            entry.signatures = signatures
            self._waiting_since[key] = entry.first_seen
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
