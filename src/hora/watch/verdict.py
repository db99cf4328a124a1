"""The verdict of a run: where its time went, which rank was slow and why, what was lost, and what to try first.

Pure: made from a `Run`, live or recorded, by the rules of the live page (`lateness`, `model`). As text it has a few
lines for a terminal; as JSON it has the figures, which `compare` reads.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from hora.logs import printable
from hora.telemetry import PARTS, Sample
from hora.watch import view
from hora.watch.lateness import Episode, added, slow_on_average
from hora.watch.model import Loss, Memory, Run

FORMAT = "hora-verdict 1"
PHASES = {
    "data": "waiting for data",
    "forward": "forward and the script",
    "backward": "backward",
    "between": "between backward and step",
    "wait": "waiting for other ranks",
    "reduce": "reduction not hidden",
    "optimizer": "optimizer",
    "checkpoint": "checkpoints",
}
_MAX_BYTES = 16 * 2**20
_MAX_SHOWN = 3
_MIN_SHARE = 0.01
# Memory grows if it does so in every third of the time after the start, by this much in all.
_MIN_POINTS = 12
_MIN_GROWTH_BYTES, _MIN_GROWTH = 32e6, 0.03
# A phase that takes this share of a step, of all ranks, is worth a word.
_MUCH = {"checkpoint": 0.05, "data": 0.10, "wait": 0.10, "reduce": 0.15, "between": 0.15}


@dataclass(frozen=True)
class Spread:
    """Milliseconds of a step: the mean, and the middle 80 % of the run's seconds."""

    mean: float
    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float], mean: float) -> Spread:
        ordered = sorted(values)
        last = len(ordered) - 1
        low, high = ordered[round(0.1 * last)], ordered[round(0.9 * last)]
        return cls(*(float(f"{1e3 * value:.5g}") for value in (mean, low, statistics.median(ordered), high)))


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """`num_windows`: how many periods, of a second or more, the spreads are of. `slow`: as the page describes it."""

    title: str = ""
    command: str = ""
    outcome: str = ""
    why: str = ""
    began: float = 0.0
    seconds: float = 0.0
    num_ranks: int = 0
    num_hosts: int = 0
    num_steps: int = 0
    num_windows: int = 0
    step: Spread | None = None
    phases: Mapping[str, Spread]
    samples_per_s: float = 0.0
    bytes_per_step: float = 0.0
    slow: Sequence[Mapping[str, Any]] = ()
    losses: Sequence[Mapping[str, Any]] = ()
    memory: Sequence[Mapping[str, Any]] = ()
    drifts: Sequence[str] = ()
    metrics: Mapping[str, float | None]
    advice: str = ""

    def to_json(self) -> str:
        return view.as_json({"format": FORMAT, **asdict(self), "text": self.text()}) + "\n"

    def text(self, width: int = 100) -> str:
        """Return the verdict in lines of at most `width` characters, where words allow."""
        first, *rest = map(printable, self._lines())
        wrapped = [textwrap.fill(first, width, subsequent_indent="  ", break_long_words=False)]
        for line in rest:
            wrapped.append(
                textwrap.fill(line, width, initial_indent="  ", subsequent_indent="    ", break_long_words=False)
            )
        return "\n".join(wrapped)

    def _lines(self) -> Iterator[str]:
        size = f"{self.num_ranks} ranks" if self.num_ranks != 1 else "1 rank"
        hosts = f" on {self.num_hosts} hosts" if self.num_hosts > 1 else ""
        yield f"{self.title}: {self.outcome} after {_duration(self.seconds)}, {size}{hosts}{self._pace()}"
        if self.phases and self.step is not None:
            shares = (
                (name, spread.mean, spread.mean / (self.step.mean or 1.0)) for name, spread in self.phases.items()
            )
            shown = [f"{PHASES[name]} {_ms(mean)} ({share:.0%})" for name, mean, share in shares if share >= _MIN_SHARE]
            yield "a step: " + ", ".join(shown)
        else:
            yield "no step of an optimizer was measured"
        for episode in self.slow[:_MAX_SHOWN]:
            yield from _slow_lines(episode)
        for loss in self.losses[-_MAX_SHOWN:]:
            yield _loss_line(loss)
        for grown in self.memory[:_MAX_SHOWN]:
            yield (
                f"memory: rank {grown['rank']} grows by {_bytes(grown['bytes_per_min'])} a minute, from "
                f"{_bytes(grown['first'])} to {_bytes(grown['last'])}"
            )
        yield from (f"drift: {text}" for text in self.drifts[-1:])
        yield f"try first: {self.advice}"

    def _pace(self) -> str:
        if self.step is None:
            return ""
        rate = f", {self.samples_per_s:,.0f} samples/s" if self.samples_per_s else ""
        return f"; {self.num_steps:,} steps of {_ms(self.step.mean)}{rate}"


def make_verdict(run: Run) -> Verdict:
    """Return the verdict of a run, which may still go on."""
    column, windows = _steady(run)
    steps = [cell.step_s / cell.num_steps for cell in column.values()]
    phases: dict[str, Spread] = {}
    if column:
        means = _mean_parts(column)
        by_window = [_mean_parts(window) for window in windows]
        phases = {part: Spread.of([w[i] for w in by_window], means[i]) for i, part in enumerate(PARTS)}
    slow = _episodes(run, column)
    memory = sorted(filter(None, (_growth(run, worker, one) for worker, one in run.memory.items())), key=_growth_rank)
    return Verdict(
        title=str(run.facts.get("title", "")),
        command=str(run.facts.get("command", "")),
        outcome=run.outcome or run.state()[1],
        why=run.outcome_text,
        began=run.began,
        seconds=round(run.now - run.began, 1),
        num_ranks=len(run.places),
        num_hosts=len({place.host for place in run.places.values()}),
        num_steps=run.progress()[0],
        num_windows=len(windows),
        step=Spread.of([_mean_step(window) for window in windows], statistics.fmean(steps)) if steps else None,
        phases=phases,
        samples_per_s=round(sum(cell.num_samples / cell.step_s for cell in column.values() if cell.step_s > 0), 2),
        bytes_per_step=round(max((cell.num_bytes / cell.num_steps for cell in column.values()), default=0.0)),
        slow=[view.describe_episode(one) for one in slow],
        losses=[_describe_loss(one) for one in run.losses],
        memory=memory,
        drifts=[one.text for one in run.drifts],
        metrics=run.latest_metrics(),
        advice=_advice(run, slow, phases, memory),
    )


def _steady(run: Run) -> tuple[dict[int, Sample], list[dict[int, Sample]]]:
    """Return the ranks' sums, and their samples of each window, without the window of the first steps if others remain.

    First steps include whatever a program does before it trains.
    """
    windows = [column for index in range(run.grid.num_used) if (column := run.grid.column(index))]
    if len(windows) > 2:
        windows = windows[1:]
    by_rank: dict[int, list[Sample]] = {}
    for window in windows:
        for rank, cell in window.items():
            by_rank.setdefault(rank, []).append(cell)
    return {rank: added(cells) for rank, cells in by_rank.items()}, windows


def _mean_step(column: Mapping[int, Sample]) -> float:
    return statistics.fmean(cell.step_s / cell.num_steps for cell in column.values())


def _mean_parts(column: Mapping[int, Sample]) -> list[float]:
    """Return the seconds of each part of a step, averaged over the ranks."""
    rows = [[value / cell.num_steps for value in cell.parts_s] for cell in column.values()]
    return [statistics.fmean(values) for values in zip(*rows, strict=True)]


def _episodes(run: Run, column: Mapping[int, Sample]) -> list[Episode]:
    """Return the episodes in which ranks were slow, the costliest of each rank; or who was slow on average."""
    worst: dict[int, Episode] = {}
    for episode in sorted(run.episodes, key=lambda one: view.cost_s(one, run.now), reverse=True):
        worst.setdefault(episode.rank, episode)
    if worst:
        return list(worst.values())
    found = []
    for straggler in slow_on_average(column):
        others = [rank for rank in column if rank != straggler.rank]
        than = (f"rank {others[0]}" if len(others) == 1 else "the median") + " on average"
        place = run.places.get(straggler.rank)
        host = place.host if place is not None else "?"
        found.append(Episode(replace(straggler, since=math.nan), host, than, run.now))
    return found


def _growth(run: Run, worker: int, memory: Memory) -> dict[str, Any] | None:
    """Return how much a worker's memory has grown after its start; None if it has not, or not all the time."""
    points = memory.points[len(memory.points) // 4 :]
    rank = next((rank for rank, place in run.places.items() if place.worker == worker), None)
    if len(memory.points) < _MIN_POINTS or rank is None:
        return None
    third = len(points) // 3
    thirds = (points[:third], points[third : 2 * third], points[-third:])
    first, middle, last = (statistics.median(size for _, size in part) for part in thirds)
    passed_s = statistics.median(at for at, _ in thirds[2]) - statistics.median(at for at, _ in thirds[0])
    grown = last - first
    if grown < max(_MIN_GROWTH_BYTES, _MIN_GROWTH * first) or min(middle - first, last - middle) < 0.2 * grown:
        return None
    return {
        "rank": rank,
        "first": round(points[0][1]),
        "last": round(points[-1][1]),
        "bytes_per_min": round(60 * grown / max(passed_s, 1.0)),
    }


def _growth_rank(grown: Mapping[str, Any]) -> float:
    return -float(grown["bytes_per_min"])


def _describe_loss(loss: Loss) -> dict[str, Any]:
    return {**asdict(loss), "at": round(loss.at, 2)}


def _advice(
    run: Run, slow: Sequence[Episode], phases: Mapping[str, Spread], memory: Sequence[Mapping[str, Any]]
) -> str:
    """Return what to try first: about the end of the job, then a slow rank, then what all ranks have in common."""
    if run.outcome == "failed" and run.losses:
        first = run.losses[0]
        return f"find why rank {first.rank} on {first.host} ended: {first.why}"
    if run.drifts:
        return "make the ranks train the same model again; until then all other figures are of no use"
    if slow:
        return slow[0].advice
    if memory:
        return (
            f"find what rank {memory[0]['rank']} keeps: a list of losses with their graphs, or a cache without a limit"
        )
    total = sum(spread.mean for spread in phases.values()) or 1.0
    share = {part: spread.mean / total for part, spread in phases.items()}
    words = {
        "checkpoint": "write checkpoints less often, or in the background",
        "data": "more workers for the data loader (num_workers): all ranks wait for their data",
        "wait": "batches of equal length on all ranks, or fewer pauses (garbage collection): a different rank is late "
        "each time",
        "reduce": "compress gradients (compression=hvd.Compression.fp16) or make batches larger; `hora plan` compares",
        "between": "do less between backward() and step()",
    }
    much = {part: share[part] / limit for part, limit in _MUCH.items() if share.get(part, 0.0) >= limit}
    if much:
        part = max(much, key=lambda one: share[one])
        return f"{words[part]} ({share[part]:.0%} of a step)"
    if not phases:
        return "train with an optimizer of Hora, to see where a step goes"
    return "nothing stands out: the ranks compute, and wait little"


def _slow_lines(episode: Mapping[str, Any]) -> Iterator[str]:
    cause = f", {episode['cause']}" if episode["cause"] else ""
    since = "" if episode["since"] is None else f" since {_clock(episode['since'])}"
    if since and episode["until"] is not None:
        since = f" from {_clock(episode['since'])} to {_clock(episode['until'])}"
    yield f"slow: {episode['claim']}{since}{cause}; others waited for it in {episode['late']} % of a step"
    line = episode.get("line")
    if line is not None:
        file, number, function, code = line["own"][:4]
        other = "" if line["other"] is None else f", rank {line['other']} in {line['usual']:.0%}"
        where = f"{os.path.basename(str(file))}:{number} in {function}" + (f": {code}" if code else "")
        yield f"      {where} (in {line['share']:.0%} of its time{other})"


def _loss_line(loss: Mapping[str, Any]) -> str:
    cost = "" if loss["cost_s"] is None else f"; this cost the others {loss['cost_s']:.1f} s"
    return f"lost: rank {loss['rank']} on {loss['host']} at {_clock(loss['at'])}, {loss['why']}{cost}"


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _ms(value: float) -> str:
    return f"{value:.3g} ms" if value < 1000 else f"{value / 1000:.3g} s"


def _bytes(value: float) -> str:
    return f"{value / 1e6:.0f} MB" if value < 1e9 else f"{value / 1e9:.2f} GB"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# ---- verdicts in files ------------------------------------------------------------------------------------------


def read_verdict(path: str | Path) -> Verdict:
    """Return the verdict in a file of `to_json`. Raises ValueError if the file is none, or of another version."""
    with open(path, "rb") as file:
        data = file.read(_MAX_BYTES + 1)
    try:
        found = json.loads(data) if len(data) <= _MAX_BYTES else {}
        kind = found.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        found, kind = {}, None
    if not isinstance(kind, str) or not kind.startswith("hora-verdict "):
        raise ValueError(f"{path} is neither a recorded run nor a verdict")
    if kind != FORMAT:
        raise ValueError(f"{path} was written by another version of Hora ({kind!r:.40}; this one reads {FORMAT!r})")
    known = {field.name for field in fields(Verdict)}
    try:
        given = {name: value for name, value in found.items() if name in known}
        phases = {part: _spread(given["phases"][part]) for part in PARTS} if given["phases"] else {}
        step = None if given["step"] is None else _spread(given["step"])
        counts = {name: _count(given[name]) for name in ("num_ranks", "num_steps", "num_windows", "bytes_per_step")}
        return Verdict(**(given | counts | {"phases": phases, "step": step, "title": str(given["title"])[:200]}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"{path} is a damaged verdict: {error!r:.200}") from None


def _spread(value: Mapping[str, Any]) -> Spread:
    found = {field.name: float(value[field.name]) for field in fields(Spread)}
    if not all(math.isfinite(one) and one >= 0 for one in found.values()):
        raise ValueError(f"not a duration: {value!r:.100}")
    return Spread(**found)


def _count(value: Any) -> int:
    if not isinstance(value, (int, float)) or not 0 <= value < 2**62:
        raise ValueError(f"not a count: {value!r:.50}")
    return int(value)
