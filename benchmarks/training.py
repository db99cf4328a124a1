"""Whole training steps against DistributedDataParallel over gloo, interleaved in one run: `python -m benchmarks.training`.

Every contender trains the same model from the same start on the same batches with the same optimizer implementation:
a step without communication, DDP, Hora with overlapped reduction, Hora sharded. Reports medians over rounds, the spread,
ratios of DDP's time to ours, and that the losses agree. `--profile` shows where a step's time goes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.models import TASKS, Task

CONTENDERS = ("alone", "DDP", "overlap", "sharded")


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    """The same implementation for every contender."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
    return torch.optim.Adam(parameters, lr=1e-4, fused=True)


def make_step(contender: str, task: Task, optimizer_kind: str, rank: int) -> Callable[[], torch.Tensor]:
    """One training step of a contender, as a function that returns the loss."""
    import horovod.torch as hvd

    torch.manual_seed(0)
    model: nn.Module = task.build()
    if contender == "DDP":
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(optimizer_kind, model.parameters())
    if contender in ("overlap", "sharded"):
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), sharded=contender == "sharded"
        )
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(*task.shape, generator=generator)
    targets = torch.randint(0, task.classes, task.shape[:1], generator=generator)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ahead_of_others(first: bool) -> None:
    """Run all threads of this process before ordinary processes, or as one of them again. Needs root."""
    policy, priority = (os.SCHED_FIFO, 1) if first else (os.SCHED_OTHER, 0)
    for thread in os.listdir("/proc/self/task"):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(thread), policy, os.sched_param(priority))


def measure(task: Task, optimizer_kind: str, arguments: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Milliseconds per step of each contender, one figure per round."""
    contenders = arguments.contenders.split(",")
    steps = {name: make_step(name, task, optimizer_kind, rank) for name in contenders}
    times: dict[str, list[float]] = {name: [] for name in contenders}
    work: dict[str, list[float]] = {name: [] for name in contenders}
    losses: dict[str, float] = {}
    for name, step in steps.items():
        for _ in range(4):
            losses[name] = float(step())
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            if arguments.realtime:
                ahead_of_others(True)
            dist.barrier()
            step()
            start, start_cpu = time.perf_counter(), time.process_time()
            for _ in range(task.steps):
                step()
            times[name].append((time.perf_counter() - start) / task.steps * 1e3)
            work[name].append((time.process_time() - start_cpu) / task.steps * 1e3)
            if arguments.realtime:
                ahead_of_others(False)
                time.sleep(1.0)  # the others' turn
    return {
        "task": task.name,
        "optimizer": optimizer_kind,
        "np": dist.get_world_size(),
        "ms": times,
        "cpu_ms": work,  # processor time of all threads of rank 0: steadier than the clock on a busy machine
        "losses": losses,
    }


def profile(task: Task, optimizer_kind: str, contender: str, rank: int) -> str:
    """The functions in which the calling thread of one rank spends a step."""
    import cProfile
    import io
    import pstats

    step = make_step(contender, task, optimizer_kind, rank)
    for _ in range(4):
        step()
    dist.barrier()
    profiler = cProfile.Profile(time.thread_time)  # processor time: waiting is not work
    profiler.enable()
    for _ in range(task.steps):
        step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(18)
    pstats.Stats(profiler, stream=text).sort_stats("cumtime").print_stats("hora", 25)
    return text.getvalue()


def worker(arguments: argparse.Namespace) -> None:
    """One rank."""
    import horovod.torch as hvd

    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{arguments.meet}", rank=rank, world_size=size)
    hvd.init()
    results = []
    for name in arguments.models.split(","):
        for kind in arguments.optimizers.split(","):
            if arguments.profile:
                text = profile(TASKS[name], kind, arguments.profile, rank)
                if rank == 0:
                    print(f"{name}, {kind}, {arguments.profile}\n{text}", flush=True)
                continue
            results.append(measure(TASKS[name], kind, arguments, rank))
            if rank == 0:
                print(report(results[-1]), flush=True)
    if rank == 0 and arguments.json:
        Path(arguments.json).write_text(json.dumps(results))
    dist.barrier()
    hvd.shutdown()
    dist.destroy_process_group()


def report(result: dict[str, Any]) -> str:
    """One line per model and optimizer."""
    medians = {name: statistics.median(times) for name, times in result["ms"].items()}
    parts = [f"{result['task']:11s} {result['optimizer']:4s} np={result['np']}"]
    for name, times in result["ms"].items():
        cpu = statistics.median(result["cpu_ms"][name])
        parts.append(f"{name} {medians[name]:.2f} ms ({min(times):.2f}..{max(times):.2f}; cpu {cpu:.2f})")
    for name in ("overlap", "sharded"):
        if name in medians and "DDP" in medians:
            # Rounds are interleaved, so their ratios are steadier than the ratio of medians on a busy machine.
            ratios = [d / o for d, o in zip(result["ms"]["DDP"], result["ms"][name], strict=True)]
            cpu = statistics.median(result["cpu_ms"]["DDP"]) / statistics.median(result["cpu_ms"][name])
            parts.append(f"DDP/{name} {statistics.median(ratios):.2f} (cpu {cpu:.2f})")
    spread = max(result["losses"].values()) - min(v for k, v in result["losses"].items() if k != "alone")
    parts.append(
        f"losses {' '.join(f'{v:.4f}' for v in result['losses'].values())}" if spread > 1e-3 else "losses equal"
    )
    return "  ".join(parts)


def run(np: int, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the ranks, wait for them, and return what they measured."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        results = Path(folder) / "results.json"
        command = [sys.executable, "-m", "benchmarks.training", "--worker", "--meet", f"{folder}/meet"]
        command += [
            "--models",
            arguments.models,
            "--optimizers",
            arguments.optimizers,
            "--rounds",
            str(arguments.rounds),
        ]
        command += ["--contenders", arguments.contenders, "--json", str(results)]
        command += ["--profile", arguments.profile] if arguments.profile else []
        command += ["--realtime"] if arguments.realtime else []
        processes = []
        for rank in range(np):
            env = {**os.environ, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(np), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            processes.append(subprocess.Popen(command, env=env))
        try:
            for process in processes:
                if process.wait(timeout=1800):
                    raise RuntimeError(f"a rank of the training benchmark ended with {process.returncode}")
        finally:
            for process in processes:
                process.kill()
        return json.loads(results.read_text()) if results.exists() else []


def parser() -> argparse.ArgumentParser:
    """The command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("--np", type=int, default=2)
    result.add_argument("--models", default=",".join(TASKS))
    result.add_argument("--optimizers", default="sgd,adam")
    result.add_argument("--contenders", default=",".join(CONTENDERS))
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--profile", default="", help="profile this contender instead")
    result.add_argument("--realtime", action="store_true", help="on a busy machine: go before other processes")
    result.add_argument("--json", default="")
    result.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    result.add_argument("--meet", default="", help=argparse.SUPPRESS)
    return result


if __name__ == "__main__":
    parsed = parser().parse_args()
    if parsed.worker:
        worker(parsed)
    else:
        measured = run(parsed.np, parsed)
        if parsed.json:
            Path(parsed.json).write_text(json.dumps(measured))
