"""One rank of a contender of `benchmarks.core`: it does what its orders say, and answers each with one line of JSON.

Started by torchrun (gloo, DDP) or horovodrun (ours), on every rank, with the socket of the benchmark and what it is to
be. Between orders it sleeps in `recv`, so that the others have the machine to themselves.
"""

from __future__ import annotations

import argparse
import cProfile
import io
import json
import os
import pstats
import socket
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.models import WORKLOADS
from benchmarks.training import make_step, timed
from hora.memory import keep_freed_memory

WARM = {"DDP-warm", "warm"}  # as DDP and alone, with a setting of malloc that `hvd.init()` makes
PLAIN = {"gloo", "deepspeed", "DDP", "alone"} | WARM  # nothing of ours but that
MANY = (1000, 1024)  # tensors, bytes each
TRAINING = {"DDP", "overlap", "sharded", "alone"} | WARM


def built_deepspeed() -> Any:
    """DeepSpeed's shared-memory allreduce, from its unpacked sources in $DEEPSPEED_SOURCE, as its own build makes
    it.
    """
    from torch.utils.cpp_extension import load

    csrc = Path(os.environ["DEEPSPEED_SOURCE"]) / "csrc" / "cpu"
    return load(
        name="deepspeed_shm_comm",
        sources=[str(csrc / "comm" / name) for name in ("shm_interface.cpp", "shm.cpp")],
        extra_include_paths=[str(csrc / "includes")],
        extra_cflags=["-O2", "-fopenmp"],
    )


class Rank:
    """What the orders are carried out by."""

    def __init__(self, contender: str) -> None:
        self.contender = contender
        self.hvd: Any = None
        torch.set_num_threads(1)
        if contender in PLAIN:
            if contender in WARM:
                keep_freed_memory()
            dist.init_process_group("gloo")
            self.rank, self.barrier = dist.get_rank(), dist.barrier
            self.all_reduce: Callable[[torch.Tensor], object] = dist.all_reduce
            if contender == "deepspeed":
                os.environ["LOCAL_SIZE"] = str(dist.get_world_size())
                built_deepspeed().initialize(dist.get_world_size(), self.rank)
                self.all_reduce = torch.ops.deepspeed.inference_all_reduce_
                dist.barrier()  # all have mapped all of them
                for left in Path("/dev/shm").glob(f"deepspeed_*_{os.environ['MASTER_PORT']}_{self.rank}"):
                    left.unlink()  # DeepSpeed itself leaves it behind
        else:
            import horovod.torch as hvd

            hvd.init()
            self.hvd, self.rank, self.barrier = hvd, hvd.rank(), hvd.barrier
        self.calls: dict[tuple[str, int], Callable[[], object]] = {}
        self.step: Callable[[], torch.Tensor] = lambda: torch.zeros(())

    def call(self, case: str, size: int) -> Callable[[], object]:
        """One operation of a case, kept: a training repeats the same ones."""
        if (case, size) not in self.calls:
            self.calls.clear()
            self.calls[case, size] = self._call(case, size)
        return self.calls[case, size]

    def _call(self, case: str, size: int) -> Callable[[], object]:
        hvd = self.hvd
        if case == "many":
            return self._many()
        tensor = torch.zeros(size // 4)
        if case == "copy":
            other = torch.zeros(size // 4)
            return lambda: other.copy_(tensor)
        if hvd is None:
            return lambda: self.all_reduce(tensor)
        op = hvd.Average if case == "average" else hvd.Sum
        return lambda: hvd.allreduce_(tensor, op=op, name="bench")

    def _many(self) -> Callable[[], object]:
        hvd, tensors = self.hvd, [torch.zeros(MANY[1] // 4) for _ in range(MANY[0])]
        names = [f"tensor.{number}" for number in range(MANY[0])]

        def ours() -> None:
            pairs = zip(tensors, names, strict=True)
            for handle in [hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in pairs]:
                hvd.synchronize(handle)

        def gloo() -> None:
            for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
                work.wait()

        return gloo if hvd is None else ours

    # Orders.

    def turn(self, case: str, size: int, num_calls: int) -> dict[str, float]:
        """Microseconds of single calls, after a few that do not count."""
        call = self.call(case, size)
        for _ in range(3 + num_calls // 10):
            call()
        self.barrier()
        times = []
        for _ in range(num_calls):
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
        times.sort()
        return {
            "median": statistics.median(times) * 1e6,
            "p10": times[len(times) // 10] * 1e6,
            "p90": times[len(times) * 9 // 10] * 1e6,
        }

    def make(self, model: str) -> list[float]:
        """A model and its optimizer; the losses of the first steps."""
        kind = self.contender if self.contender in TRAINING else "overlap"
        self.step = make_step(kind, WORKLOADS[model], "sgd", self.rank)
        return [float(self.step()) for _ in range(5)]

    def steps(self, model: str) -> tuple[float, float]:
        """Milliseconds of a step, by the clock and of the processor."""
        self.barrier()
        self.step()
        return timed(self.step, WORKLOADS[model].steps)

    def phases(self, model: str) -> list[float]:
        """Milliseconds of processor time: zero_grad, forward, backward and step of this thread; all of other
        threads.
        """
        marks: list[float] = []
        step = make_step(self.contender, WORKLOADS[model], "sgd", self.rank, lambda: marks.append(time.thread_time()))
        rows = []
        for _ in range(5 + 4 * WORKLOADS[model].steps):
            marks[:] = [time.thread_time()]
            cpu = time.process_time()
            step()
            spent = [end - begin for begin, end in pairwise(marks)]
            rows.append([*spent, time.process_time() - cpu - sum(spent)])
        self.barrier()
        return [1e3 * statistics.median(column) for column in zip(*rows[5:], strict=True)]

    def idle(self, seconds: float) -> float:
        """The share of a core that this rank takes while it has nothing to do."""
        if self.hvd is not None:
            for _ in range(3):
                self.hvd.allreduce_(torch.ones(8), name="idle")
        self.barrier()
        begin, cpu = time.perf_counter(), time.process_time()
        time.sleep(seconds)  # what is measured: nothing is asked of this rank meanwhile
        return (time.process_time() - cpu) / (time.perf_counter() - begin)

    def profile(self, what: str, size: int) -> str:
        """Calls of an operation or a step, and the functions in which its time goes (rank 0; the others take part)."""
        count = 300
        call = self.step if what == "step" else self.call(what, size)
        for _ in range(50):
            call()
        self.barrier()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(count):
            call()
        profiler.disable()
        text, stats = io.StringIO(), pstats.Stats(profiler)
        python = sum(entry[1] for key, entry in stats.stats.items() if key[0] != "~")  # type: ignore[attr-defined]
        in_c = sum(entry[1] for key, entry in stats.stats.items() if key[0] == "~")  # type: ignore[attr-defined]
        text.write(f"{python / count:.1f} Python and {in_c / count:.1f} C calls each\n")
        pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(16)
        return text.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("contender")
    parser.add_argument("path", help="the benchmark's socket")
    arguments = parser.parse_args()
    rank = Rank(arguments.contender)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.connect(arguments.path)
        stream = sock.makefile("rw")
        print(json.dumps([arguments.contender, rank.rank, os.getpid()]), file=stream, flush=True)
        for line in stream:
            order, *words = json.loads(line)
            if order == "end":
                break
            print(json.dumps(getattr(rank, order)(*words)), file=stream, flush=True)
    rank.barrier()
    if rank.hvd is not None:
        rank.hvd.shutdown()
    else:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
