"""Compare the latency of hvd's collectives with torch.distributed's gloo, in the same run.

    python -m benchmarks.collectives -np 2                       the table of the README, about a minute
    python -m benchmarks.collectives -np 4 --sizes 4K,1M --json results.json
    python -m benchmarks.hosts --rate 1gbit --cases fp16,bf16,int8      a sum with compression, also against one without

One thread per rank, float32, private tensors. The contenders take turns, so that other load on the machine affects all
of them. Numbers are medians of single calls on rank 0. "times" is the median over the rounds of gloo's median divided
by hvd's, with the smallest and largest round in brackets. Other collectives: `benchmarks.process_group`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist

import horovod.torch as hvd
from benchmarks.names import some_of

SIZES = "4K,64K,1M,16M,64M"
CASES = ("sum", "average", "many", "fp16", "bf16", "int8")
MANY = (1000, 1024)  # tensors, bytes each
BLOCK_S = 0.08

Contenders = dict[str, Callable[[], object]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="num_ranks", help="ranks (default: 2)")
    parser.add_argument("--sizes", default=SIZES, help=f"bytes, with K or M (default: {SIZES})")
    parser.add_argument(
        "--cases", type=some_of(CASES), default="sum,average,many", help=f"of {','.join(CASES)}, or all"
    )
    parser.add_argument("--rounds", type=int, default=9, help="rounds of each contender (default: 9)")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def num_bytes(text: str) -> int:
    return int(text.rstrip("KM")) << {"K": 10, "M": 20}.get(text[-1], 0)


def launch(arguments: argparse.Namespace) -> int:
    """Run this module on all ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    horovodrun = [sys.executable, "-m", "horovod.runner.launch", "-np", str(arguments.num_ranks)]
    command = [*horovodrun, sys.executable, "-m", "benchmarks.collectives", "--worker"]
    command += ["--sizes", arguments.sizes, "--cases", ",".join(arguments.cases), "--rounds", str(arguments.rounds)]
    if arguments.json:
        command += ["--json", str(arguments.json.absolute())]
    return subprocess.run(command, env=environment, check=False).returncode


def work(arguments: argparse.Namespace) -> None:
    results = []
    agreed = lambda seconds: hvd.broadcast_object(seconds, root_rank=0)  # noqa: E731
    with both_joined():
        for case in arguments.cases:
            sizes = [MANY[0] * MANY[1]] if case == "many" else [num_bytes(size) for size in arguments.sizes.split(",")]
            for size in sizes:
                contenders, clear = contenders_of(case, size)
                rows = measured(contenders, clear, arguments.rounds, lambda: dist.barrier(), agreed)
                results.append({"case": case, "bytes": size, "ranks": hvd.size(), **summary(rows)})
                if hvd.rank() == 0:
                    print(line(results[-1]), flush=True)
        if hvd.rank() == 0 and arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


@contextmanager
def both_joined() -> Iterator[None]:
    """Initialize hvd, and gloo for the same ranks, with one thread each; hvd broadcasts the port of gloo's store."""
    torch.set_num_threads(1)
    hvd.init()
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False) if hvd.rank() == 0 else None
    port = hvd.broadcast_object(store.port if store else None, root_rank=0)
    store = store or dist.TCPStore(address, port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=hvd.rank(), world_size=hvd.size())
    yield
    dist.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


def contenders_of(case: str, size: int) -> tuple[Contenders, Callable[[], object]]:
    """Return the contenders, and a function to call between turns (so that sums stay finite)."""
    if case == "many":
        tensors = [torch.zeros(MANY[1] // 4) for _ in range(MANY[0])]
        names = [f"tensor.{number}" for number in range(MANY[0])]

        def many() -> None:
            handles = [
                hvd.allreduce_async_(tensor, name=name, op=hvd.Sum) for tensor, name in zip(tensors, names, strict=True)
            ]
            for handle in handles:
                hvd.synchronize(handle)

        def many_gloo() -> None:
            works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
            for pending in works:
                pending.wait()

        return {"hvd": many, "gloo": many_gloo}, lambda: None

    tensor = torch.zeros(size // 4)
    contenders: Contenders = {"gloo": lambda: dist.all_reduce(tensor)}
    if case in ("sum", "average"):
        op = hvd.Sum if case == "sum" else hvd.Average
        contenders["hvd"] = lambda: hvd.allreduce_(tensor, op=op, name="bench")
    else:
        compression = getattr(hvd.Compression, case)
        contenders["hvd"] = lambda: hvd.allreduce(tensor, op=hvd.Sum, name="bench", compression=compression)
        contenders["float32"] = lambda: hvd.allreduce(tensor, op=hvd.Sum, name="bench")
    return contenders, tensor.zero_


def measured(contenders: Contenders, clear, num_rounds: int, barrier, agreed) -> dict[str, list[list[float]]]:
    """Return the seconds of each call, by contender and round. `agreed` gives all ranks rank 0's number."""
    num_calls = {}
    for name, call in contenders.items():
        call()
        barrier()
        begin = time.perf_counter()
        call()
        took = agreed(time.perf_counter() - begin)
        num_calls[name] = max(3, min(300, int(BLOCK_S / took)))
    rows: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(num_rounds):
        for name, call in contenders.items():
            clear()
            call()
            barrier()
            calls = []
            for _ in range(num_calls[name]):
                begin = time.perf_counter()
                call()
                calls.append(time.perf_counter() - begin)
            rows[name].append(calls)
    return rows


def ratios_of(peer: list[list[float]], own: list[list[float]]) -> list[float]:
    """Return the peer's time divided by ours, for each round."""
    return [statistics.median(theirs) / statistics.median(ours) for theirs, ours in zip(peer, own, strict=True)]


def summary(rows: dict[str, list[list[float]]]) -> dict[str, object]:
    ratios = ratios_of(rows["gloo"], rows["hvd"])
    found: dict[str, object] = {
        "times": statistics.median(ratios),
        "times_least": min(ratios),
        "times_most": max(ratios),
    }
    if "float32" in rows:
        found["times_float32"] = statistics.median(ratios_of(rows["float32"], rows["hvd"]))
    for name, rounds in rows.items():
        calls = [call for one in rounds for call in one]
        found[f"{name}_us"] = statistics.median(calls) * 1e6
    return found


def line(result: dict) -> str:
    size = result["bytes"]
    text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
    if result["case"] == "many":
        text = f"{MANY[0]} x {MANY[1] >> 10} KiB"
    plain = ""
    if "times_float32" in result:
        plain = f"  float32 {result['float32_us']:9.1f} us: times {result['times_float32']:.2f}"
    return (
        f"{result['case']:13s} np={result['ranks']} {text:>12s}  hvd {result['hvd_us']:9.1f} us  "
        f"gloo {result['gloo_us']:9.1f} us  "
        f"times {result['times']:5.2f} [{result['times_least']:.2f}-{result['times_most']:.2f}]{plain}"
    )


if __name__ == "__main__":
    arguments = parsed()
    if arguments.worker:
        work(arguments)
    else:
        sys.exit(launch(arguments))
