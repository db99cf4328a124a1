"""The meter: measurements of this process while it trains.

The training thread writes it (the engine, the optimizer, the fit loop and `report`), and `reporter` reads it about once
a second. The training thread never locks and allocates at most one tuple per step. Clocks of different ranks are not
compared: a late rank waits little while the others wait for it, so the waits alone show which rank is late
(`hora.watch.lateness`).
"""

from __future__ import annotations

import contextlib
import functools
import logging
import operator
import re
import resource
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, SupportsFloat

from hora.telemetry.sample import MAX_EVENTS, MAX_METRICS, MAX_NAME, Sample

_log = logging.getLogger("hora")

# Fields of a meter that only grow.
_TOTALS = ("num_steps", "step_s", "data_s", "backward_s", "between_s", "wait_s", "reduce_s", "transport_s",
           "optimizer_s", "checkpoint_s", "num_bytes", "num_samples")  # fmt: skip
_totals = operator.attrgetter(*_TOTALS)


def meter_data_loaders() -> None:
    """Make every DataLoader of this process report the duration of `next` and its number of samples."""
    from torch.utils.data import dataloader

    # There is no public hook. The class is private but as old as the module; without it only data_s is missing.
    base = getattr(dataloader, "_BaseDataLoaderIter", None)
    if base is None or getattr(base.__next__, "is_metered", False):
        return
    plain, main = base.__next__, threading.main_thread()

    def metered(self: Any) -> Any:
        if threading.current_thread() is not main:  # a prefetching thread: no one waits for it here
            return plain(self)
        since, blocked_s = time.perf_counter(), meter.blocked_s
        batch = plain(self)
        # A loader may itself wait for other ranks, which is no time of this rank's data.
        meter.data_s += max(time.perf_counter() - since - (meter.blocked_s - blocked_s), 0.0)
        meter.num_samples += getattr(getattr(self, "_index_sampler", None), "batch_size", None) or 0
        return batch

    metered.is_metered = True  # type: ignore[attr-defined]
    base.__next__ = metered


def meter_checkpoints() -> None:
    """Make `torch.save` on the training thread report its duration."""
    import torch

    plain = torch.save
    if getattr(plain, "is_metered", False):
        return

    @functools.wraps(plain)
    def metered(*args: Any, **kwargs: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            return plain(*args, **kwargs)
        with meter.checkpointing():
            return plain(*args, **kwargs)

    metered.is_metered = True  # type: ignore[attr-defined]
    torch.save = metered


_INTERRUPTED = "s from the last step before the change to the first one after it"


def interruption_s(text: str) -> float:
    """Return the seconds in the text of a "resumed" event; 0 if it has none."""
    found = re.search(r"(\d+\.\d+) " + _INTERRUPTED, text)
    return float(found[1]) if found else 0.0


class Meter:
    """Totals of this process since it started. Written by the training thread, read by any."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.step_s = self.data_s = self.backward_s = self.between_s = self.optimizer_s = 0.0
        self.wait_s = self.reduce_s = 0.0  # of the training thread
        self.transport_s = 0.0  # data movement, on any thread
        self.checkpoint_s = 0.0
        self._is_checkpointing = False
        self.num_bytes = self.num_samples = 0.0
        self.link_bytes_per_s = 0.0  # of this host's uplink, once measured
        self.total_steps = 0  # as announced by the fit loop or the user
        self.blocked: tuple[Any, float, Sequence[int]] | None = None  # operation, since when, with which ranks
        self.on_stall: Callable[[Sequence[int]], None] | None = None  # called with the ranks that keep others waiting
        self.on_commit: Callable[[], None] | None = None  # set while the launcher waits for a commit
        self._longest_s = 0.0
        self._last_end = time.perf_counter()
        self.completed: tuple[float, ...] = _totals(self)  # of the whole steps
        self._sampled = (self._last_end, _cpu_s(), *self.completed)
        self._metrics: dict[str, SupportsFloat] = {}
        self._events: deque[tuple[str, str]] = deque(maxlen=MAX_EVENTS)
        self._commit: deque[str] = deque(maxlen=1)  # the newest: a commit in every step would displace other events
        self._interrupted: tuple[float, int] | None = None  # end of the last step before a new world, and its size

    def step_done(self) -> None:
        """Record the end of a step; samples since the last one belong to it."""
        now = time.perf_counter()
        lasted_s = now - self._last_end
        self._last_end = now
        self.num_steps += 1
        self.step_s += lasted_s
        if lasted_s > self._longest_s:
            self._longest_s = lasted_s
        self.completed = _totals(self)  # one assignment: a reader sees only whole steps
        if self._interrupted is not None:
            self._note_resumption(now)

    def waited(self, since: float, transport_s: float) -> None:
        """Record that the training thread was blocked since then; `transport_s` is the total at that time."""
        blocked_s = time.perf_counter() - since
        moving_s = min(self.transport_s - transport_s, blocked_s)
        self.reduce_s += moving_s
        self.wait_s += blocked_s - moving_s

    @property
    def blocked_s(self) -> float:
        """Return the time for which the training thread has been blocked in collectives."""
        return self.wait_s + self.reduce_s

    def backward_done(self, began: float, ended: float, now: float, blocked_s: float) -> None:
        """Record a backward pass and the script's time after it; `blocked_s` is the total when backward began.

        The time in which this rank only waited for others belongs to neither of them. It is taken from the time after
        backward first, where scripts average their losses.
        """
        blocked_s = self.wait_s + self.reduce_s - blocked_s
        between_s = now - ended
        if blocked_s <= 0.0:
            self.between_s += between_s
            self.backward_s += ended - began
            return
        between_s = max(between_s - blocked_s, 0.0)
        self.between_s += between_s
        self.backward_s += max(now - began - blocked_s - between_s, 0.0)

    @contextlib.contextmanager
    def checkpointing(self) -> Iterator[None]:
        """Count the body as writing a checkpoint, once if nested."""
        if self._is_checkpointing:
            yield
            return
        began, blocked_s = time.perf_counter(), self.blocked_s
        self._is_checkpointing = True
        try:
            yield
        finally:
            self._is_checkpointing = False
            self.checkpoint_s += max(time.perf_counter() - began - (self.blocked_s - blocked_s), 0.0)

    def restart_step(self) -> None:
        """Exclude what happened since the last step from the next one, except checkpoints: after an evaluation or in a
        new world.
        """
        before = dict(zip(_TOTALS, self.completed, strict=True))
        self._last_end = time.perf_counter() - (self.checkpoint_s - before["checkpoint_s"])
        self.data_s, self.num_samples = before["data_s"], before["num_samples"]

    def world_formed(self, rank: int, size: int) -> None:
        """Start a new world; its rank 0, if it has trained before, reports how long the training was interrupted."""
        if rank == 0 and self.num_steps and self._interrupted is None:
            self._interrupted = self._last_end, size
        self.restart_step()

    def _note_resumption(self, now: float) -> None:
        assert self._interrupted is not None
        (ended, size), self._interrupted = self._interrupted, None
        ranks = "1 rank continues" if size == 1 else f"{size} ranks continue"
        self.event("resumed", f"{ranks}: {now - ended:.2f} {_INTERRUPTED}")

    def report(self, metrics: Mapping[str, SupportsFloat]) -> None:
        for name, value in metrics.items():
            detach = getattr(value, "detach", None)  # a tensor would keep its whole graph alive
            value = value if detach is None else detach()
            if name in self._metrics or len(self._metrics) < MAX_METRICS:
                self._metrics[name] = value

    def event(self, kind: str, text: str) -> None:
        """Record an event: a commit, a NaN, …"""
        self._events.append((kind, text))

    def commit(self, text: str, flush: Callable[[], None] | None = None) -> None:
        """Record that rank 0 has saved the training's state; `flush` writes it to disk before the job is ended."""
        self._commit.append(text)
        if self.on_commit is not None:
            if flush is not None:
                flush()
            self.on_commit()

    def pop_sample(self) -> Sample:
        """Return the sums over the steps since the last call."""
        totals = self.completed
        if not totals[0]:  # no steps at all: a script of bare collectives; still report its waits
            totals = _totals(self)
        before, self._sampled = self._sampled, (time.perf_counter(), _cpu_s(), *totals)
        window_s, cpu_s, *added = (new - old for new, old in zip(self._sampled, before, strict=True))
        since: dict[str, Any] = dict(zip(_TOTALS, added, strict=True), window_s=window_s, cpu_s=cpu_s)
        hidden_s = max(since.pop("transport_s") - since["reduce_s"], 0.0)
        longest_s, self._longest_s = self._longest_s, 0.0
        memory_bytes = _memory_bytes()
        return Sample(int(totals[0]), longest_s=longest_s, hidden_s=hidden_s, memory_bytes=memory_bytes, **since)

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics since the last call; tensors are converted here, not on the training thread."""
        taken, self._metrics = self._metrics, {}
        return numbers_of(taken)

    def pop_events(self) -> tuple[tuple[str, str], ...]:
        commits = [("commit", self._commit.popleft()) for _ in range(len(self._commit))]
        return (*(self._events.popleft() for _ in range(len(self._events))), *commits)

    def put_back(self, events: tuple[tuple[str, str], ...]) -> None:
        """Return events that could not be sent, so that the next `pop_events` finds them first."""
        self._events.extendleft(reversed(events))


_not_numbers: set[str] = set()  # metrics of which the user knows


def numbers_of(metrics: Mapping[str, SupportsFloat]) -> dict[str, float]:
    """Return the metrics that are numbers, and name any other one once."""
    numbers = {}
    for name, value in metrics.items():
        try:
            numbers[name[:MAX_NAME]] = float(value)
        except (TypeError, ValueError, RuntimeError):
            if name not in _not_numbers:
                _not_numbers.add(name)
                shape = getattr(value, "shape", None)
                what = f"of the shape {tuple(shape)}" if shape else f"{value!r:.60}"
                _log.warning(
                    "hora.report: %s is no number but a %s, %s: it is left out", name, type(value).__name__, what
                )
    return numbers


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _memory_bytes() -> float:
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/statm") as file:
        return float(int(file.read().split()[1]) * resource.getpagesize())
    return 0.0


meter = Meter()
"""The meter of this process."""
