"""Several ranks on one GPU: `python -m benchmarks.shared_gpu`. Allreduce of CUDA tensors, ours against gloo.

Each contender runs in its own processes, started by its own launcher (horovodrun, torchrun), in turns. `ours` goes
through the GPU's memory, `host` through host memory (`HORA_CUDA_IPC=0`). Medians over the rounds, with the smallest
and the largest. NCCL takes part if it supports several ranks on a GPU (2.30 and newer).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

SIZES = (4096, 2**16, 2**20, 16 * 2**20, 100_000_000)
CONTENDERS = ("ours", "host", "gloo", "nccl")


def rank(contender: str, iterations: int) -> None:
    """Run one rank; rank 0 prints {size: seconds}."""
    import torch

    torch.cuda.set_device(0)
    reduce: Callable[[torch.Tensor], object]
    if contender in ("ours", "host"):
        import horovod.torch as hvd

        hvd.init()
        me, num_ranks, barrier = hvd.rank(), hvd.size(), hvd.barrier

        def reduce(tensor: torch.Tensor) -> object:
            return hvd.allreduce_(tensor, op=hvd.Sum, name="t")
    else:
        import torch.distributed as dist

        dist.init_process_group(contender)
        me, num_ranks, barrier = dist.get_rank(), dist.get_world_size(), dist.barrier
        reduce = dist.all_reduce

    found = {}
    for num_bytes in SIZES:
        tensor, times = torch.empty(num_bytes // 4, device="cuda"), []
        for number in range(iterations + 3):
            tensor.fill_(me + 1.0)
            torch.cuda.synchronize()
            barrier()
            begin = time.perf_counter()
            reduce(tensor)
            torch.cuda.synchronize()
            if number >= 3:
                times.append(time.perf_counter() - begin)
        assert bool((tensor == num_ranks * (num_ranks + 1) / 2).all()), tensor
        found[num_bytes] = statistics.median(times)
    if me == 0:
        print("RESULT", json.dumps(found), flush=True)


def run(contender: str, np: int, iterations: int) -> dict[int, float] | None:
    """Run one job; return its results, or None if it failed."""
    own = [sys.executable, "-m", "hora", "run", "-np", str(np), sys.executable, "-m", "benchmarks.shared_gpu"]
    other = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(np), "-m", "benchmarks.shared_gpu"]
    command = [*(own if contender in ("ours", "host") else other), "rank", contender, "--iterations", str(iterations)]
    env = {**os.environ, "HORA_CUDA_IPC": str(int(contender != "host")), "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    for line in done.stdout.splitlines():
        if "RESULT" in line:
            return {int(size): s for size, s in json.loads(line[line.index("{") :]).items()}
    print(f"{contender} at np={np}: no result, exit status {done.returncode}: {done.stderr[-300:]!r}", file=sys.stderr)
    return None


def measure(np: int, rounds: int, iterations: int) -> None:
    results: dict[str, list[dict[int, float]]] = {contender: [] for contender in CONTENDERS}
    for _ in range(rounds):
        for contender, found in list(results.items()):
            got = run(contender, np, iterations)
            if got is None:
                results.pop(contender)
            else:
                found.append(got)
    for size in SIZES:
        for contender, rows in results.items():
            times = [row[size] * 1e6 for row in rows]
            against = statistics.median(row[size] / own[size] for row, own in zip(rows, results["ours"], strict=True))
            took = f"{statistics.median(times):>8.0f} µs ({min(times):.0f} to {max(times):.0f})"
            print(f"np={np} {size:>10} bytes  {contender:>5} {took}, {against:.2f} of ours")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", help="rank CONTENDER: what the jobs themselves run")
    parser.add_argument("-np", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=15)
    options = parser.parse_args()
    if options.what:
        rank(options.what[1], options.iterations)
    else:
        for np in options.np:
            measure(np, options.rounds, options.iterations)


if __name__ == "__main__":
    main()
