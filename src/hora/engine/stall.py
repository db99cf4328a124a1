"""The stall report: which ranks keep which tensors waiting. Pure: the queue gives it the pending requests and the time.

The first member of each process set reports. It warns once per warning interval and, if the user has set a limit, says that
the job is to be shut down.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hora.config import EngineConfig
from hora.engine.plan import Pending
from hora.engine.request import full_names

__all__ = ["StallInspector", "StallLimits", "StallReport"]

_MAX_NAMES = 6


@dataclass(frozen=True)
class StallLimits:
    """After how long a wait is reported, and after how long it ends the job; 0 for never."""

    warning_s: float
    shutdown_s: float

    @classmethod
    def of(cls, config: EngineConfig) -> StallLimits:
        """What the user has set. A shutdown before the first warning is refused."""
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
        """Whether it is time to look; at most twice per warning interval, and not more than four times a second."""
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
