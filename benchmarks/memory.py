"""Measure the memory of all ranks during training, sharded against DDP: `python -m benchmarks.memory`.

Adam, 100 million parameters, four ranks by default. Every rank reports its proportional set size (shared pages divided
by the processes that map them) after a few steps; the sum is the memory that the host uses.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import horovod.torch as hvd
from benchmarks.collectives import both_joined


def proportional_mib() -> float:
    """Return the proportional set size of this process."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError("the kernel reports no proportional set size")


def worker(contender: str, million: int) -> None:
    """Train a few steps and print the memory of all ranks."""
    with both_joined():
        torch.manual_seed(0)
        layers = max(million // 4, 1)
        model: nn.Module = nn.Sequential(*[nn.Linear(2000, 2000) for _ in range(layers)])
        if contender == "DDP":
            model = nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-4, fused=True)
        if contender == "sharded":
            optimizer = hvd.DistributedOptimizer(optimizer, sharded=True)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 2000)).sum().backward()
            optimizer.step()
        dist.barrier()
        used = torch.tensor([proportional_mib()])
        dist.barrier()
        dist.all_reduce(used)
        if hvd.rank() == 0:
            print(f"{contender} {used.item():.0f}", flush=True)


def measure(contender: str, np: int, million: int) -> float:
    """Return the MiB of all ranks together."""
    command = [sys.executable, "-m", "horovod.runner.launch", "-np", str(np), sys.executable, "-m", "benchmarks.memory"]
    command += ["--worker", contender, "--million", str(million)]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, timeout=900, check=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    """Print both contenders and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--np", type=int, default=4)
    parser.add_argument("--million", type=int, default=100, help="parameters, in millions")
    parser.add_argument("--worker", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        worker(options.worker, options.million)
        return
    used = {name: measure(name, options.np, options.million) for name in ("DDP", "sharded")}
    print(
        f"{options.million} million parameters, Adam, np={options.np}: DDP {used['DDP']:.0f} MiB, "
        f"sharded {used['sharded']:.0f} MiB, that is {used['sharded'] / used['DDP']:.2f} of it"
    )


if __name__ == "__main__":
    main()
