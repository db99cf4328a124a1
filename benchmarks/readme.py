"""Write the figures of the README from the numbers of the last `make bench`: `python -m benchmarks.readme`."""

from __future__ import annotations

import json
import statistics
from typing import Any

from benchmarks.run import ROOT, Rows, ratio

README = ROOT / "README.md"
NUMBERS = ROOT / "docs" / "benchmarks" / "results.json"
BEGIN = "<!-- figures: written by `python -m benchmarks.readme` -->\n"
END = "<!-- end of figures -->\n"
_CONTENDERS = {
    "alone": "alone, no communication",
    "DDP": "DistributedDataParallel over gloo",
    "DDP-warm": "the same, warm memory",
    "overlap": "`DistributedOptimizer`",
    "sharded": "`DistributedOptimizer(sharded=True)`",
}


def figures(numbers: dict[str, Any]) -> str:
    """Return the README's tables: two ranks, allreduce and training step."""
    collectives = [row for row in numbers["collectives"] if row["ranks"] == 2 and row["case"] in ("sum", "many")]
    training = [row for row in numbers["training"] if row["np"] == 2 and row["optimizer"] == "sgd"]
    lines = [
        f"{numbers['machine']}; two ranks with one thread each, one run of "
        f"`{numbers['command']}`: medians of {numbers['rounds']} rounds in which the contenders take",
        'turns. "Warm memory" is DDP with the malloc settings that `hvd.init()` makes.',
        "",
        *_allreduce(collectives),
        "",
        *_training(training),
    ]
    return "\n".join(lines) + "\n"


def _allreduce(rows: Rows) -> list[str]:
    titles = [_size(row["bytes"]) if row["case"] == "sum" else "1000 × 1 KiB async" for row in rows]
    return [
        _row("allreduce in place, float32", *titles),
        "|---" * (len(rows) + 1) + "|",
        _row("gloo", *(_time(row["gloo_us"]) for row in rows)),
        _row("Hora", *(_time(row["hvd_us"]) for row in rows)),
        _row("times as fast", *(f"{row['times']:.1f}" for row in rows)),
    ]


def _training(rows: Rows) -> list[str]:
    lines = [
        _row("training step, SGD with momentum", *(row["task"] for row in rows)),
        "|---" * (len(rows) + 1) + "|",
    ]
    for name, title in _CONTENDERS.items():
        lines.append(_row(title, *(_time(1000 * statistics.median(row["ms"][name])) for row in rows)))
    for peer, title in (("DDP", "DDP"), ("DDP-warm", "warm DDP")):
        both = (f"{ratio(row, 'overlap', peer):.2f} · {ratio(row, 'sharded', peer):.2f}" for row in rows)
        lines.append(_row(f"{title}'s time / ours, overlapped · sharded", *both))
    return lines


def _row(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 2**20 else f"{num_bytes >> 10} KiB"


def _time(us: float) -> str:
    if us < 1000:
        return f"{us:.3g} µs"
    return f"{us / 1000:.3g} ms"


def written(text: str) -> str:
    """Return the figures in the text of a README."""
    return text.partition(BEGIN)[2].partition(END)[0]


def main() -> None:
    """Replace the figures of the README."""
    text = README.read_text()
    README.write_text(text.replace(BEGIN + written(text), BEGIN + figures(json.loads(NUMBERS.read_text()))))


if __name__ == "__main__":
    main()
