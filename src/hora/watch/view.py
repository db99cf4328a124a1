"""Views of a run: JSON for the page, the full state once and then changes, and `/metrics` for Prometheus.

`head` is the current state (small, resent when it changes), `columns` are bins of the grid, lines and events only grow.
Nothing here is or becomes HTML: the page inserts all text as text.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hora.telemetry import PARTS, Sample
from hora.watch.lateness import Episode, added, lateness
from hora.watch.model import Event, Line, RankState, Run

_RECENT_S = 15.0
_FIRST_LINES = 1500
_MAX_PAST = 3


def as_json(value: Any) -> str:
    """Encode as JSON that browsers accept: NaN and infinities become null."""
    try:
        return json.dumps(value, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def everything(run: Run) -> dict[str, Any]:
    return {
        "facts": {**run.facts, "generation": run.generation},
        "head": head(run),
        "columns": columns(run, 0),
        "events": later(run.events, 0),
        "lines": later(run.lines, max(run.num_lines - _FIRST_LINES, 0)),
        "stacks": stacks(run),
    }


def head(run: Run) -> dict[str, Any]:
    kind, words = run.state()
    step, total = run.progress()
    recent = {rank: added(samples) for rank, samples in run.recent(_RECENT_S).items()}
    recent = {rank: sample for rank, sample in recent.items() if sample.num_steps}
    step_s = statistics.median(s.step_s / s.num_steps for s in recent.values()) if recent else 0.0
    slow = [episode for episode in run.episodes if episode.until is None]
    over = [episode for episode in run.episodes if episode.until is not None]
    return {
        "now": run.now,
        "state": kind,
        "words": words,
        "why": run.outcome_text,
        "step": step,
        "total": total,
        "left_s": _rounded(run.time_left_s()),
        "step_ms": _rounded(step_s * 1e3),
        "samples_per_s": _rounded(sum(s.num_samples / s.step_s for s in recent.values() if s.step_s > 0)),
        "bytes_per_s": _rounded(_bandwidth(recent)),
        "hidden": _rounded(_hidden(recent)),
        "size": len(run.places),
        "worlds": list(run.worlds),
        "ranks": [_rank(place, recent.get(rank)) for rank, place in sorted(run.places.items())],
        "stragglers": [describe_episode(one) for one in sorted(slow, key=lambda one: -one.finding.slowdown)],
        "past": [
            describe_episode(one)
            for one in sorted(over, key=lambda one: cost_s(one, run.now), reverse=True)[:_MAX_PAST]
        ],
        "drifts": [{"at": round(one.at), "text": one.text} for one in run.drifts],
        "pending": [op._replace(waited_s=round(op.waited_s, 1))._asdict() for op in run.pending()],
        "hosts": {name: _host(run, name, step_s) for name in sorted({place.host for place in run.places.values()})},
    }


def columns(run: Run, first: int) -> dict[str, Any]:
    """Return the bins from `first` on: `step` (ms) and `late` (%) by rank, and `parts`: mean milliseconds."""
    grid = run.grid
    ranks = grid.ranks
    result: dict[str, Any] = {
        "epoch": grid.epoch,
        "began": grid.began,
        "bin_s": grid.bin_s,
        "first": first,
        "ranks": ranks,
        "step": [[] for _ in ranks],
        "late": [[] for _ in ranks],
        "parts": [[] for _ in PARTS],
        "rate": [],
        "metrics": {name: [] for name in grid.metrics},
    }
    for index in range(first, grid.num_used):
        column = grid.column(index)
        late = lateness(column)
        for row, rank in enumerate(ranks):
            cell = column.get(rank)
            own_s = None if cell is None else (cell.step_s - cell.wait_s) / cell.num_steps  # without waiting for others
            result["step"][row].append(None if own_s is None else _rounded(1e3 * own_s))
            result["late"][row].append(None if cell is None else round(100 * late.get(rank, 0.0), 1))
        for row, value in enumerate(_mean_parts_ms(column)):
            result["parts"][row].append(_rounded(value))
        result["rate"].append(_rounded(sum(cell.num_samples for cell in column.values()) / grid.bin_s))
        for name, values in result["metrics"].items():
            values.append(_rounded(grid.metric(name, index), 5))
    return result


def later(items: Iterable[Event | Line], number: int) -> list[Any]:
    """Return the items after the one with this number."""
    return [list(one) for one in items if one.number > number]


def stacks(run: Run) -> dict[str, Any]:
    return {"stacks": run.stacks, "profiles": run.profiles}


def cost_s(episode: Episode, now: float) -> float:
    """Return the time that others have waited for a rank."""
    until = now if episode.until is None else episode.until
    return episode.finding.lateness * (until - episode.finding.since)


def describe_episode(episode: Episode) -> dict[str, Any]:
    straggler, line = episode.finding, episode.line
    facts: dict[str, Any] = {
        "rank": episode.rank,
        "host": episode.host,
        "slowdown": round(straggler.slowdown, 2),
        "than": episode.than,
        "late": round(100 * straggler.lateness),
        "since": None if math.isnan(straggler.since) else round(straggler.since),
        "until": None if episode.until is None else round(episode.until),
        "excess": {part: round(share, 2) for part, share in straggler.excess.items()},
        "part": straggler.main_part,
        "claim": episode.claim,
        "cause": episode.cause,
        "advice": episode.advice,
    }
    if line is not None:
        facts["line"] = {
            "frames": line.frames,
            "own": line.own,
            "share": round(line.share, 2),
            "usual": round(line.usual, 2),
            "other": line.other,
        }
    return facts


def _rank(place: RankState, recent: Sample | None) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "rank": place.rank,
        "host": place.host,
        "state": place.state,
        "why": place.why,
        "cpu": _rounded(place.last.cpu_s / place.last.window_s if place.last.window_s else 0.0),
        "memory": round(place.last.memory_bytes),
    }
    if recent is not None:
        facts["parts"] = [_rounded(1e3 * value / recent.num_steps) for value in recent.parts_s]
        facts["longest_ms"] = _rounded(1e3 * recent.longest_s)
    return facts


def _host(run: Run, name: str, step_s: float) -> dict[str, Any]:
    """Return a host's facts; `net_step` is the bytes that it sends per step."""
    facts = {**run.hosts.get(name, {}), "ranks": sorted(p.rank for p in run.places.values() if p.host == name)}
    if step_s and "net_out" in facts:
        facts["net_step"] = round(facts["net_out"] * step_s)
    return facts


def _mean_parts_ms(column: Mapping[int, Sample]) -> list[float | None]:
    """Return the time of each part of a step, averaged over the ranks."""
    if not column:
        return [None] * len(PARTS)
    parts_ms = ([1e3 * value / cell.num_steps for value in cell.parts_s] for cell in column.values())
    return [sum(values) / len(column) for values in zip(*parts_ms, strict=True)]


def _bandwidth(recent: Mapping[int, Sample]) -> float:
    """Return the bytes that a rank reduces per second of moving data."""
    moved = [(s.num_bytes, s.reduce_s + s.hidden_s) for s in recent.values()]
    return statistics.fmean(n / s for n, s in moved if s > 0) if any(s > 0 for _, s in moved) else 0.0


def _hidden(recent: Mapping[int, Sample]) -> float:
    """Return the share of the reduction that overlaps with backward."""
    hidden = sum(s.hidden_s for s in recent.values())
    total = hidden + sum(s.reduce_s for s in recent.values())
    return hidden / total if total > 0 else 0.0


def _rounded(value: float | None, digits: int = 4) -> float | None:
    """Round to few digits, because values are sent and stored often; NaN becomes null."""
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.{digits}g}")


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("starting", "training", "waiting", "re-forming", "failing", "done", "failed", "stopped")

Labels = Mapping[str, str]


def metrics(run: Run) -> str:
    """Return the run in Prometheus's text format, formatted here because it is a dozen gauges."""
    now = head(run)
    job = {"job_id": str(run.facts.get("id", ""))}
    latest = run.grid.column(run.grid.num_used - 1) if run.grid.num_used else {}
    late = lateness(latest)
    ranks = [({**job, "rank": str(r["rank"]), "host": r["host"]}, r) for r in now["ranks"]]
    parts = [
        ({**labels, "part": part}, value / 1e3)
        for labels, facts in ranks
        for part, value in zip(PARTS, facts.get("parts", ()), strict=False)
    ]
    late_ranks = [(labels, late[facts["rank"]]) for labels, facts in ranks if facts["rank"] in late]
    slowdowns = [({**job, "rank": str(s["rank"]), "part": s["part"]}, s["slowdown"]) for s in now["stragglers"]]
    reported = [({**job, "name": name}, value) for name, value in run.latest_metrics().items()]
    states = [({**job, "state": state}, state == now["state"]) for state in _STATES]
    families: list[tuple[str, str, Sequence[tuple[Labels, float | None]]]] = [
        ("hora_world_size", "ranks of the current world", [(job, now["size"])]),
        ("hora_generation", "how often the world was formed anew", [(job, max(run.generation, 0))]),
        ("hora_state", "1 for the state the job is in", states),
        ("hora_steps_total", "steps done", [(job, now["step"])]),
        ("hora_step_seconds", "duration of a step, median of the ranks", [(job, (now["step_ms"] or 0) / 1e3)]),
        ("hora_samples_per_second", "samples trained on, all ranks together", [(job, now["samples_per_s"])]),
        ("hora_reduction_bytes_per_second", "bytes a rank reduces per second of it", [(job, now["bytes_per_s"])]),
        ("hora_reduction_hidden_ratio", "share of the reduction behind backward", [(job, now["hidden"])]),
        ("hora_rank_up", "1 for a rank that takes part", [(labels, f["state"] == "here") for labels, f in ranks]),
        ("hora_rank_part_seconds", "where a step of this rank goes", parts),
        ("hora_rank_lateness_ratio", "share of a step for which others wait for this rank", late_ranks),
        ("hora_straggler_slowdown_ratio", "work of a straggler over the median of the others", slowdowns),
        ("hora_rank_memory_bytes", "resident memory", [(labels, f["memory"]) for labels, f in ranks]),
        ("hora_metric", "what the training reported last", reported),
    ]
    return "".join(_family(*family) for family in families)


def _family(name: str, text: str, values: Sequence[tuple[Labels, float | None]]) -> str:
    kind = "counter" if name.endswith("_total") else "gauge"
    lines = [f"{name}{{{_labels(labels)}}} {float(value):g}\n" for labels, value in values if value is not None]
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""


def _labels(labels: Labels) -> str:
    escapes = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
    return ",".join(f'{key}="{value.translate(escapes)}"' for key, value in labels.items())
