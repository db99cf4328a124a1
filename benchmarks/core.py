"""The fast core: collectives and training steps of one host, each contender in processes of its own.

    python -m benchmarks.core                         np = 2: all parts, about ten minutes
    python -m benchmarks.core --quick                 a look at everything, about two minutes
    python -m benchmarks.core -np 8 --parts collectives,training --json core8.json

gloo and DDP are started by torchrun, ours by horovodrun, with and without the native part. All stay alive, asleep, and
take turns: a round gives every contender one turn, and ratios are taken inside a round. "times" is gloo's (or DDP's)
time divided by ours: the median over the rounds, with the smallest and largest in brackets. `copies`: our time in plain
copies of the same bytes, made by all ranks at once. One thread a rank, float32, tensors in place, one name. DeepSpeed's
allreduce through shared memory takes part in sums where DEEPSPEED_SOURCE names a folder with its sources (its sdist,
unpacked).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.collectives import num_bytes
from benchmarks.core_rank import MANY, PLAIN, built_deepspeed
from benchmarks.models import WORKLOADS
from benchmarks.names import some_of
from benchmarks.training import PEERS

PARTS = ("collectives", "training", "phases", "many", "idle", "profile")
SIZES = ("4K", "64K", "1M", "16M", "64M")
OURS = ("python", "native")
LIMIT_S = 600.0  # to start, or for one turn


class Group:
    """The ranks of one contender, started by its own launcher, and the connections over which they get orders."""

    def __init__(self, contender: str, num_ranks: int, folder: Path) -> None:
        self.contender = contender
        path = folder / f"{contender}.{num_ranks}"
        worker = ["-m", "benchmarks.core_rank", contender, str(path)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if contender in PLAIN:
            with socket.create_server(("127.0.0.1", 0)) as probe:
                port = probe.getsockname()[1]
            env.setdefault("GLOO_SOCKET_IFNAME", "lo")
            launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_ranks)]
            command = [*launcher, "--master-addr", "127.0.0.1", "--master-port", str(port), *worker]
        else:
            env["HORA_NATIVE"] = "0" if contender == "python" else "1"
            launcher = [sys.executable, "-m", "horovod.runner.launch", "-np", str(num_ranks)]
            command = [*launcher, sys.executable, *worker]
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(str(path))
            server.listen(num_ranks)
            server.settimeout(LIMIT_S)
            self._process = subprocess.Popen(command, env=env, stdout=sys.stderr)
            streams = {}
            for _ in range(num_ranks):
                stream = self._accepted(server)
                _, rank, _ = json.loads(stream.readline())
                streams[rank] = stream
        self._streams = [streams[rank] for rank in range(num_ranks)]

    def _accepted(self, server: socket.socket) -> Any:
        connection, _ = server.accept()
        connection.settimeout(LIMIT_S)
        return connection.makefile("rw")

    def ask(self, *order: Any) -> list[Any]:
        """The answers of all ranks."""
        for stream in self._streams:
            print(json.dumps(order), file=stream, flush=True)
        lines = [stream.readline() for stream in self._streams]
        if not all(lines):
            raise RuntimeError(f"a rank of {self.contender} ended in {order}")
        return [json.loads(line) for line in lines]

    def end(self) -> None:
        """Let them go home."""
        for stream in self._streams:
            with contextlib.suppress(OSError):
                print(json.dumps(["end"]), file=stream, flush=True)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()


@contextlib.contextmanager
def groups(contenders: Sequence[str], num_ranks: int) -> Iterator[dict[str, Group]]:
    found: dict[str, Group] = {}
    with tempfile.TemporaryDirectory() as folder:
        try:
            for contender in contenders:
                found[contender] = Group(contender, num_ranks, Path(folder))
            yield found
        finally:
            for group in found.values():
                group.end()


def ours() -> tuple[str, ...]:
    """Our ways: also the native one, where its library was built."""
    from hora.engine.shm import native

    if native.absence() is None:
        return OURS
    source = "src/hora/engine/shm/native.c"
    build = f"cc -O3 -std=gnu11 -ffp-contract=off -fPIC -shared -o {Path(source).with_name('libhora.so')} {source}"
    print(f"no native part: {native.absence()}; {build}", flush=True)
    return OURS[:1]


def spread(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):6.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"


def num_calls(size: int, num_ranks: int, quick: bool) -> int:
    """As many as fit a fifth of a second or so, of the slowest contender."""
    most = 400 if num_ranks <= 4 else 100
    return max(3, min(most, (24 << 20) // size) // (4 if quick else 1))


def measure_case(found: dict[str, Group], case: str, label: str, size: int, rounds: int, calls: int) -> dict[str, Any]:
    """One row: every contender's medians, round by round."""
    rows: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, group in found.items():
            if name == "deepspeed" and case != "sum":
                continue
            what = "sum" if name == "gloo" and case not in ("many", "copy") else case
            answers = group.ask("turn", what, size, calls)
            rows.setdefault(name, []).append(statistics.mean(answer["median"] for answer in answers))
        if case != "many":
            answers = found["gloo"].ask("turn", "copy", size, calls)
            rows.setdefault("copy", []).append(statistics.mean(answer["median"] for answer in answers))
    return {"case": case, "size": label, "us": rows}


def show_case(row: dict[str, Any], num_ranks: int) -> str:
    us = row["us"]
    medians = {name: statistics.median(values) for name, values in us.items()}
    text = f"{row['case']:10s} np={num_ranks:<3d}{row['size']:>8s}  gloo {medians['gloo']:10.1f} us"
    for name in OURS:
        if name in us:
            ratios = [theirs / mine for theirs, mine in zip(us["gloo"], us[name], strict=True)]
            copies = f" = {medians[name] / medians['copy']:5.1f} copies" if "copy" in us else ""
            text += f"   {name} {medians[name]:9.1f} us{copies} times {spread(ratios)}"
    return text + (f"   deepspeed {medians['deepspeed']:9.1f} us" if "deepspeed" in us else "")


def collectives(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Every case and size."""
    np, rounds, rows, contenders = arguments.num_ranks, arguments.rounds, [], ["gloo", *ours()]
    if "DEEPSPEED_SOURCE" in os.environ:
        built_deepspeed()  # once, before its ranks load it
        contenders.append("deepspeed")
    with groups(contenders, np) as found:
        for case in ("sum", "average"):
            for label in arguments.sizes.split(","):
                size = num_bytes(label)
                rows.append(measure_case(found, case, label, size, rounds, num_calls(size, np, arguments.quick)))
                print(show_case(rows[-1], np), flush=True)
        rows.append(measure_case(found, "many", "1000x1K", MANY[0] * MANY[1], rounds, 3))
        print(show_case(rows[-1], np), flush=True)
    return rows


def training(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Training steps against DDP, DDP with warm memory, and alone: two ranks that do not talk."""
    rows = []
    with groups(["alone", *PEERS, "overlap", "sharded"], arguments.num_ranks) as found:
        for model in arguments.models:
            losses = {name: group.ask("make", model)[0][-1] for name, group in found.items()}
            times: dict[str, list[float]] = {}
            work: dict[str, list[float]] = {}
            for _ in range(arguments.rounds):
                for name, group in found.items():
                    answers = group.ask("steps", model)
                    times.setdefault(name, []).append(statistics.mean(answer[0] for answer in answers))
                    work.setdefault(name, []).append(statistics.mean(answer[1] for answer in answers))
            rows.append({"model": model, "ms": times, "cpu_ms": work, "losses": losses})
            print(show_step(rows[-1], arguments.num_ranks), flush=True)
    return rows


def show_step(row: dict[str, Any], num_ranks: int) -> str:
    ms = row["ms"]
    text = f"{row['model']:11s} np={num_ranks:<3d}"
    for name, values in ms.items():
        cpu = statistics.median(row["cpu_ms"][name])
        text += f" {name} {statistics.median(values):.2f} ms (cpu {cpu:.2f}) "
    for peer in PEERS:
        for name in ("overlap", "sharded"):
            ratios = [theirs / mine for theirs, mine in zip(ms[peer], ms[name], strict=True)]
            text += f" {peer}/{name} {spread(ratios)}"
    losses = [loss for name, loss in row["losses"].items() if name != "alone"]
    return text + ("  losses equal" if max(losses) - min(losses) < 1e-3 else f"  losses {losses}")


def phases(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Where the processor time of a step goes, in forward passes: machines change their speed, and no rank talks in
    one. "warm": alone, with memory kept as `hvd.init()` keeps it.
    """
    rows = []
    with groups(["alone", "warm", "DDP", "overlap", "sharded"], arguments.num_ranks) as found:
        for model in arguments.models:
            for name, group in found.items():
                spent = [statistics.mean(column) for column in zip(*group.ask("phases", model), strict=True)]
                forward, total = spent[1], sum(spent)
                shares = dict(zip(("backward", "step", "other threads"), spent[2:], strict=True))
                text = "  ".join(f"{what} {ms / forward:.2f}" for what, ms in shares.items())
                print(f"{model:11s} {name:8s} {text}  sum {total / forward:.2f} = {total:.2f} ms", flush=True)
                rows.append({"model": model, "contender": name, "ms": spent})
    return rows


def many(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """4 KiB among more and more ranks of this host."""
    rows = []
    for np in (int(text) for text in arguments.many.split(",")):
        with groups(["gloo", *ours()], np) as found:
            rounds = max(3, arguments.rounds // 3)
            row = measure_case(found, "sum", "4K", 4096, rounds, num_calls(4096, np, arguments.quick))
            rows.append({**row, "ranks": np})
            print(show_case(row, np), flush=True)
    return rows


def idle(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """What ranks cost that have nothing to do."""
    np = arguments.idle_ranks
    with groups(["native"], np) as found:
        shares = found["native"].ask("idle", 3.0 if arguments.quick else 15.0)
    total = sum(shares)
    each, most = 100 * total / np, 100 * max(shares)
    print(f"{np} idle ranks: {100 * total:.2f} % of a core, {each:.3f} % each, the busiest {most:.3f} %", flush=True)
    return [{"ranks": np, "shares": shares}]


def profile(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Where the time of 4 KiB and of the tiny step goes, on rank 0."""
    rows = []
    with groups([*ours(), "overlap", "sharded"], 2) as found:
        for name, group in found.items():
            if name in OURS:
                text = group.ask("profile", "sum", 4096)[0]
            else:
                group.ask("make", "tiny MLP")
                text = group.ask("profile", "step", 0)[0]
            what = "4 KiB" if name in OURS else "tiny step"
            print(f"\n== {what}, {name}: {text}", flush=True)
            rows.append({"what": what, "contender": name, "text": text})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="num_ranks", help="ranks (default: 2)")
    parser.add_argument("--parts", type=some_of(PARTS), default="all", help=f"of {','.join(PARTS)} (default: all)")
    parser.add_argument("--sizes", default=",".join(SIZES), help="bytes, with K or M")
    parser.add_argument("--models", type=some_of(WORKLOADS), default="all", help="for the parts training and phases")
    parser.add_argument("--rounds", type=int, default=0, help="turns of each contender (default: 9, or 3 with --quick)")
    parser.add_argument("--many", default="", help="numbers of ranks for 4 KiB (default: 2,4,8,16; 2,4 with --quick)")
    parser.add_argument("--idle-ranks", type=int, default=0, help="default: 64; 8 with --quick")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here as well")
    arguments = parser.parse_args()
    quick = arguments.quick
    arguments.rounds = arguments.rounds or (3 if quick else 9)
    arguments.many = arguments.many or ("2,4" if quick else "2,4,8,16")
    arguments.idle_ranks = arguments.idle_ranks or (8 if quick else 64)
    import torch

    where = {"machine": platform.platform(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__}
    print(f"{where}, rounds: {arguments.rounds}", flush=True)
    parts = {
        "collectives": collectives,
        "training": training,
        "phases": phases,
        "many": many,
        "idle": idle,
        "profile": profile,
    }
    results: dict[str, Any] = {"where": where, "np": arguments.num_ranks}
    for part in arguments.parts:
        results[part] = parts[part](arguments)
        if arguments.json:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
