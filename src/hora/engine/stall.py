"""The stall report: which ranks keep which tensors waiting.

The first member of each process set reports on what was announced. It warns once per warning interval and, if the user
has set a limit, ends the job.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hora.config import EngineConfig
from hora.engine.agree.agreement import Agreement
from hora.engine.plan import Pending, Planner
from hora.engine.request import Key, full_names
from hora.engine.status import WorldStatus
from hora.telemetry.meters import meter

__all__ = ["StallLimits", "StallWatch", "stall_text"]

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


def stall_text(warning_s: float, missing: Mapping[str, Sequence[str]]) -> str:
    """Return the warning: which ranks have not submitted which tensors."""
    lines = [
        f"Some ranks have not submitted tensors for which others have waited more than {warning_s:g} s. "
        "Either the ranks run different code, or these ranks are slow or stuck.",
        "Missing ranks:",
    ]
    for rank, names in missing.items():
        lines.append(f"{rank}: [{', '.join([*names[:_MAX_NAMES], *(['...'] if len(names) > _MAX_NAMES else [])])}]")
    return "\n".join(lines)


class StallWatch:
    """Of member `member` of these ranks, with limits if it reports. A batch runs between `begin` and `end`."""

    def __init__(self, limits: StallLimits | None, ranks: Sequence[int], member: int, status: WorldStatus) -> None:
        self.limits = limits
        self._ranks = tuple(ranks)
        self._member = member
        self._status = status
        self._next = 0.0  # when to look at what is pending
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

    def check_pending(self, planner: Planner, agreement: Agreement) -> None:
        """Look at what some members have announced, or wait for in repeated calls, and others have not; at most twice
        per warning interval, and not more than four times a second."""
        limits, now = self.limits, planner.now
        if limits is None or now < self._next:
            return
        self._next = now + max(min(limits.warning_s, limits.shutdown_s or limits.warning_s) / 2, 0.25)
        pending = [*planner.pending(), *self._repeated_calls(agreement, now)]
        late = [entry for entry in pending if now - entry.first_seen > limits.warning_s]
        if late:
            self._report(late, planner.joined, now, limits)

    def _report(self, late: Sequence[Pending], joined: frozenset[int], now: float, limits: StallLimits) -> None:
        doomed = [entry for entry in late if limits.shutdown_s and now - entry.first_seen > limits.shutdown_s]
        if not limits.shutdown_s:
            self._next = now + limits.warning_s
        missing: dict[int, list[str]] = {}
        guilty: set[int] = set()
        for entry in late:
            names = full_names(*entry.key, len(entry.any_signature().dtypes))
            for member in entry.missing():
                if member not in joined:
                    missing.setdefault(self._ranks[member], []).extend(names)
                    if entry in doomed:
                        guilty.add(self._ranks[member])
        named = {f"{rank}{'!' if rank in guilty else ''}": missing[rank] for rank in sorted(missing)}
        ranks = tuple(sorted(guilty or missing))
        log.log(logging.ERROR if doomed else logging.WARNING, "%s", stall_text(limits.warning_s, named))
        meter.stalled(ranks)
        if doomed:
            self._status.stalled(ranks, f"stalled for more than {limits.shutdown_s:g} s")

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
        since, limits = self._since, self.limits
        if limits is None or not since:
            return
        waited_s = time.monotonic() - since
        if limits.shutdown_s and waited_s > limits.shutdown_s:
            others = [rank for member, rank in enumerate(self._ranks) if member != self._member]
            text = f"(one of them) kept {self._what} waiting for more than {limits.shutdown_s:g} s"
            self._status.stalled(others, text)
        elif waited_s > limits.warning_s * (self._num_warnings + 1):
            self._num_warnings += 1
            what = f"{list(self._ranks)} have been in {self._what} for {waited_s:.0f} s"
            log.warning("the ranks %s; one of them is slow or stopped", what)
