"""Where the time of an allreduce through shared memory goes, and how far it is from a plain copy.

    python -m benchmarks.shm_profile -np 2 --sizes 4K,64K,1M,16M,64M

Every phase is timed by wrapping the functions that do it, on rank 0, so phases of small operations look longer than
they are; `total` is measured without the wrapping. Phases: `engine` is everything before and after the transport
(names, agreement, plan, handles), `copy in` to the own slot, `publish` including the wake-up of sleepers, `wait` for
peers, `reduce` from the slots into the result, `rest` the transport's own bookkeeping.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.collectives import SIZES, num_bytes

PHASES = ("engine", "copy in", "publish", "wait", "reduce", "rest")


class Clock:
    """Seconds by phase."""

    def __init__(self) -> None:
        self.spent: dict[str, float] = {}

    def wrap(self, owner: object, name: str, phase: str) -> None:
        inner: Callable[..., object] = getattr(owner, name)

        def timed(*arguments: object, **options: object) -> object:
            begin = time.perf_counter()
            try:
                return inner(*arguments, **options)
            finally:
                self.spent[phase] = self.spent.get(phase, 0.0) + time.perf_counter() - begin

        setattr(owner, name, timed)


def work(sizes: list[int]) -> None:
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    tensors = {size: torch.zeros(size // 4) for size in sizes}
    plain, copies = {}, {}
    for size, tensor in tensors.items():
        other = tensor.clone()
        plain[size] = measured(lambda t=tensor: hvd.allreduce_(t, op=hvd.Sum), num_calls(size))
        copies[size] = measured(lambda t=tensor, o=other: o.copy_(t), num_calls(size))
    clock = instrumented()
    for size, tensor in tensors.items():
        clock.spent.clear()
        begin, calls = time.perf_counter(), num_calls(size)
        for _ in range(calls):
            hvd.allreduce_(tensor, op=hvd.Sum)
        whole = time.perf_counter() - begin
        if hvd.rank() == 0:
            print(line(size, plain[size], copies[size], shares(clock.spent, whole)), flush=True)
    hvd.shutdown()


def num_calls(size: int) -> int:
    return max(5, min(1000, (256 << 20) // size))


def measured(call: Callable[[], object], times: int) -> float:
    """The median seconds of a call."""
    calls = []
    for _ in range(times + 3):
        begin = time.perf_counter()
        call()
        calls.append(time.perf_counter() - begin)
    return statistics.median(calls[3:])


def instrumented() -> Clock:
    from hora.engine.transport import shm
    from hora.engine.transport.arithmetic import Arithmetic
    from hora.engine.transport.ring import Ring

    clock = Clock()
    clock.wrap(shm, "put", "copy in")
    clock.wrap(Arithmetic, "reduce", "reduce")
    clock.wrap(Ring, "publish", "publish")
    clock.wrap(Ring, "wait", "wait")
    clock.wrap(shm.ShmTransport, "allreduce", "transport")
    return clock


def shares(spent: dict[str, float], whole: float) -> dict[str, float]:
    """Each phase's part of the whole."""
    transport = spent.pop("transport", 0.0)
    found = {phase: spent.get(phase, 0.0) / whole for phase in PHASES}
    found["engine"] = (whole - transport) / whole
    found["rest"] = (transport - sum(spent.values())) / whole
    return found


def line(size: int, total_s: float, copy_s: float, found: dict[str, float]) -> str:
    phases = "  ".join(f"{phase} {100 * found[phase]:3.0f}%" for phase in PHASES)
    return f"{size >> 10:7d} KiB  total {total_s * 1e6:9.1f} us = {total_s / copy_s:6.1f} copies   {phases}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="num_ranks", help="ranks (default: 2)")
    parser.add_argument("--sizes", default=SIZES, help=f"bytes, with K or M (default: {SIZES})")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work([num_bytes(size) for size in arguments.sizes.split(",")])
    else:
        horovodrun = str(Path(sys.executable).with_name("horovodrun"))
        command = [
            horovodrun,
            "-np",
            str(arguments.num_ranks),
            sys.executable,
            "-m",
            "benchmarks.shm_profile",
            "--worker",
        ]
        sys.exit(subprocess.run([*command, "--sizes", arguments.sizes], check=False).returncode)
