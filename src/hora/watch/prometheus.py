"""`/metrics`: the run in Prometheus's text format, formatted here because it is a dozen gauges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hora.telemetry import PARTS
from hora.watch import view
from hora.watch.lateness import lateness
from hora.watch.model import Run

__all__ = ["CONTENT_TYPE", "exposition"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("starting", "training", "waiting", "re-forming", "failing", "done", "failed", "stopped")

Labels = Mapping[str, str]


def exposition(run: Run) -> str:
    """Return the whole text."""
    now = view.head(run)
    job = {"job_id": str(run.facts.get("id", ""))}
    latest = run.grid.column(run.grid.num_used - 1) if run.grid.num_used else {}
    late = lateness(latest)
    ranks = [({**job, "rank": str(r["rank"]), "host": r["host"]}, r) for r in now["ranks"]]
    parts = [
        ({**labels, "part": part}, value / 1e3)
        for labels, facts in ranks
        for part, value in zip(PARTS, facts.get("parts", ()), strict=False)
    ]
    families = [
        _family("hora_world_size", "ranks of the current world", [(job, now["size"])]),
        _family("hora_generation", "how often the world was formed anew", [(job, max(run.generation, 0))]),
        _family(
            "hora_state", "1 for the state the job is in", [({**job, "state": s}, s == now["state"]) for s in _STATES]
        ),
        _family("hora_steps_total", "steps done", [(job, now["step"])], kind="counter"),
        _family("hora_step_seconds", "duration of a step, median of the ranks", [(job, (now["step_ms"] or 0) / 1e3)]),
        _family("hora_samples_per_second", "samples trained on, all ranks together", [(job, now["samples_per_s"])]),
        _family(
            "hora_reduction_bytes_per_second", "bytes a rank reduces per second of it", [(job, now["bytes_per_s"])]
        ),
        _family("hora_reduction_hidden_ratio", "share of the reduction behind backward", [(job, now["hidden"])]),
        _family(
            "hora_rank_up", "1 for a rank that takes part", [(labels, f["state"] == "here") for labels, f in ranks]
        ),
        _family("hora_rank_part_seconds", "where a step of this rank goes", parts),
        _family(
            "hora_rank_lateness_ratio",
            "share of a step for which others wait for this rank",
            [(labels, late[facts["rank"]]) for labels, facts in ranks if facts["rank"] in late],
        ),
        _family(
            "hora_straggler_slowdown_ratio",
            "work of a straggler over the median of the others",
            [({**job, "rank": str(s["rank"]), "part": s["part"]}, s["slowdown"]) for s in now["stragglers"]],
        ),
        _family("hora_rank_memory_bytes", "resident memory", [(labels, f["memory"]) for labels, f in ranks]),
        _family(
            "hora_metric",
            "what the training reported last",
            [({**job, "name": name}, value) for name, value in run.latest_metrics().items()],
        ),
    ]
    return "".join(families)


def _family(name: str, text: str, values: Iterable[tuple[Labels, float | None]], *, kind: str = "gauge") -> str:
    lines = [f"{name}{{{_labels(labels)}}} {float(value):g}\n" for labels, value in values if value is not None]
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{''.join(lines)}" if lines else ""


def _labels(labels: Labels) -> str:
    return ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')
