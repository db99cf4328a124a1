"""The meter: what this process notices about itself while it trains.

Written by the training thread (the engine, the optimizer, the fit loop and `report` tell it how long things took) and
read, about once a second, by `reporter`. The training thread never locks and never allocates more than one tuple a
step. No clock is compared with another rank's: a rank that is late waits little, the others wait for it, so the waits
alone tell who is late and by how much (`hora.watch.lateness`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat

from hora.telemetry.sample import Sample

__all__ = ["Meter", "Reading", "meter", "meter_data_loaders", "report"]


_MAX_METRICS = 64
_MAX_EVENTS = 64
_MAX_NAME = 200


def meter_data_loaders() -> None:
    """Have every DataLoader of this process tell the meter how long `next` took, and how many samples it gave."""
    from torch.utils.data import dataloader

    # No public hook tells this. The class is private and as old as the module; without it only data_s is missing.
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None or getattr(base.__next__, "is_metered", False):
        return
    plain, main = base.__next__, threading.main_thread()

    def metered(self: Any) -> Any:
        if threading.current_thread() is not main:  # somebody prefetches: nothing waits for it here
            return plain(self)
        since = time.perf_counter()
        batch = plain(self)
        meter.data_s += time.perf_counter() - since
        meter.num_samples += getattr(getattr(self, "_index_sampler", None), "batch_size", None) or 0
        return batch

    metered.is_metered = True  # type: ignore[attr-defined]
    base.__next__ = metered


class Meter:
    """The totals of this process since it started. Written by the training thread, read by any."""

    __slots__ = (
        "_completed",
        "_events",
        "_interrupted",
        "_last_end",
        "_longest_s",
        "_metrics",
        "backward_s",
        "between_s",
        "blocked",
        "data_s",
        "link_bytes_per_s",
        "num_bytes",
        "num_samples",
        "num_steps",
        "on_commit",
        "on_stall",
        "optimizer_s",
        "reduce_s",
        "step_s",
        "total_steps",
        "transport_s",
        "wait_s",
    )

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_s = self.data_s = self.backward_s = self.between_s = self.optimizer_s = 0.0
        self.wait_s = self.reduce_s = 0.0  # of the training thread
        self.transport_s = 0.0  # data moved, on whatever thread
        self.num_bytes = self.num_samples = 0.0
        self.link_bytes_per_s = 0.0  # of this host's way out, once it was measured
        self.total_steps = 0  # as far as the fit loop or the user says
        self.blocked: tuple[Any, float, Sequence[int]] | None = None  # in what, since when, with which ranks
        self.on_stall: Callable[[Sequence[int]], None] | None = None  # these ranks keep others waiting for too long
        self.on_commit: Callable[[], None] | None = None  # the launcher waits for it
        self._longest_s = 0.0
        self._last_end = time.perf_counter()
        self._completed = self._totals()
        self._metrics: dict[str, SupportsFloat] = {}
        self._events: deque[tuple[str, str]] = deque(maxlen=_MAX_EVENTS)
        self._interrupted: tuple[float, int] | None = None  # end of the last step before a new world, ranks of it

    def _totals(self) -> tuple[float, ...]:
        return (
            self.num_steps,
            self.step_s,
            self.data_s,
            self.backward_s,
            self.between_s,
            self.wait_s,
            self.reduce_s,
            self.transport_s,
            self.optimizer_s,
            self.num_bytes,
            self.num_samples,
        )

    def step_done(self) -> None:
        """A step has ended; samples since the last one belong to it."""
        now = time.perf_counter()
        lasted_s = now - self._last_end
        self._last_end = now
        self.num_steps += 1
        self.step_s += lasted_s
        if lasted_s > self._longest_s:
            self._longest_s = lasted_s
        self._completed = self._totals()  # one assignment: a reader sees whole steps only
        if self._interrupted is not None:
            self._note_resumption(now)

    def waited(self, since: float, transport_s: float) -> None:
        """The training thread was blocked since then; `transport_s`: what `transport_s` was at that time."""
        blocked_s = time.perf_counter() - since
        moving_s = min(self.transport_s - transport_s, blocked_s)
        self.reduce_s += moving_s
        self.wait_s += blocked_s - moving_s

    def restart_step(self) -> None:
        """Leave time and samples since the last step out of the next one: an evaluation, a new world."""
        self._last_end = time.perf_counter()
        self.num_samples = self._completed[-1]

    def world_formed(self, rank: int, size: int) -> None:
        """A new world begins; its rank 0, if it has trained before, tells how long the training was interrupted."""
        if rank == 0 and self.num_steps and self._interrupted is None:
            self._interrupted = self._last_end, size
        self.restart_step()

    def _note_resumption(self, now: float) -> None:
        assert self._interrupted is not None
        (ended, size), self._interrupted = self._interrupted, None
        ranks = "1 rank goes on" if size == 1 else f"{size} ranks go on"
        self.event(
            "resumed", f"{ranks}: {now - ended:.2f} s from the last step before to the end of the first one after"
        )

    def stalled(self, ranks: Sequence[int]) -> None:
        """A stall report has named these ranks."""
        if self.on_stall is not None:
            self.on_stall(ranks)

    def report(self, metrics: Mapping[str, SupportsFloat]) -> None:
        for name, value in metrics.items():
            detach = getattr(value, "detach", None)  # a tensor would keep the whole graph behind it alive
            value = value if detach is None else detach()
            if name in self._metrics or len(self._metrics) < _MAX_METRICS:
                self._metrics[name] = value

    def event(self, kind: str, text: str) -> None:
        """Something worth a mark: a commit, a value that is not a number, …"""
        self._events.append((kind, text))

    def commit(self, text: str, flush: Callable[[], None] | None = None) -> None:
        """Rank 0 has saved the training's state. `flush` puts it on disk before a launcher ends the job."""
        self.event("commit", text)
        if self.on_commit is not None:
            if flush is not None:
                flush()
            self.on_commit()

    def longest_s(self) -> float:
        """The longest step since the last call."""
        longest, self._longest_s = self._longest_s, 0.0
        return longest

    @property
    def completed(self) -> tuple[float, ...]:
        return self._completed

    def take_metrics(self) -> dict[str, float]:
        """Return the metrics reported since the last call; tensors become numbers here, not in the training thread."""
        taken, self._metrics = self._metrics, {}
        numbers = {}
        for name, value in taken.items():
            try:
                numbers[name[:_MAX_NAME]] = float(value)
            except (TypeError, ValueError, RuntimeError):
                continue
        return numbers

    def take_events(self) -> tuple[tuple[str, str], ...]:
        events = []
        while self._events:
            events.append(self._events.popleft())
        return tuple(events)


class Reading:
    """Turns a meter's totals into samples, one for the time since the last one."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._before = meter.completed
        self._at = time.perf_counter()

    def sample(self, *, cpu_s: float = 0.0, memory_bytes: float = 0.0) -> Sample:
        now, totals = time.perf_counter(), self._meter.completed
        if not totals[0]:  # no steps at all: a script of bare collectives; its waits are worth telling nevertheless
            totals = self._meter._totals()
        differences = (new - old for new, old in zip(totals, self._before, strict=True))
        steps, step_s, data_s, backward_s, between_s, wait_s, reduce_s, *rest = differences
        transport_s, optimizer_s, num_bytes, num_samples = rest
        window_s, self._at, self._before = now - self._at, now, totals
        return Sample(
            int(totals[0]),
            int(steps),
            window_s,
            step_s,
            self._meter.longest_s(),
            data_s,
            backward_s,
            between_s,
            wait_s,
            reduce_s,
            max(transport_s - reduce_s, 0.0),
            optimizer_s,
            num_bytes,
            num_samples,
            cpu_s,
            memory_bytes,
        )


meter = Meter()
"""The one of this process."""


def report(*, total_steps: int | None = None, **metrics: SupportsFloat) -> None:
    """Show these values on the job's live page: `hora.report(loss=loss, accuracy=0.9)`. Cheap, from any rank, at any
    time.

    `total_steps`: how many steps of the optimizer this training will have, once; the page then knows the time that is
    left.
    """
    if total_steps is not None:
        meter.total_steps = int(total_steps)
    meter.report(metrics)
