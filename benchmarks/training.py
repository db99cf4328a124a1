"""Compare whole training steps with DistributedDataParallel over gloo, in turns: `python -m benchmarks.training`.

All contenders train the same model from the same weights on the same batches: without communication, DDP, DDP with the
malloc settings of `hvd.init()` ("DDP-warm": the process keeps freed memory), Hora overlapped, Hora sharded. Each has
its own processes, which sleep during other turns. Reports medians over rounds, spread and ratios, and checks that the
losses agree. `--profile` shows where a step's time goes.
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
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional

from benchmarks.models import WORKLOADS, Workload
from benchmarks.names import some_of
from hora.launch.environment import allocator_variables
from hora.memory import keep_freed_memory

CONTENDERS = ("alone", "DDP", "DDP-warm", "overlap", "sharded")
PEERS = ("DDP", "DDP-warm")
OURS = ("overlap", "sharded")
COMPRESSED = ("fp16", "bf16", "int8")  # as "overlap", with this compression (`hosts_training`)
OPTIMIZERS = ("sgd", "adam")
LIMIT_S = 300.0  # of one turn of one contender


def make_optimizer(kind: str, parameters: Any) -> torch.optim.Optimizer:
    """Return the optimizer, the same implementation for every contender."""
    if kind == "sgd":
        return torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
    return torch.optim.Adam(parameters, lr=1e-4, fused=True)


def make_step(contender: str, workload: Workload, optimizer_kind: str, rank: int) -> Callable[[], torch.Tensor]:
    """Return a function that does one training step of a contender and returns the loss."""
    torch.manual_seed(0)
    model: nn.Module = workload.build()
    if contender in PEERS:
        model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    optimizer = make_optimizer(optimizer_kind, model.parameters())
    if contender in (*OURS, *COMPRESSED):
        import horovod.torch as hvd

        optimizer = hvd.DistributedOptimizer(
            optimizer,
            named_parameters=model.named_parameters(),
            compression=getattr(hvd.Compression, contender if contender in COMPRESSED else "none"),
            sharded=contender == "sharded",
        )
    generator = torch.Generator().manual_seed(100 + rank)
    inputs = torch.randn(*workload.shape, generator=generator)
    targets = torch.randint(0, workload.classes, workload.shape[:1], generator=generator)

    def step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def worker(contender: str, meet: str) -> None:
    """Run one rank of a contender, which executes orders from standard input: make MODEL OPTIMIZER, turn, profile.

    It answers each with one line.
    """
    rank, size = int(os.environ["HOROVOD_RANK"]), int(os.environ["HOROVOD_SIZE"])
    torch.set_num_threads(1)
    if contender == "DDP-warm":
        keep_freed_memory()
    if contender in OURS:
        import horovod.torch as hvd

        hvd.init()
        barrier = hvd.barrier
    else:
        dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=size)
        barrier = dist.barrier
    for line in sys.stdin:
        order, *words = json.loads(line)
        answer: Any = None
        if order == "make":
            workload = WORKLOADS[words[0]]
            step = make_step(contender, workload, words[1], rank)
            answer = [float(step()) for _ in range(4)][-1]
        else:
            barrier()
            step()
            answer = timed(step, workload.steps) if order == "turn" else profiled(step, workload.steps)
        print(json.dumps(answer), flush=True)
    barrier()


def timed(step: Callable[[], object], count: int) -> float:
    """Return the milliseconds of a step."""
    start = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - start) / count * 1e3


def in_turns(steps: Mapping[str, Callable[[], object]], rounds: int, count: int) -> dict[str, list[float]]:
    """Return the milliseconds of each contender's step in every round, on the slowest rank; all share this process."""
    import horovod.torch as hvd

    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            step()
            hvd.barrier()
            mine = torch.tensor(timed(step, count))
            times[name].append(hvd.allreduce(mine, op=hvd.Max, name="time").item())
    return times


def profiled(step: Callable[[], object], count: int) -> str:
    """Return the functions in which the calling thread spends a step."""
    import cProfile
    import io
    import pstats

    profiler = cProfile.Profile(time.thread_time)  # processor time: waiting is not work
    profiler.enable()
    for _ in range(count):
        step()
    profiler.disable()
    text = io.StringIO()
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(18)
    pstats.Stats(profiler, stream=text).sort_stats("cumtime").print_stats("hora", 25)
    return text.getvalue()


class Group:
    """The processes of one contender."""

    def __init__(self, contender: str, np: int, folder: str) -> None:
        self.contender = contender
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        meet = Path(folder) / f"meet-{contender}"
        command = [sys.executable, "-m", "benchmarks.training", "--worker", contender, "--meet", str(meet)]
        self._processes = []
        for rank in range(np):
            env = {**os.environ, "HOROVOD_RANK": str(rank), "HOROVOD_SIZE": str(np), "OMP_NUM_THREADS": "1"}
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            if contender in (*OURS, "DDP-warm"):  # as Hora's launchers do
                env |= allocator_variables(env)
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            self._processes.append(subprocess.Popen(command, env=env, text=True, **pipes))

    def ask(self, *order: str) -> list[Any]:
        """Return the answers of all ranks. A lost rank or the time limit ends all of them."""
        try:
            with self._limited():
                for process in self._processes:
                    process.stdin.write(json.dumps(order) + "\n")
                    process.stdin.flush()
                return [json.loads(process.stdout.readline()) for process in self._processes]
        except (OSError, ValueError):  # a closed pipe, or half a line
            self._kill()
            text = f"a rank of {self.contender} ended in {' '.join(order)}, or took more than {LIMIT_S:g} s"
            raise RuntimeError(text) from None

    def end(self) -> None:
        """End the processes."""
        with self._limited():
            for process in self._processes:
                with contextlib.suppress(OSError):  # an unread order
                    process.stdin.close()
            for process in self._processes:
                process.wait()

    @contextlib.contextmanager
    def _limited(self) -> Iterator[None]:
        timer = threading.Timer(LIMIT_S, self._kill)
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()


def measure(groups: Sequence[Group], model: str, kind: str, rounds: int) -> dict[str, Any]:
    """Return the milliseconds per step of each contender, one figure per round: the mean over the ranks."""
    times: dict[str, list[float]] = {group.contender: [] for group in groups}
    slowest: dict[str, list[float]] = {group.contender: [] for group in groups}
    losses = {group.contender: group.ask("make", model, kind)[0] for group in groups}
    for _ in range(rounds):
        for group in groups:
            answers = group.ask("turn")
            times[group.contender].append(statistics.mean(answers))
            slowest[group.contender].append(max(answers))
    return {
        "task": model,
        "optimizer": kind,
        "ms": times,
        "slowest_ms": slowest,  # of the slowest rank: synchronized steps cannot be faster than "alone" here
        "losses": losses,
    }


def report(result: dict[str, Any]) -> str:
    """Return one line per model and optimizer."""
    medians = {name: statistics.median(times) for name, times in result["ms"].items()}
    parts = [f"{result['task']:11s} {result['optimizer']:4s} np={result['np']}"]
    for name, times in result["ms"].items():
        parts.append(f"{name} {medians[name]:.2f} ms ({min(times):.2f}..{max(times):.2f})")
        if name == "alone":
            parts.append(f"its slowest rank {statistics.median(result['slowest_ms'][name]):.2f} ms")
    for peer in PEERS:
        for name in OURS:
            if peer in medians and name in medians:
                # Rounds are interleaved, so their ratios are steadier than the ratio of medians on a busy machine.
                ratios = [theirs / ours for theirs, ours in zip(result["ms"][peer], result["ms"][name], strict=True)]
                spread = f"{min(ratios):.2f}..{max(ratios):.2f}"
                parts.append(f"{peer}/{name} {statistics.median(ratios):.2f} ({spread})")
    losses = [loss for name, loss in result["losses"].items() if name != "alone"]
    parts.append(f"losses {losses}" if max(losses, default=0) - min(losses, default=0) > 1e-3 else "losses equal")
    return "  ".join(parts)


def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Start the groups, run their turns, and return the measurements."""
    contenders = [arguments.profile] if arguments.profile else arguments.contenders
    results = []
    with tempfile.TemporaryDirectory() as folder:
        groups = [Group(name, arguments.np, folder) for name in contenders]
        try:
            for model in arguments.models:
                for kind in arguments.optimizers:
                    if arguments.profile:
                        groups[0].ask("make", model, kind)
                        text = groups[0].ask("profile")[0]
                        print(f"{model}, {kind}, {arguments.profile}\n{text}", flush=True)
                        continue
                    results.append(measure(groups, model, kind, arguments.rounds) | {"np": arguments.np})
                    print(report(results[-1]), flush=True)
        finally:
            for group in groups:
                group.end()
    return results


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    result = argparse.ArgumentParser(description=__doc__)
    result.add_argument("--np", type=int, default=2)
    for name, known in (("--models", WORKLOADS), ("--optimizers", OPTIMIZERS), ("--contenders", CONTENDERS)):
        result.add_argument(name, type=some_of(known), default="all", help=f"of {','.join(known)} (default: all)")
    result.add_argument("--rounds", type=int, default=5)
    result.add_argument("--profile", default="", help="profile this contender instead")
    result.add_argument("--json", default="")
    result.add_argument("--worker", help=argparse.SUPPRESS)
    result.add_argument("--meet", default="", help=argparse.SUPPRESS)
    return result


if __name__ == "__main__":
    parsed = parser().parse_args()
    if parsed.worker:
        worker(parsed.worker, parsed.meet)
    else:
        measured = run(parsed)
        if parsed.json:
            Path(parsed.json).write_text(json.dumps(measured))
