"""Inject faults into rank 1 of a job and print what its verdict says: `python -m benchmarks.verdict [FAULT,…]`.

Two ranks train under `hora run --verdict --record`. The fault begins after five seconds. A row shows the ranks that the
verdict names and in which part of the step, whether that is right, after how many seconds the live rules named rank 1
for the first time, and the advice.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.names import some_of

_CALM_S = 5.0
_GUILTY = 1


class Fault(NamedTuple):
    """What rank 1 suffers from, and the parts of a step that may be named for it; none: its memory must be."""

    title: str
    parts: tuple[str, ...]


FAULTS = {
    "disk": Fault("a slow disk", ("data",)),
    "batch": Fault("every eighth batch is heavy", ("forward", "backward")),
    "collection": Fault("garbage collection", ("forward", "between")),
    "core": Fault("a core that is shared", ("forward", "backward", "optimizer", "data", "between")),
    "tensor": Fault("a growing tensor", ()),
}


def _spin() -> None:
    while True:
        pass


def train(fault: str, seconds: float, began_file: Path) -> None:
    """Run one rank; rank 1 writes the time at which its fault begins."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    guilty, began = hvd.rank() == _GUILTY, time.monotonic()
    faulty = False

    class Rows(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 1_000_000

        def __getitem__(self, index: int) -> torch.Tensor:
            if faulty and fault == "disk" and index % 16 == 0:
                time.sleep(0.02)
            return torch.ones(256)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 256))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.001), named_parameters=model.named_parameters()
    )
    objects = [[number] for number in range(400_000)] if fault == "collection" and guilty else []
    kept: list[Any] = []
    for step, rows in enumerate(torch.utils.data.DataLoader(Rows(), batch_size=32)):
        passed_s = time.monotonic() - began
        if hvd.allreduce(torch.tensor(float(passed_s > seconds)), op=hvd.Max, name="end"):
            break
        if guilty and not faulty and passed_s > _CALM_S:
            faulty = True
            began_file.write_text(str(time.time()))
            if fault == "core":
                _share_a_core()
        if faulty and fault == "collection" and step % 4 == 0 and objects:
            gc.collect()
        if faulty and fault == "tensor":
            kept.append(torch.ones(250_000))
        repeats = 20 if faulty and fault == "batch" and step % 8 == 0 else 1
        optimizer.zero_grad()
        model(rows.repeat(repeats, 1)).pow(2).mean().backward()
        optimizer.step()
    hvd.shutdown()


def _share_a_core() -> None:
    core = {max(os.sched_getaffinity(0))}
    for thread in Path("/proc/self/task").iterdir():
        os.sched_setaffinity(int(thread.name), core)
    for _ in range(3):
        multiprocessing.get_context("fork").Process(target=_spin, daemon=True).start()


def measure(fault: str, seconds: float) -> dict[str, Any]:
    """Return one row: a job with this fault, and its verdict."""
    with tempfile.TemporaryDirectory() as name:
        began, record = Path(name, "began"), Path(name, "run.hora")
        command = [sys.executable, "-m", "hora", "run", "-np", "2", "--verdict", "--record", str(record)]
        command += [sys.executable, "-m", "benchmarks.verdict", "--rank", str(began), "--seconds", str(seconds), fault]
        root = str(Path(__file__).parents[1])
        path = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
        environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        done = subprocess.run(command, cwd=name, env=environ, capture_output=True, text=True, timeout=seconds + 240)
        if done.returncode:
            raise RuntimeError(done.stderr[-3000:])
        verdict = json.loads(Path(name, "verdict.json").read_text())
        slow = [(one["rank"], one["part"]) for one in verdict["slow"]]
        grown = [one["rank"] for one in verdict["memory"]]
        expected = FAULTS[fault].parts
        right = (
            [rank for rank, _ in slow] == [_GUILTY] and slow[0][1] in expected
            if expected
            # Filling the tensor takes its rank's time, too.
            else {rank for rank, _ in slow} <= {_GUILTY} and grown[:1] == [_GUILTY]
        )
        named = [f"rank {rank} ({part})" for rank, part in slow] + [f"rank {rank} (memory)" for rank in grown]
        return {
            "fault": FAULTS[fault].title,
            "named": ", ".join(named) or "none",
            "right": right,
            "after_s": _named_after_s(record, float(began.read_text())),
            "advice": verdict["advice"],
        }


def _named_after_s(record: Path, began: float) -> float:
    """Return after how many seconds the rules named rank 1; NaN: only at the end, or never."""
    from hora.watch.recording import read_run

    times = [event.at - began for event in read_run(record).events if event.kind == "stall" and event.rank == _GUILTY]
    return next((round(passed, 1) for passed in times if passed > 0), math.nan)


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows in Markdown."""
    lines = ["| fault of rank 1 | named | right | after | advice |", "|---|---|---|---|---|"]
    for row in rows:
        after = "at the end" if math.isnan(row["after_s"]) else f"{row['after_s']:.1f} s"
        right = "yes" if row["right"] else "**no**"
        lines.append(f"| {row['fault']} | {row['named']} | {right} | {after} | {row['advice']} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("faults", nargs="?", type=some_of(FAULTS), default="all", help=f"all or {','.join(FAULTS)}")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank is not None:
        train(given.faults[0], given.seconds, given.rank)
        return
    print(table([measure(fault, given.seconds) for fault in given.faults]), flush=True)


if __name__ == "__main__":
    main()
