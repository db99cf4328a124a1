"""Measure the time that a job takes to start, rendezvous and end: `python benchmarks/startup.py [--repeats 5]`.

1. `horovodrun -np 2 python s.py` against `torchrun --nproc-per-node 2 s.py`, interleaved, the same script
   under both: once an empty one (the launchers' own cost), once one that initialises, all-reduces and ends.
2. Idle ranks (no torch): start 8, 16, 32, 64 of them, let all gather once, end.
3. The same with torch: `run()` starts 2, 4, 8, 16 ranks that initialise, all-reduce once and return.

Seconds are medians of wall time; `cpu` is the processor time of the launcher and its descendants.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

EMPTY = "import os\nassert 'RANK' in os.environ or 'HOROVOD_RANK' in os.environ\n"
TRAINING = """
import torch
import horovod.torch as hvd
hvd.init()
value = hvd.allreduce(torch.ones(1000), op=hvd.Sum)
assert value.sum().item() == 1000 * hvd.size()
hvd.shutdown()
"""
IDLE = """
import sys
import hora.launch.run

def meet():
    from hora.net.client import ControlClient
    from hora.platforms.detect import detect_world
    from hora.world import World
    world = detect_world()
    client = ControlClient.connect(world.rendezvous, name=f"rank {world.rank}", timeout_s=120)
    everybody = client.gather("meet", b"x", rank=world.rank, size=world.size, timeout_s=120).members
    client.close()
    return len(everybody)
"""
FUNCTION = """
import sys
import hora.launch.run

def meet():
    import torch
    import horovod.torch as hvd
    hvd.init()
    value = hvd.allreduce(torch.ones(1000), op=hvd.Sum)
    hvd.shutdown()
    return int(value.mean())
"""
# Each rank returns the number of ranks that have met.
RUN = """
if __name__ == "__main__":
    num_proc = int(sys.argv[1])
    assert hora.launch.run.run(meet, num_proc=num_proc, start_timeout=120) == [num_proc] * num_proc
"""


def measure(argv: list[str]) -> tuple[float, float]:
    """Return wall and processor seconds of a command with all its descendants."""
    before, began = os.times(), time.perf_counter()
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    wall, after = time.perf_counter() - began, os.times()
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stdout}")
    used = after.children_user + after.children_system - before.children_user - before.children_system
    return wall, used


def compare(name: str, script: Path, repeats: int) -> None:
    contestants = {
        "horovodrun": [sys.executable, "-m", "horovod.runner.launch", "-np", "2", sys.executable, str(script)],
        "torchrun": [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script)],
    }
    times: dict[str, list[tuple[float, float]]] = {contestant: [] for contestant in contestants}
    for _ in range(repeats):
        for contestant, argv in contestants.items():
            times[contestant].append(measure(argv))
    wall = {who: statistics.median(t[0] for t in got) for who, got in times.items()}
    cpu = {who: statistics.median(t[1] for t in got) for who, got in times.items()}
    for who in contestants:
        print(f"{name:10} {who:11} {wall[who]:7.2f} s   cpu {cpu[who]:7.2f} s")
    ratio = wall["torchrun"] / wall["horovodrun"]
    print(f"{name:10} torchrun / horovodrun = {ratio:.2f} (cpu {cpu['torchrun'] / cpu['horovodrun']:.2f})")


def grow(name: str, script: Path, repeats: int, sizes: list[int]) -> None:
    times: dict[int, list[tuple[float, float]]] = {n: [] for n in sizes}
    for _ in range(repeats):
        for num_proc in sizes:
            times[num_proc].append(measure([sys.executable, str(script), str(num_proc)]))
    for num_proc, got in times.items():
        wall, cpu = (statistics.median(t[i] for t in got) for i in (0, 1))
        each = f"{1000 * wall / num_proc:6.1f} ms a rank"
        print(f"{name:8} {num_proc:4} rank{'s' if num_proc > 1 else ' '}   {wall:7.2f} s   {each}   cpu {cpu:7.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--max-ranks", type=int, default=64)
    options = parser.parse_args()
    print(f"{os.cpu_count()} processors, load {os.getloadavg()[0]:.1f}, Python {sys.version.split()[0]}")
    with tempfile.TemporaryDirectory() as folder:
        scripts = {"empty": EMPTY, "training": TRAINING, "idle": IDLE + RUN, "function": FUNCTION + RUN}
        paths = {name: Path(folder) / f"{name}.py" for name in scripts}
        for name, path in paths.items():
            path.write_text(scripts[name])
        compare("empty", paths["empty"], options.repeats)
        compare("training", paths["training"], options.repeats)
        grow("idle", paths["idle"], options.repeats, [n for n in (1, 8, 16, 32, 64, 128) if n <= options.max_ranks])
        grow("function", paths["function"], options.repeats, [n for n in (1, 2, 4, 8, 16) if n <= options.max_ranks])


if __name__ == "__main__":
    main()
