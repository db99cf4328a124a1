"""Run the whole comparison: `make bench`, or `python -m benchmarks [--quick]`.

Collectives and training steps against torch.distributed's gloo and DistributedDataParallel, memory against DDP,
start-up against torchrun and TorchDistributor, and the cost of watching a job. Prints the output of each benchmark and
saves a table (`docs/benchmarks/results.md`) and the numbers (`results.json`), from which `python -m benchmarks.readme`
writes the README's figures.

Skips a part whose requirements (pyspark, Java) are missing, and says so in the table. `--quick` takes about a quarter
of an hour on two cores: fewer rounds, without watching.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
Rows = list[dict[str, Any]]


class Part(NamedTuple):
    """A section of the results: title, benchmarks, requirements, and whether `--quick` includes it."""

    title: str
    commands: tuple[tuple[str, ...], ...]
    modules: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    quick: bool = False

    def missing(self) -> list[str]:
        """Return the requirements that this machine lacks."""
        modules = [name for name in self.modules if importlib.util.find_spec(name) is None]
        return modules + [name for name in self.programs if shutil.which(name) is None]


PARTS = (
    Part("Memory of four ranks, sharded and DDP", (("memory",),), quick=True),
    Part("Start-up against torchrun", (("startup", "--repeats", "3", "--max-ranks", "8"),), quick=True),
    Part(
        "Start-up on Spark against TorchDistributor",
        (("spark_startup", "3"),),
        ("pyspark", "pandas", "pyarrow", "grpc_status", "psutil"),
        ("java",),
        quick=True,
    ),
    Part(
        "An estimator on Spark against a plain Parquet reader",
        (("spark_estimator", "1000000", "3"),),
        ("pyspark", "pandas", "pyarrow"),
        ("java",),
    ),
    Part("A step that is watched", (("watch", "overhead", "--rounds", "3"),)),
    Part("The guilty rank", (("watch", "slow", "--tries", "5"), ("watch", "hang", "--tries", "5"))),
)


def run_module(module: str, *arguments: str) -> str:
    """Run a benchmark, show and return its output. A failing benchmark is reported, not fatal."""
    print(f"\n== {module} {' '.join(arguments)}", flush=True)
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    # torchrun would set OMP_NUM_THREADS and print that among the results. stderr, with Spark's log, is only shown.
    env = {"OMP_NUM_THREADS": "1", **os.environ}
    done = subprocess.run(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, check=False)
    print(done.stdout, flush=True)
    if done.returncode:
        return f"failed with exit code {done.returncode}; see what it wrote to stderr\n{done.stdout[-600:]}"
    return done.stdout


def with_numbers(module: str, *arguments: str) -> tuple[str, Rows]:
    """Run a benchmark that writes its numbers as JSON; return its output and the numbers."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "numbers.json"
        text = run_module(module, *arguments, "--json", str(path))
        rows: Rows = json.loads(path.read_text()) if path.exists() else []
        return text, rows


def run_part(part: Part) -> str:
    """Run a part's benchmarks and return their output, or the missing requirements."""
    missing = part.missing()
    if missing:
        return f"left out: this machine has no {' and no '.join(missing)}"
    return "".join(run_module(*command) for command in part.commands)


def ratio(row: dict[str, Any], contender: str, peer: str = "DDP") -> float:
    """Return the peer's time divided by the contender's, the median over interleaved rounds."""
    pairs = zip(row["ms"][peer], row["ms"][contender], strict=True)
    return statistics.median(theirs / ours for theirs, ours in pairs)


def machine() -> str:
    """Describe this machine."""
    import torch

    cores, all_cores = len(os.sched_getaffinity(0)), os.cpu_count()
    where = f"{cores} cores" if cores == all_cores else f"{cores} of {all_cores} cores"
    release = torch.__version__.partition("+")[0]
    return f"{where}, {platform.machine()}, Python {platform.python_version()}, torch {release}"


def table(command: str, collectives: Rows, training: Rows, texts: dict[str, str]) -> str:
    """Return the results in Markdown."""
    lines = [
        "# Benchmarks",
        "",
        f"Made by `{command}`: {machine()}, load {os.getloadavg()[0]:.1f}. The contenders took turns, several rounds; "
        "numbers are medians.",
        "",
        "## Training step against DistributedDataParallel (gloo)",
        "",
        '"DDP, warm memory" is DDP with the malloc settings that `hvd.init()` makes; ratios are against DDP and, '
        "after the dot, against that.",
        "",
        "| model | optimizer | ranks | alone | DDP | DDP, warm memory | overlapped | times faster | sharded | times "
        "faster |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in training:
        ms = {name: f"{statistics.median(times):.2f} ms" for name, times in row["ms"].items()}
        lines.append(
            f"| {row['task']} | {row['optimizer']} | {row['np']} | {ms['alone']} | {ms['DDP']} | {ms['DDP-warm']} "
            + "".join(
                f"| {ms[name]} | **{ratio(row, name):.2f}** · {ratio(row, name, 'DDP-warm'):.2f} "
                for name in ("overlap", "sharded")
            )
            + "|"
        )
    lines += [
        "",
        "## Collectives against gloo",
        "",
        "| | ranks | bytes | hvd | gloo | times faster |",
        "|---|---|---|---|---|---|",
    ]
    for row in collectives:
        lines.append(
            f"| {row['case']} | {row['ranks']} | {row['bytes']} | {row['hvd_us']:.0f} µs | {row['gloo_us']:.0f} µs "
            f"| **{row['times']:.1f}** ({row['times_least']:.1f} to {row['times_most']:.1f}) |"
        )
    for title, text in texts.items():
        lines += ["", f"## {title}", "", "```", text.strip(), "```"]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run everything and save the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--np", default="2", help="ranks, also several: 2,4")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, without watching")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "benchmarks")
    options = parser.parse_args()
    rounds = "5" if options.quick else "9"
    collectives: Rows = []
    training: Rows = []
    for np in options.np.split(","):
        collectives += with_numbers("collectives", "-np", np, "--rounds", rounds)[1]
        training += with_numbers("training", "--np", np, "--rounds", rounds)[1]
    if not collectives or not training:
        sys.exit("collectives or training steps could not be measured: nothing is saved")
    texts = {part.title: run_part(part) for part in PARTS if part.quick or not options.quick}
    options.out.mkdir(parents=True, exist_ok=True)
    command = "python -m benchmarks --quick" if options.quick else "make bench"
    numbers = {
        "machine": machine(),
        "command": command,
        "rounds": int(rounds),
        "collectives": collectives,
        "training": training,
    }
    (options.out / "results.json").write_text(json.dumps(numbers, indent=1))
    (options.out / "results.md").write_text(table(command, collectives, training, texts))
    print(f"saved in {options.out}")


if __name__ == "__main__":
    main()
