"""Detection of late ranks: by how much, in which part of the step, and since when. Pure: takes samples.

A rank that is late for a collective does not wait there; the others wait for it. So lateness follows from how long each
rank *waited* by its own clock, without comparing clocks. The time between collectives is a rank's `work`. A straggler
is a rank whose work repeatedly takes longer than the median of the others.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hora.telemetry import PARTS, Sample

# A rank is named if its work takes this much longer than the others'; it stays named until it is well below.
NAMED, RELEASED = 1.10, 1.05
# The others must wait for at least this share of a step: a slow rank that delays no one is not a straggler.
_MIN_LATENESS = 0.04
WINDOW_S = 8.0
_SLICE_S = 1.5
_MIN_SLICES = 3
_LONGEST_S = 600.0
_MIN_STEPS = 4
_PERSISTENT = 0.7
_WAITS = 0.6  # a rank that computes in less of its own time waits for something
_OWN_PARTS = ("data", "forward", "backward", "between", "optimizer", "checkpoint")

Timed = tuple[float, Sample]


@dataclass(frozen=True)
class Straggler:
    """A rank that takes longer than the others."""

    rank: int
    slowdown: float  # its work relative to the median of the others
    lateness: float
    since: float  # NaN: slow on average, not from a certain time on
    excess: Mapping[str, float]  # shares of the extra time, by part
    busy: float = 1.0  # processor time per second of its own work; less if it waits for a disk, the network or a core

    @property
    def main_part(self) -> str:
        return max(self.excess, key=lambda part: self.excess[part]) if self.excess else ""


def added(samples: Sequence[Sample]) -> Sample:
    """Return the sum of some samples of one rank."""
    if not samples:
        return Sample()
    first, *rest = samples
    if not rest:
        return first
    sums = [sum(column) for column in zip(*samples, strict=True)]
    last = samples[-1]
    return Sample._make(sums)._replace(
        step=last.step,
        longest_s=max(sample.longest_s for sample in samples),
        memory_bytes=last.memory_bytes,
    )


def lateness(column: Mapping[int, Sample]) -> dict[int, float]:
    """Return by rank the share of a step for which others waited for it, from samples of the same time."""
    waits = {rank: cell.wait_s / cell.num_steps for rank, cell in column.items() if cell.num_steps}
    if len(waits) < 2:
        return dict.fromkeys(waits, 0.0)
    longest = max(waits.values())
    late = {}
    for rank, wait_s in waits.items():
        step_s = column[rank].step_s / column[rank].num_steps
        late[rank] = min((longest - wait_s) / step_s, 1.0) if step_s > 0 else 0.0
    return late


def find_stragglers(
    recent: Mapping[int, Sequence[Timed]], now: float, *, named: Mapping[int, float] | None = None
) -> list[Straggler]:
    """Return the ranks that slow the others down, the slowest first. `named`: ranks named before, and since when."""
    named = named or {}
    found = []
    for straggler in slow_on_average(_between(recent, now - WINDOW_S, now), named):
        since = named.get(straggler.rank) or _since(straggler.rank, recent, now)
        if since is not None:
            found.append(replace(straggler, since=since))
    return found


def slow_on_average(column: Mapping[int, Sample], named: Collection[int] = ()) -> list[Straggler]:
    """Return the ranks that are slow in samples of the same time, however that is spread; the slowest first."""
    late = lateness(column)
    found = []
    for rank, sample in column.items():
        others = [other for peer, other in column.items() if peer != rank]
        if not others or sample.num_steps < _MIN_STEPS:
            continue
        slowdown = _slowdown(sample, others)
        if slowdown >= (RELEASED if rank in named else NAMED) and late[rank] >= _MIN_LATENESS:
            found.append(Straggler(rank, slowdown, late[rank], 0.0, _excess(sample, others), _busy(sample)))
    return sorted(found, key=lambda straggler: -straggler.slowdown)


def _between(recent: Mapping[int, Sequence[Timed]], begin: float, end: float) -> dict[int, Sample]:
    """Return each rank's sample of this period, if it completed at least one step."""
    sums = {rank: added([s for at, s in samples if begin < at <= end]) for rank, samples in recent.items()}
    return {rank: sample for rank, sample in sums.items() if sample.num_steps}


def _work(sample: Sample) -> float:
    return sample.work_s / sample.num_steps


def _slowdown(sample: Sample, others: Sequence[Sample]) -> float:
    usual = statistics.median(map(_work, others))
    return _work(sample) / usual if usual > 0 else 1.0


def _busy(sample: Sample) -> float:
    """Return the processor time per second of a rank's own work: while it is blocked it may spin, or may not."""
    if not sample.window_s or not sample.step_s:
        return 1.0
    return sample.cpu_s / sample.window_s * sample.step_s / sample.work_s if sample.work_s else 1.0


def _since(rank: int, recent: Mapping[int, Sequence[Timed]], now: float) -> float | None:
    """Return when the slowdown began, by slices of time; None if it is not persistent."""
    verdicts: list[tuple[float, bool]] = []
    oldest = max(min((samples[0][0] for samples in recent.values() if samples), default=now), now - _LONGEST_S)
    end = now
    while end > oldest - _SLICE_S / 2:
        column = _between(recent, end - _SLICE_S, end)
        if rank in column and len(column) > 1:
            others = [other for peer, other in column.items() if peer != rank]
            verdicts.append((end - _SLICE_S, _slowdown(column[rank], others) > RELEASED))
        end -= _SLICE_S
    latest = [slow for begin, slow in verdicts if begin >= now - WINDOW_S - _SLICE_S / 2]
    if len(latest) < _MIN_SLICES or sum(latest) < _PERSISTENT * len(latest) or not any(latest[:2]):
        return None
    since, missed = now, 0
    for begin, slow in verdicts:
        missed = 0 if slow else missed + 1
        if missed > 1:
            break
        if slow:
            since = begin
    return max(since, oldest)


def _excess(sample: Sample, others: Sequence[Sample]) -> dict[str, float]:
    """Distribute the extra time over the parts of a step."""
    more = {}
    for part in _OWN_PARTS:
        index = PARTS.index(part)
        usual = statistics.median(other.parts_s[index] / other.num_steps for other in others)
        more[part] = max(sample.parts_s[index] / sample.num_steps - usual, 0.0)
    total = sum(more.values())
    return {part: value / total for part, value in more.items() if value > 0.01 * total} if total > 0 else {}


PART_WORDS = {
    "data": "waiting for data",
    "forward": "in the forward pass or the script itself",
    "backward": "in the backward pass",
    "between": "between backward and step",
    "optimizer": "in the optimizer",
    "checkpoint": "writing checkpoints",
}
_SAME_TIME_S = 10.0  # profiles of two ranks are comparable if they end this close together

Frame = Sequence[Any]  # [file, line, function, code, origin], as hora.telemetry.stacks describes it


def _is_users(frame: Frame) -> bool:
    return bool(frame[4] == "user")


@dataclass(frozen=True)
class SlowLine:
    """The stack in which a slow rank spends more time than an ordinary one."""

    frames: Sequence[Frame]  # innermost first
    share: float  # of the slow rank's time
    usual: float  # of the other rank's time
    other: int | None  # the ordinary rank; None: no other rank was profiled

    @property
    def own(self) -> Frame:
        """The innermost frame of the script, or the innermost frame."""
        return next((frame for frame in self.frames if _is_users(frame)), self.frames[0])


@dataclass
class Episode:
    """A finding about a rank, and for how long it has held."""

    finding: Straggler  # the latest, or the worst once it is over
    host: str
    than: str  # the reference
    until: float | None = None  # None while it lasts
    line: SlowLine | None = None
    _worst: Straggler | None = None

    @property
    def rank(self) -> int:
        return self.finding.rank

    @property
    def part_words(self) -> str:
        return PART_WORDS.get(self.finding.main_part, "")

    def update(self, finding: Straggler) -> None:
        self.finding, self.until = finding, None
        self._worst = max(self._worst or finding, finding, key=lambda one: one.slowdown)

    def close(self, at: float) -> None:
        if self.until is None:
            self.until, self.finding = at, self._worst or self.finding

    @property
    def claim(self) -> str:
        verb = "is" if self.until is None else "was"
        return f"rank {self.rank} on {self.host} {verb} {self.finding.slowdown:.2f}× slower than {self.than}"

    @property
    def cause(self) -> str:
        """Return which part of the step takes the additional time; empty if none stands out."""
        if not self.part_words:
            return ""
        return f"{100 * self.finding.excess[self.finding.main_part]:.0f} % of it {self.part_words}"

    def sentence(self) -> str:
        return f"{self.claim}, {self.cause}" if self.cause else self.claim

    @property
    def advice(self) -> str:
        """Return what to try first."""
        part, waits = self.finding.main_part, self.finding.busy < _WAITS
        where = ""
        if self.line is not None:
            file, number, function = self.line.own[:3]
            where = f" `{function}` at {os.path.basename(file)}:{number}"
        busy = f"rank {self.rank} computes in only {100 * self.finding.busy:.0f} % of its own time"
        if part == "data":
            return f"more workers for the data loader of rank {self.rank}, or a faster disk for" + (
                where or " its rows"
            )
        if part == "checkpoint":
            return f"write checkpoints of rank {self.rank} less often, or to a faster disk"
        if waits:
            return f"{busy}: find what" + (where or " it") + " waits for (a disk, the network, a core that it shares)"
        if part == "optimizer":
            return f"look at what else runs on {self.host}: optimizers of all ranks have the same work"
        if part == "between":
            return "do less between backward() and step()" + (f": see{where}" if where else "")
        return (
            f"rank {self.rank} computes all the time"
            + (f" in{where}" if where else "")
            + f": give it batches of the others' size, or see `hora doctor` on {self.host} for a slower processor"
        )


def find_line(profiles: Mapping[int, Mapping[str, Any]], rank: int, slow: Collection[int]) -> SlowLine | None:
    """Compare a slow rank's profile with an ordinary rank's of the same time; None without a profile.

    Stacks in which the rank waits for others are ignored: no line of the script is slow there.
    """
    mine = profiles.get(rank)
    if mine is None:
        return None
    other = next(
        (r for r, p in profiles.items() if r not in slow and abs(p["at"] - mine["at"]) < _SAME_TIME_S),
        None,
    )
    usual = {} if other is None else _shares(profiles[other])
    found = [
        SlowLine(frames, share, usual[key][0] if key in usual else 0.0, other)
        for key, (share, frames) in _shares(mine).items()
    ]
    return max(found, key=lambda line: line.share - line.usual, default=None)


def _shares(profile: Mapping[str, Any]) -> dict[Any, tuple[float, Sequence[Frame]]]:
    """Return each location in the script with its share of the samples and a stack that leads to it."""
    shares: dict[Any, tuple[float, Sequence[Frame]]] = {}
    for count, frames in profile["stacks"]:
        if not frames or any(frame[4] == "engine" for frame in frames):
            continue
        first = next((i for i, frame in enumerate(frames) if _is_users(frame)), 0)
        key = tuple(tuple(frame[:3]) for frame in frames[first:])
        before, shown = shares.get(key, (0.0, frames))
        shares[key] = before + count / max(profile["num_samples"], 1), shown
    return shares
