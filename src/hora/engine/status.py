"""The state of the world (running, shutting down or broken), its stall reports and its timeline.

    open --a rank shuts down--> closing --a second passes, or nothing agreed is left--> closed
    open --a rank is lost, stalls or cannot do its part--> broken

All waits of a runtime share `WorldStatus`. The runtime updates it from the control tree and the launcher; the queues
update it when something here ends the job. The queue of a group has a `GroupStatus` instead: ranks that are no members
may leave or die. The first member of each process set reports which ranks keep which tensors
waiting (`StallWatch`): it warns once per warning interval and, if the user has set a limit, ends the job.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from hora.config import EngineConfig
from hora.engine.negotiation.base import Negotiation
from hora.engine.plan import Batch, BatchPlanner, PendingRequest
from hora.engine.request import Key, Kind, Signature, full_names
from hora.errors import HorovodInternalError
from hora.events import Timeline
from hora.telemetry.meters import meter

log = logging.getLogger("hora")

# Operations agreed before a shutdown are still executed, because the others have already done their part.
_GRACE_S = 1.0
_MAX_NAMES = 6  # of tensors, in a stall report


class WorldStatus:
    """`tell` sends the reason to the other ranks; `wake` wakes waiting threads after every change."""

    def __init__(self, rank: int, *, tell: Callable[[str], None], wake: Callable[[], None]) -> None:
        self._rank = rank
        self._tell = tell
        self._wake = wake
        self._lock = threading.RLock()  # a signal handler may shut down in the middle of it
        self.is_open = True  # neither broken nor closing
        self.broken = self.closing = False
        self.has_lost = False  # broken by a lost rank
        self._fault = self._closing = ""  # the reason
        self._closing_since = 0.0
        self._gone: dict[int | None, str] = {}  # ranks that have left or died, and why; None: no group goes on
        self._groups: weakref.WeakSet[GroupStatus] = weakref.WeakSet()

    @property
    def reason(self) -> str:
        return self._fault or self._closing or "Horovod has been shut down"

    def close(self, text: str, *, by: int | None = None) -> None:
        """Start closing: this rank, or another one, shuts down."""
        self._end_groups(by, text, GroupStatus.close)
        with self._lock:
            if self.closing:
                return
            self._closing_since = time.monotonic()
            self._closing = text
            self.closing, self.is_open = True, False
        self._wake()

    def fault(self, text: str, *, tell: bool = False, lost: int | None = None) -> None:
        """Mark the world as broken, because of a lost rank if given; with `tell`, notify the others. Users see the
        first reason.
        """
        self._end_groups(lost, text, GroupStatus.fault)
        with self._lock:
            if self.is_open:
                self._fault, self.has_lost = text, lost is not None
                self.broken, self.is_open = True, False
        if tell:
            self._tell(text)
        self._wake()

    def gone(self, rank: int, text: str) -> None:
        """End the groups of a rank that has left or died after the world ended."""
        self._end_groups(rank, text, GroupStatus.fault)
        self._wake()

    def of_group(self, ranks: Sequence[int]) -> GroupStatus:
        """Return the status of a new group. Raises an error if one of its members is gone."""
        for rank in (None, *ranks):
            if rank in self._gone:
                raise HorovodInternalError(self._gone[rank])
        found = GroupStatus(self, ranks)
        self._groups.add(found)
        return found

    def living_groups(self) -> list[GroupStatus]:
        """Return the groups that may be in use although the world has ended."""
        return [] if self.is_open else [group for group in list(self._groups) if group.is_open]

    def _end_groups(self, rank: int | None, text: str, end: Callable[[GroupStatus, str], None]) -> None:
        self._gone.setdefault(rank, text)
        for group in list(self._groups):
            if rank is None or rank in group.ranks:
                end(group, text)

    def stalled(self, ranks: Sequence[int], text: str) -> None:
        """End the job on all ranks because these keep the others waiting."""
        self.fault(f"rank(s) {', '.join(map(str, ranks))} {text}; Horovod has been shut down", tell=True)

    def failed(self, text: str) -> None:
        """End the job on all ranks because this one could not execute an agreed operation."""
        self.fault(f"a collective failed on rank {self._rank}: {text}; Horovod has been shut down", tell=True)

    def interrupted(self, by: str) -> None:
        """End the job on all ranks because this one was interrupted in its part, which cannot be repeated."""
        text = f"rank {self._rank} was interrupted ({by}) in the middle of a collective that the others need it for"
        self.fault(f"{text}; Horovod has been shut down; call hvd.init() on all ranks to start again", tell=True)

    def error(self) -> HorovodInternalError:
        return HorovodInternalError(self.reason)

    def check_open(self) -> None:
        """Raise an error if nothing new may begin."""
        if not self.is_open:
            raise self.error()

    def check_alive(self) -> None:
        """Raise an error if waiting for a peer has become pointless."""
        if self.broken or (self.closing and time.monotonic() - self._closing_since > _GRACE_S):
            raise self.error()


class GroupStatus(WorldStatus):
    """The status of a group: it ends with one of its members, or with the world if no rank's end has ended that."""

    def __init__(self, world: WorldStatus, ranks: Sequence[int]) -> None:
        super().__init__(world._rank, tell=world._tell, wake=world._wake)
        self._world, self.ranks = world, frozenset(ranks)

    def fault(self, text: str, *, tell: bool = False, lost: int | None = None) -> None:
        if tell and self._world.is_open:
            self._world.fault(text, tell=True)  # and with it this one
        else:
            super().fault(text, lost=lost)


@dataclass(frozen=True)
class StallLimits:
    """The wait after which a stall is reported, and after which it ends the job; 0 for never."""

    warning_s: float
    shutdown_s: float

    @classmethod
    def of(cls, config: EngineConfig) -> StallLimits | None:
        """Return the user's settings; None without a check. A shutdown before the first warning is ignored."""
        if config.stall_check_disable:
            return None
        shutdown_s = config.stall_shutdown_s if config.stall_shutdown_s >= config.stall_warning_s else 0.0
        return cls(config.stall_warning_s, shutdown_s)


def report_stall(
    limits: StallLimits, missing: Mapping[int, Sequence[str]], guilty: Collection[int], status: WorldStatus
) -> None:
    """Report which ranks have not submitted which tensors, and end the job because of the guilty ones, if any."""
    lines = [
        f"Some ranks have not submitted tensors for which others have waited more than {limits.warning_s:g} s. "
        "Either the ranks run different code, or these ranks are slow or stuck.",
        "Missing ranks:",
    ]
    for rank, names in sorted(missing.items()):
        listed = ", ".join([*names[:_MAX_NAMES], *(["..."] if len(names) > _MAX_NAMES else [])])
        lines.append(f"{rank}{'!' if rank in guilty else ''}: [{listed}]")
    log.log(logging.ERROR if guilty else logging.WARNING, "%s", "\n".join(lines))
    ranks = tuple(sorted(guilty or missing))
    if meter.on_stall is not None:
        meter.on_stall(ranks)
    if guilty:
        status.stalled(ranks, f"stalled for more than {limits.shutdown_s:g} s")


class StallWatch:
    """Stall watch of one `member` of these ranks, with limits if it reports. `begin` and `end` enclose a batch."""

    def __init__(self, limits: StallLimits | None, ranks: Sequence[int], member: int, status: WorldStatus) -> None:
        self.limits = limits
        self._ranks = tuple(ranks)
        self._member = member
        self._status = status
        self._next = 0.0  # when to check pending requests next
        self._since = 0.0
        self._what = ""
        self._waiting_since: dict[Key, float] = {}  # since when members wait for repeated calls
        self._num_warnings = 0  # about the current batch

    def begin(self, what: str) -> None:
        self._since, self._what, self._num_warnings = time.monotonic(), what, 0

    @property
    def has_begun(self) -> bool:
        return self._since > 0.0

    def end(self) -> float:
        """Return the duration of the batch."""
        lasted_s, self._since = time.monotonic() - self._since, 0.0
        return lasted_s

    def check_pending(self, planner: BatchPlanner, negotiation: Negotiation) -> None:
        """Check requests that some members have announced, or wait for in repeated calls, and others have not.

        Runs at most twice per warning interval, and at most four times a second.
        """
        limits, now = self.limits, planner.now
        if limits is None or now < self._next:
            return
        self._next = now + max(min(limits.warning_s, limits.shutdown_s or limits.warning_s) / 2, 0.25)
        pending = [*planner.pending(), *self._repeated_calls(negotiation, now)]
        late = [entry for entry in pending if now - entry.first_seen > limits.warning_s]
        if late:
            self._report(late, planner.joined, now, limits)

    def _report(self, late: Sequence[PendingRequest], joined: Collection[int], now: float, limits: StallLimits) -> None:
        doomed = [entry for entry in late if limits.shutdown_s and now - entry.first_seen > limits.shutdown_s]
        if not limits.shutdown_s:
            self._next = now + limits.warning_s
        missing: dict[int, list[str]] = {}
        guilty: set[int] = set()
        for entry in late:
            names = full_names(*entry.key, len(next(filter(None, entry.signatures)).dtypes))
            for member in entry.missing():
                if member not in joined:
                    missing.setdefault(self._ranks[member], []).extend(names)
                    if entry in doomed:
                        guilty.add(self._ranks[member])
        report_stall(limits, missing, guilty, self._status)

    def _repeated_calls(self, negotiation: Negotiation, now: float) -> list[PendingRequest]:
        """Return the repeated calls that members wait in without having announced them."""
        found = []
        seen, self._waiting_since = self._waiting_since, {}
        for (signature, instance), signatures in negotiation.waiting_requests().items():
            key = signature.key(instance)
            entry = PendingRequest(key, signatures, seen.get(key, now))
            self._waiting_since[key] = entry.first_seen
            found.append(entry)
        return found

    def check_execution(self) -> None:
        """Check a batch that has begun and does not end: a member has been stopped inside it. Thread-safe."""
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


class TimelineRecorder:
    """The timeline of a runtime, while one is written (`hora.events`). Only on rank 0; elsewhere `timeline` is None."""

    def __init__(self, rank: int) -> None:
        self.timeline: Timeline | None = None
        self._rank = rank

    def start(self, path: str, *, mark_cycles: bool = False) -> None:
        """Start writing a trace; a trace to another file ends."""
        if self._rank != 0 or (self.timeline is not None and self.timeline.path == path):
            return
        self.stop()
        self.timeline = Timeline(path, mark_cycles=mark_cycles)

    def stop(self) -> None:
        timeline, self.timeline = self.timeline, None
        if timeline is not None:
            timeline.close()

    def arrived(self, member: int, key: Key, signature: Signature) -> None:
        """Record that a member has announced a request."""
        if self.timeline is not None:
            names = full_names(*key, max(len(signature.dtypes), 1))
            self.timeline.arrived(names, signature.kind_name, member)

    @contextmanager
    def batch(self, batch: Batch, transport_name: str) -> Iterator[None]:
        """Record the batch that the body executes."""
        timeline = self.timeline
        if timeline is None:
            yield
            return
        names, facts = [], []
        for part in batch.parts:
            signature = next(item for item in part.signatures if item is not None)
            every = full_names(*part.key, len(signature.dtypes))
            names.append(every[part.index] if every else part.key[0])
            dtype = signature.dtypes[part.index] if signature.dtypes else ""
            shape = str(list(signature.shapes[part.index])) if signature.shapes else "[]"
            facts.append({"dtype": dtype, "shape": shape})
        operation = batch.signature.kind_name
        inside = f"{transport_name.upper()}_{'BCAST' if batch.kind is Kind.BROADCAST else operation}"
        with timeline.running(names, () if batch.kind is Kind.BARRIER else (operation, inside), facts):
            yield
