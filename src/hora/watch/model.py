"""The run: everything the page shows about one job, in bounded memory. Fed by a live job or a recording.

It takes `Entry`s in order of time. It has no clock, thread or lock: entries carry their time, and the caller makes sure
that only one thread calls at a time.
"""

from __future__ import annotations

import json
import operator
from array import array
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from hora.telemetry import Sample
from hora.telemetry.meters import interruption_s
from hora.telemetry.parsing import MAX_RANKS, Stack, parse_profile, parse_report, parse_stacks
from hora.watch.lateness import Episode, Straggler, Timed, find_line, find_stragglers

# Kinds of entries, in the order of their numbers in a recording.
KINDS = ("world", "report", "joined", "exited", "failed", "line", "event", "stack", "profile", "end")

# A cell holds the sums of a sample's durations and counts, and the longest step.
_SUMS = ("num_steps", "step_s", "data_s", "backward_s", "between_s", "wait_s", "reduce_s", "hidden_s", "optimizer_s",
         "checkpoint_s", "num_bytes", "num_samples")  # fmt: skip
_CELL = (*_SUMS, "longest_s")
_summands = operator.attrgetter(*_SUMS)
MAX_LINES = 4000
MAX_LINE_CHARS = 2000
MAX_EVENTS = 1000
_RECENT_S = 120.0
_MAX_RECENT = 240
_MAX_METRICS = 40
# A waiting rank is reported if it waits this long, and longer than usual.
_LONG_WAIT_S = 1.5
STUCK_S = 5.0
_LAST_TIME = 1e11  # seconds since the epoch: later times in a foreign file are invalid
_MAX_GENERATION = 2**31
_MAX_EPISODES = 50
_MAX_DRIFTS = 10
_MAX_LOSSES = 100
_SAME_EPISODE_S = 10.0  # a rank that is slow again so soon keeps its episode, and the line that was found
_LATE_PROFILE_S = 10.0  # a profile may arrive this long after its rank has caught up


class Grid:
    """Bins of `bin_s` seconds from `began` on. `epoch` counts how often they were merged."""

    def __init__(self, began: float, *, bin_s: float = 1.0, num_bins: int = 1200) -> None:
        assert num_bins % 2 == 0, num_bins
        self.began = began
        self.bin_s = bin_s
        self.num_bins = num_bins
        self.num_used = 0
        self.epoch = 0
        # By rank or metric, its cells: each has some sums, then a maximum.
        self._rows: dict[int | str, array[float]] = {}

    @property
    def ranks(self) -> list[int]:
        return sorted(key for key in self._rows if isinstance(key, int))

    @property
    def metrics(self) -> list[str]:
        return [key for key in self._rows if isinstance(key, str)]

    def index(self, at: float) -> int:
        """Return the bin of this time; merges bins to make room."""
        while (index := int(max(at - self.began, 0.0) / self.bin_s)) >= self.num_bins:
            self._halve()
        self.num_used = max(self.num_used, index + 1)
        return index

    def add(self, rank: int, at: float, sample: Sample) -> None:
        self._add(rank, at, _summands(sample), sample.longest_s)

    def add_metric(self, name: str, at: float, value: float) -> None:
        self._add(name, at, (value, 1.0), 0.0)

    def _add(self, key: int | str, at: float, sums: Sequence[float], longest: float) -> None:
        index, width = self.index(at), len(sums) + 1
        row = self._rows.get(key)
        if row is None:
            row = self._rows[key] = array("d", bytes(8 * width * self.num_bins))
        for place, value in enumerate(sums, index * width):
            row[place] += value
        last = (index + 1) * width - 1
        row[last] = max(row[last], longest)

    def metric(self, name: str, index: int) -> float | None:
        """Return the mean of a metric in a bin; None if it was not reported there."""
        total, count, _ = self._cell(name, index)
        return total / count if count else None

    def cell(self, rank: int, index: int) -> Sample | None:
        """Return a rank's sample of a bin; None if it completed no step there."""
        fields: dict[str, Any] = dict(zip(_CELL, self._cell(rank, index), strict=False))
        return Sample(**fields) if fields.get("num_steps") else None

    def column(self, index: int) -> dict[int, Sample]:
        """Return the ranks' samples of a bin."""
        return {rank: cell for rank in self.ranks if (cell := self.cell(rank, index)) is not None}

    def _cell(self, key: int | str, index: int) -> array[float]:
        row = self._rows.get(key, array("d"))
        width = len(row) // self.num_bins
        return row[index * width : (index + 1) * width]

    def _halve(self) -> None:
        for key, row in self._rows.items():
            width, merged = len(row) // self.num_bins, array("d")
            for first in range(0, len(row), 2 * width):
                left, right = row[first : first + width], row[first + width : first + 2 * width]
                merged.extend(map(operator.add, left[:-1], right[:-1]))
                merged.append(max(left[-1], right[-1]))
            self._rows[key] = merged + array("d", bytes(8 * len(merged)))
        self.bin_s *= 2
        self.num_used = -(-self.num_used // 2)
        self.epoch += 1


class Entry(NamedTuple):
    """Something that happened."""

    at: float
    kind: str  # names the method of `Run` that applies it
    worker: int
    data: bytes  # the argument of that method


@dataclass
class RankState:
    """A rank and its current worker."""

    rank: int
    worker: int
    host: str
    state: str = "starting"  # -> here -> done | failed | lost
    why: str = ""
    total_steps: int = 0
    last: Sample = field(default_factory=Sample)
    waiting: tuple[str, float, tuple[int, ...]] | None = None  # operation, since when, for which ranks (empty: all)


class Event(NamedTuple):
    """A mark in time. Kinds: world, resumed, lost, failed, commit, nan, drift, stall, note, end."""

    number: int
    at: float
    kind: str
    rank: int
    text: str


class Line(NamedTuple):
    """A line of a rank's output; rank -1 is the launcher."""

    number: int
    at: float
    rank: int
    stream: str
    text: str


@dataclass
class Loss:
    """A rank that was lost or failed, and for how long the others could not train because of it, if they went on."""

    at: float
    rank: int
    host: str
    why: str
    cost_s: float | None = None


class Memory:
    """Resident memory of a worker over time: some points, evenly spread over its life."""

    _MAX_POINTS = 128

    def __init__(self) -> None:
        self.points: list[tuple[float, float]] = []
        self._every = 1
        self._skipped = 0

    def add(self, at: float, num_bytes: float) -> None:
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self.points.append((at, num_bytes))
        if len(self.points) >= self._MAX_POINTS:
            self.points, self._every = self.points[::2], 2 * self._every


class Pending(NamedTuple):
    """A collective that waits for some ranks."""

    name: str
    there: tuple[int, ...]
    missing: tuple[int, ...]
    waited_s: float


class Run:
    """One job. `facts`: id, title, command, began (epoch seconds, else ValueError), elastic, launcher."""

    def __init__(self, facts: Mapping[str, Any]) -> None:
        self.facts = {str(key): one for key, one in facts.items() if one is None or isinstance(one, (str, int, float))}
        try:
            self.began = _time(facts.get("began", 0.0))
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"a job's start must be in seconds since 1970, but it is {facts['began']!r:.100}"
            ) from None
        self.now = self.began
        self.grid = Grid(self.began)
        self.generation = -1
        self.places: dict[int, RankState] = {}  # by rank, of the current generation
        self.hosts: dict[str, dict[str, Any]] = {}
        self.worlds: deque[tuple[float, int, int]] = deque(maxlen=MAX_EVENTS)  # when, generation, size
        self.events: deque[Event] = deque(maxlen=MAX_EVENTS)
        self.lines: deque[Line] = deque(maxlen=MAX_LINES)
        self.stacks: dict[int, dict[str, Any]] = {}  # by rank: when, text, why
        self.profiles: dict[int, dict[str, Any]] = {}
        self.stragglers: list[Straggler] = []
        self.episodes: deque[Episode] = deque(maxlen=_MAX_EPISODES)
        self._latest_episodes: dict[int, Episode] = {}  # of each rank of this world
        self.losses: deque[Loss] = deque(maxlen=_MAX_LOSSES)
        self.memory: dict[int, Memory] = {}  # by worker, of the present world
        self.drifts: deque[Event] = deque(maxlen=_MAX_DRIFTS)  # ranks that no longer train the same model
        self.outcome: str | None = None  # done, failed, stopped
        self.outcome_text = ""
        self.stepped = False  # a rank has completed a step in this generation
        self.num_lines = 0
        self.num_events = 0
        self._by_worker: dict[int, RankState] = {}
        self._recent: dict[int, deque[Timed]] = {}
        self._noted_stall = ""

    # ---- what happens -------------------------------------------------------------------------------------

    def apply(self, entry: Entry) -> None:
        """Apply an entry. Raises ValueError for an invalid one."""
        self.now = max(self.now, _time(entry.at))
        if entry.kind not in KINDS:
            raise ValueError(f"unknown entry {entry.kind!r}")
        try:
            getattr(self, f"_{entry.kind}")(entry, self._by_worker.get(entry.worker))
        except (KeyError, TypeError, IndexError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"a damaged entry {entry.kind!r}: {error!r}") from None

    def _world(self, entry: Entry, place: RankState | None) -> None:
        """{"generation": g, "places": [[worker, rank, host], …]}"""
        news = json.loads(entry.data)
        generation, former = int(news["generation"]), self._by_worker
        if not 0 <= generation < _MAX_GENERATION:
            raise ValueError("invalid generation number")
        states = [RankState(int(rank), int(worker), str(host)[:200]) for worker, rank, host in news["places"]]
        self.generation, self.places, self._by_worker = generation, {}, {}
        for state in states:
            if not 0 <= state.rank < MAX_RANKS:
                continue
            if state.worker in former and former[state.worker].state == "here":
                state.state = "here"
            self.places[state.rank] = self._by_worker[state.worker] = state
        self.memory = {worker: self.memory.get(worker, Memory()) for worker in self._by_worker}
        self.worlds.append((entry.at, self.generation, len(self.places)))
        self.stepped = False
        self._recent.clear()
        self._close_episodes(entry.at)
        if self.generation > 0:
            self.note(entry.at, "world", -1, f"generation {self.generation}: {len(self.places)} ranks")

    def _report(self, entry: Entry, place: RankState | None) -> None:
        if place is None:
            return
        report = parse_report(entry.data)
        place.last = report.sample
        if place.state == "starting":
            place.state = "here"
        place.total_steps = report.total_steps or place.total_steps
        place.waiting = None
        if report.waiting is not None:
            name, waited_s, ranks = report.waiting
            place.waiting = name, entry.at - waited_s, ranks
        if report.sample.num_steps:
            self.stepped = True
            recent = self._recent.setdefault(place.rank, deque(maxlen=_MAX_RECENT))
            recent.append((entry.at, report.sample))
            while recent[0][0] < entry.at - _RECENT_S:
                recent.popleft()
            self.grid.add(place.rank, entry.at, report.sample)
        if report.sample.memory_bytes:
            self.memory.setdefault(entry.worker, Memory()).add(entry.at, report.sample.memory_bytes)
        for name, value in report.metrics.items():
            if name in self.grid.metrics or len(self.grid.metrics) < _MAX_METRICS:
                self.grid.add_metric(name, entry.at, value)
        for kind, text in report.events:
            self.note(entry.at, kind, place.rank, text)
            if kind == "resumed":
                self._resumed(text)
        if report.host:
            self.hosts[place.host] = {**report.host, "at": entry.at}

    def _resumed(self, text: str) -> None:
        """Note what the latest losses have cost: those since the training last went on, together."""
        cost_s = interruption_s(text)
        for loss in reversed(self.losses):
            if loss.cost_s is not None:
                return
            loss.cost_s, cost_s = cost_s, 0.0

    def _joined(self, entry: Entry, place: RankState | None) -> None:
        if place is not None and place.state == "starting":
            place.state = "here"

    def _exited(self, entry: Entry, place: RankState | None) -> None:
        """{"code": c, "reason": text}"""
        news = json.loads(entry.data)
        if place is None or place.state in ("done", "lost", "failed"):
            return
        code, reason = int(news["code"]), str(news.get("reason", ""))
        place.waiting = None
        if code == 0:
            place.state = "done"
            return
        place.state, place.why = "lost", reason or f"exit code {code}"
        self.losses.append(Loss(entry.at, place.rank, place.host, place.why))
        self.note(entry.at, "lost", place.rank, f"rank {place.rank} on {place.host} is lost: {place.why}")

    def _failed(self, entry: Entry, place: RankState | None) -> None:
        """{"headline": text}: the function raised on this worker."""
        news = json.loads(entry.data)
        if place is not None and place.state not in ("lost", "failed"):
            place.state, place.why = "failed", str(news["headline"])[:500]
            self.losses.append(Loss(entry.at, place.rank, place.host, place.why))
            self.note(entry.at, "failed", place.rank, f"rank {place.rank} on {place.host}: {place.why}")

    def _line(self, entry: Entry, place: RankState | None) -> None:
        """A line of output: the stream's first letter, then the text."""
        text = entry.data[1:].decode(errors="replace")
        if len(text) > MAX_LINE_CHARS:
            text = text[:MAX_LINE_CHARS] + " …"
        stream = "stderr" if entry.data[:1] == b"e" else "stdout"
        self.num_lines += 1
        rank = place.rank if place is not None else entry.worker
        self.lines.append(Line(self.num_lines, entry.at, rank, stream, text))

    def _event(self, entry: Entry, place: RankState | None) -> None:
        """{"kind": k, "text": t}"""
        news = json.loads(entry.data)
        self.note(entry.at, str(news["kind"]), place.rank if place else -1, str(news["text"]))

    def _stack(self, entry: Entry, place: RankState | None) -> None:
        """{"threads": [[name, frames], …]}: the rank's current stacks, the training thread first."""
        if place is not None:
            threads = [[name, _lists(frames)] for name, frames in parse_stacks(entry.data).threads]
            self.stacks[place.rank] = {"at": entry.at, "threads": threads}

    def _profile(self, entry: Entry, place: RankState | None) -> None:
        """{"num_samples": n, "seconds": s, "stacks": [[count, frames], …]}: samples of the rank's training thread."""
        if place is not None:
            found = parse_profile(entry.data)
            self.profiles[place.rank] = {
                "at": entry.at,
                "num_samples": found.num_samples,
                "seconds": found.seconds,
                "stacks": [[count, _lists(frames)] for count, frames in found.stacks],
            }
            self._find_lines(entry.at)

    def _end(self, entry: Entry, place: RankState | None) -> None:
        """{"outcome": done | failed | stopped, "text": t}"""
        news = json.loads(entry.data)
        self.outcome, self.outcome_text = str(news["outcome"]), str(news.get("text", ""))[:4000]
        for place in self.places.values():
            place.waiting = None
        self._close_episodes(entry.at)
        self.note(entry.at, "end", -1, self.outcome)

    def note(self, at: float, kind: str, rank: int, text: str) -> None:
        self.num_events += 1
        event = Event(self.num_events, at, kind[:40], rank, text[:1000])
        self.events.append(event)
        if kind == "drift":
            self.drifts.append(event)

    # ---- what it means ------------------------------------------------------------------------------------

    def look(self, now: float) -> None:
        """Update the findings for the current time: late ranks, and the operation that the job waits in."""
        self.now = max(self.now, now)
        if self.outcome is None:
            if self.grid.num_used:
                self.grid.index(self.now)  # time passes even if no step ends
            named = {straggler.rank: straggler.since for straggler in self.stragglers}
            self.stragglers = find_stragglers(self._recent, self.now, named=named)
            self._judge()
            self._note_stall()

    def _judge(self) -> None:
        """Begin, update and end the episodes."""
        for straggler in self.stragglers:
            episode = self._latest_episodes.get(straggler.rank)
            if episode is not None and (episode.until is None or self.now - episode.until < _SAME_EPISODE_S):
                episode.update(straggler)
                continue
            others = [rank for rank in self._recent if rank != straggler.rank]
            than = f"rank {others[0]}" if len(others) == 1 else "the median"
            place = self.places.get(straggler.rank)
            episode = Episode(straggler, place.host if place is not None else "?", than)
            self.episodes.append(episode)
            self._latest_episodes[straggler.rank] = episode
            self._find_lines(self.now)
            self.note(self.now, "stall", straggler.rank, episode.sentence())
        for rank in self._latest_episodes.keys() - {straggler.rank for straggler in self.stragglers}:
            self._latest_episodes[rank].close(self.now)

    def _close_episodes(self, at: float) -> None:
        """End all episodes: their ranks no longer exist under these numbers."""
        for episode in self._latest_episodes.values():
            episode.close(at)
        self._latest_episodes.clear()
        self.stragglers = []

    def _find_lines(self, at: float) -> None:
        """Find the lines of the current episodes in recent profiles: one may arrive before its episode, or after it."""
        current = [v for v in self.episodes if v.until is None or at - v.until < _LATE_PROFILE_S]
        slow = {episode.rank for episode in current}
        profiles = {rank: profile for rank, profile in self.profiles.items() if at - profile["at"] < _LATE_PROFILE_S}
        for episode in current:
            episode.line = find_line(profiles, episode.rank, slow) or episode.line

    def _note_stall(self) -> None:
        stuck = self.stuck()
        name = stuck.name if stuck is not None else ""
        if stuck is not None and name != self._noted_stall:
            self.note(self.now, "stall", stuck.missing[0], f"waiting for {_ranks(stuck.missing)} in {name}")
        self._noted_stall = name

    def recent(self, window_s: float) -> dict[int, list[Sample]]:
        """Return the samples of the last seconds that have any, by rank."""
        latest = max((samples[-1][0] for samples in self._recent.values() if samples), default=self.now)
        return {
            rank: [sample for at, sample in samples if at > latest - window_s] for rank, samples in self._recent.items()
        }

    def pending(self) -> list[Pending]:
        """Return collectives in which some ranks wait and others are missing, the oldest first."""
        waiting: dict[str, list[RankState]] = {}
        for place in self.places.values():
            if place.waiting is not None and place.state == "here":
                waiting.setdefault(place.waiting[0], []).append(place)
        found = []
        for name, places in waiting.items():
            since = min(place.waiting[1] for place in places if place.waiting)
            wanted = set().union(*(place.waiting[2] for place in places if place.waiting)) or set(self.places)
            there = {place.rank for place in places}
            alive = {rank for rank, place in self.places.items() if place.state in ("here", "starting")}
            if self.now - since >= _LONG_WAIT_S:
                missing = tuple(sorted((wanted & alive) - there))
                found.append(Pending(name, tuple(sorted(there)), missing, self.now - since))
        return sorted(found, key=lambda operation: -operation.waited_s)

    def usual_step_s(self) -> float:
        """Return the duration of a step, from the last minute."""
        samples = [sample for many in self.recent(60.0).values() for sample in many]
        steps = sum(sample.num_steps for sample in samples)
        return sum(sample.step_s for sample in samples) / steps if steps else 0.0

    def stuck(self) -> Pending | None:
        """Return the operation that blocks the job, if any."""
        limit_s = max(STUCK_S, 3 * self.usual_step_s())
        return next((op for op in self.pending() if op.missing and op.waited_s > limit_s), None)

    def state(self) -> tuple[str, str]:
        """Return (kind, description)."""
        if self.outcome is not None:
            return self.outcome, {"done": "done", "stopped": "stopped"}.get(self.outcome, "failed")
        here = sum(place.state in ("here", "done") for place in self.places.values())
        lost = [place.rank for place in self.places.values() if place.state in ("lost", "failed")]
        if lost:
            kind = "re-forming" if self.facts.get("elastic") else "failing"
            return kind, f"{kind}: {_ranks(lost)} {'is' if len(lost) == 1 else 'are'} lost"
        if not self.stepped and here < len(self.places):
            word = "re-forming" if self.generation > 0 else "starting"
            return word, f"{word}: {here} of {len(self.places)} ranks are here"
        stuck = self.stuck()
        if stuck is not None:
            return "waiting", f"waiting for {_ranks(stuck.missing)}"
        if not self.stepped:
            return ("re-forming", "re-forming: the ranks meet") if self.generation > 0 else ("starting", "starting")
        return "training", "training"

    def progress(self) -> tuple[int, int]:
        """Return (steps done, total steps; 0 if unknown)."""
        step = max((place.last.step for place in self.places.values()), default=0)
        return step, max((place.total_steps for place in self.places.values()), default=0)

    def latest_metrics(self) -> dict[str, float]:
        """Return the training's latest metrics, by name."""
        bins = range(self.grid.num_used - 1, -1, -1)
        found = {
            name: next((v for i in bins if (v := self.grid.metric(name, i)) is not None), None)
            for name in self.grid.metrics
        }
        return {name: value for name, value in found.items() if value is not None}

    def time_left_s(self) -> float | None:
        step, total = self.progress()
        step_s = self.usual_step_s()
        return max(total - step, 0) * step_s if total and step_s and self.outcome is None else None


def _time(seconds: float) -> float:
    """Return the time. Raises ValueError for an invalid one."""
    if not 0.0 <= float(seconds) <= _LAST_TIME:  # also rejects NaN
        raise ValueError("an entry without a valid time")
    return float(seconds)


def _lists(frames: Stack) -> list[list[Any]]:
    """Return frames as the page's JSON holds them."""
    return [list(frame) for frame in frames]


def _ranks(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (" …" if len(ranks) > 8 else "")
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}"
