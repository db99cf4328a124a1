"""Train over slow links against DDP over gloo, plain and with torch's PowerSGD hook: as root, two offices x 2 ranks.

    python -m benchmarks.slow_links --rounds 2 --out FOLDER             all rows, about 8 minutes on a quiet machine
    python -m benchmarks.slow_links --rows "1 Gbit/s" --rounds 1        a quick trial
    python -m benchmarks.slow_links --plan --rounds 1 --out FOLDER    predictions of `hora.plan` beside measurements

The offices are network namespaces (`benchmarks.offices`). All contenders of a row share the processes and take turns. A
time is the slowest rank's, the median over the rounds. DiLoCo is timed over one period of exchanges, beside the same
optimizer without exchanges ("apart").
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import hora
import horovod.torch as hvd
from benchmarks import offices
from benchmarks.collectives import both_joined
from benchmarks.models import WORKLOADS, Workload
from benchmarks.training import in_turns, make_optimizer

NEVER = 10**9
WARM_UP = 4  # steps: PowerSGD begins after two at the earliest in torch
RANK = 4


class Row(NamedTuple):
    """A link, a model, its contenders and the number of steps."""

    link: dict[str, str]
    model: str
    contenders: tuple[str, ...]
    num_steps: int
    of: str  # ratios are the others' time divided by this one's; for "apart" the reverse


LOW_RANK = f"PowerSGD {RANK}"
BY_STEP = ("DDP", "DDP + PowerSGD", "plain", "int8", LOW_RANK)
PLANNED = ("plain", "bf16", "int8", "PowerSGD 1", "PowerSGD 4", "DiLoCo 10", "DiLoCo 50")
PLANNED_LINKS = (
    {"rate": "1gbit", "delay": "1ms"},
    {"rate": "100mbit", "delay": "20ms"},
)
PLANNED_ROWS = {
    f"{model}, {' '.join(link.values())}": Row(link, model, PLANNED, 3, "")
    for model in ("MLP 4x2048", "ResNet18")
    for link in PLANNED_LINKS
}
ROWS = {
    "1 Gbit/s": Row({"rate": "1gbit", "delay": "1ms"}, "MLP 4x2048", BY_STEP, 3, LOW_RANK),
    "100 Mbit/s": Row({"rate": "100mbit", "delay": "20ms"}, "MLP 4x2048", BY_STEP, 2, LOW_RANK),
    "100 Mbit/s lossy": Row(
        {"rate": "100mbit", "delay": "20ms", "loss": "0.1%"},
        "ResNet18",
        ("apart", "DiLoCo 50 int8"),
        50,
        "DiLoCo 50 int8",
    ),
    "20 Mbit/s": Row(
        {"rate": "20mbit", "delay": "100ms"}, "MLP 4x2048", ("apart", "DiLoCo 200 int8"), 200, "DiLoCo 200 int8"
    ),
}


def wrapped(contender: str, optimizer: torch.optim.Optimizer) -> Any:
    """Return the contender's optimizer."""
    compression: Any
    kind, *more = contender.split()
    if kind == "DDP":
        return optimizer
    if kind == "apart":
        return hvd.LocalSGD(optimizer, every=NEVER)
    if kind == "DiLoCo":
        every = int(more[0])
        if more[1:]:  # almost until the next fragment; the default is half of that
            compression = getattr(hvd.Compression, more[1])
            return hvd.DiLoCo(optimizer, every=every, overlap=9 * every // 40, compression=compression)
        return hvd.DiLoCo(optimizer, every=every)
    if kind == "PowerSGD":
        compression = hvd.Compression.powersgd(rank=int(more[0]), start_step=2)
    else:
        compression = getattr(hvd.Compression, "none" if kind == "plain" else kind)
    return hvd.DistributedOptimizer(optimizer, compression=compression)


def batch_of(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + hvd.rank())
    inputs = torch.randn(*workload.shape, generator=generator)
    return inputs, torch.randint(0, workload.classes, workload.shape[:1], generator=generator)


def make_step(contender: str, workload: Workload) -> Callable[[], object]:
    torch.manual_seed(0)
    model: nn.Module = workload.build()
    if contender.startswith("DDP"):
        # torch's hook starts its second and third allreduce in callbacks, whose order over gloo differs between ranks
        # as soon as there are two buckets, and the job ends. So there is only one bucket.
        whole = {"bucket_cap_mb": 1000} if contender == "DDP + PowerSGD" else {}
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, **whole)
    if contender == "DDP + PowerSGD":
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=RANK, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = wrapped(contender, make_optimizer("sgd", model.parameters()))
    inputs, targets = batch_of(workload)

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()

    return step


def work(row: Row, rounds: int, numbers: Path) -> None:
    """Write, on rank 0, the milliseconds of each contender's step, per round."""
    with both_joined():
        steps = {name: make_step(name, WORKLOADS[row.model]) for name in row.contenders}
        for step in steps.values():
            for _ in range(WARM_UP):
                step()
        times = in_turns(steps, rounds, row.num_steps)
        if hvd.rank() == 0:
            numbers.write_text(json.dumps(times))


def check_plan(row: Row, rounds: int, numbers: Path) -> None:
    """Write, on rank 0, `hora.plan`'s prediction for each setting and its measured step."""
    torch.set_num_threads(1)
    hvd.init()
    workload = WORKLOADS[row.model]
    torch.manual_seed(0)
    predicted = {line.name: 1e3 * line.step_s for line in hora.plan(workload.build(), batch_of(workload))}
    found = {}
    for name in row.contenders:
        step, count = make_step(name, workload), int(name.split()[1]) if name.startswith("DiLoCo") else row.num_steps
        for _ in range(WARM_UP):
            step()
        found[name] = [predicted[name], statistics.median(in_turns({name: step}, rounds, count)[name])]
    if hvd.rank() == 0:
        numbers.write_text(json.dumps(found))
    hvd.barrier()
    hvd.shutdown()


def report_plan(name: str, found: dict[str, list[float]]) -> str:
    texts = [f"{setting} {planned:.0f}/{seen:.0f} ms" for setting, (planned, seen) in found.items()]
    off = statistics.median(abs(planned / seen - 1) for planned, seen in found.values())
    return f"{name}: planned/measured {' · '.join(texts)}: median {100 * off:.0f} % off"


def report(name: str, times: dict[str, list[float]]) -> str:
    row, parts = ROWS[name], []
    for contender, values in times.items():
        text = f"{contender} {statistics.median(values):.0f} ms"
        ratios = [theirs / ours for theirs, ours in zip(values, times[row.of], strict=True)]
        if contender == "apart":
            text += f" ({100 * statistics.median(ratios):.0f} % of its steps/s)"
        elif contender != row.of:
            text += f" ({statistics.median(ratios):.2f} x)"
        parts.append(text)
    link = " ".join(row.link.values())
    return f"{name:18s} {link:22s} {row.model:11s} {row.of}: {' · '.join(parts)}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="all", help=f"of {'; '.join((*ROWS, *PLANNED_ROWS))}, with ; between; or all")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each contender (default: 3)")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds for a row (default: 1800)")
    parser.add_argument("--out", type=Path, help="a folder for the times, as JSON, and for what is printed")
    parser.add_argument("--plan", action="store_true", help="what hora.plan predicts beside what is measured, instead")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    rows = PLANNED_ROWS if arguments.plan else ROWS
    wanted = list(rows) if arguments.rows == "all" else [name.strip() for name in arguments.rows.split(";")]
    if unknown := [name for name in wanted if name not in rows]:
        parser.error(f"there is no row {unknown[0]!r} among {'; '.join(rows)}")
    if arguments.worker:
        (check_plan if arguments.plan else work)(rows[wanted[0]], arguments.rounds, arguments.worker)
        return
    found, texts = {}, []
    for name in wanted:
        with tempfile.TemporaryDirectory() as folder, offices.offices(2, **rows[name].link) as hosts:
            numbers = Path(folder) / "numbers.json"
            command = [sys.executable, "-m", "benchmarks.slow_links", "--worker", str(numbers), "--rows", name]
            command += ["--rounds", str(arguments.rounds), *(["--plan"] if arguments.plan else [])]
            offices.run_ranks(hosts, command, num_local=2, limit_s=arguments.limit)
            found[name] = json.loads(numbers.read_text())
        text = report_plan(name, found[name]) if arguments.plan else report(name, found[name])
        texts.append(f"{text}  load {os.getloadavg()[0]:.1f}")
        print(texts[-1], flush=True)
        if arguments.out:
            arguments.out.mkdir(parents=True, exist_ok=True)
            kind = "slow_links_plan" if arguments.plan else "slow_links"
            (arguments.out / f"{kind}.json").write_text(json.dumps(found, indent=1) + "\n")
            (arguments.out / f"{kind}.txt").write_text("\n".join(texts) + "\n")
    if arguments.plan:
        off = [abs(planned / seen - 1) for row in found.values() for planned, seen in row.values()]
        print(f"all: median {100 * statistics.median(off):.0f} % off", flush=True)


if __name__ == "__main__":
    main()
