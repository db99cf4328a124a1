"""Measure how long the death of a rank interrupts a training, the steps it costs, and the overhead without failures.

`python -m benchmarks.elastic --peers torchrun,torchft`

1. Recovery: three ranks train, and one is killed (SIGKILL), ten times. Reports the time from the kill to the next
completed step, its phases, the repeated steps, and the time from the start of a newcomer's process to its first step.
Contenders: `hvd` per step under `hora run --min-np 2`; DDP with `hora.elastic.protect`, and the same with `--spares`;
`torchrun --max-restarts` with DDP and a checkpoint every step; torchft (`pip install torchft==0.2.0`) over gloo, with
each rank a replica that restarts after a second, as ours do.
2. Overhead: a step without failures against the same step without fault tolerance, in turns.

torchft's settings (`LIGHTHOUSE`) are the fastest that lost no healthy rank here. The ranks run `--worker`.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
MYSELF = [sys.executable, "-m", "benchmarks.elastic"]
LIMIT_S = 180.0
# A heartbeat every 50 ms, and death after half a second; the defaults are 100 ms and five seconds.
LIGHTHOUSE = {"join_timeout_ms": 100, "quorum_tick_ms": 10, "heartbeat_timeout_ms": 500}
HORA_RUN = [sys.executable, "-m", "hora", "run"]
OURS = ("hora", "protect", "spares")
# In two parts: a program that names such a variable in one is not forked under --spares.
FRESH_STORE = "TORCH" + "_DISABLE_SHARE_RDZV_TCP_STORE"
NUM_TURNS = {"tiny MLP": 51, "MLP 4x2048": 9, "ResNet18": 9}
STEPS_A_TURN = {"tiny MLP": 100, "MLP 4x2048": 4, "ResNet18": 2}


def log(folder: Path, **event: Any) -> None:
    """Append an event as one line, in one write: several processes append to the file."""
    line = json.dumps({"at": time.time(), "pid": os.getpid(), **event}) + "\n"
    with open(folder / "events", "a", buffering=1 << 16) as file:
        file.write(line)


def network() -> Any:
    import torch

    return torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))


def work_hora(folder: Path) -> None:
    import torch

    import horovod.torch as hvd
    from horovod.common.exceptions import HorovodInternalError

    torch.set_num_threads(1)
    hvd.init()
    net = network()
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0, per_step=True)
    state.register_reset_callbacks([lambda: log(folder, what="met", size=hvd.size())])

    worlds: list[str] = []

    def steps(state: Any) -> None:
        log(folder, what="synced", size=hvd.size())
        worlds.append(os.environ["HORA_GENERATION"])
        while not (folder / "stop").exists():
            optimizer.zero_grad()
            net(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            state.step += 1
            log(folder, what="step", size=hvd.size(), number=state.step, rank=hvd.rank(), world=worlds[-1])
            state.commit()
            time.sleep(0.01)

    @hvd.elastic.run
    def train(state: Any) -> None:
        try:
            steps(state)
        except HorovodInternalError:
            log(folder, what="noticed")
            raise

    train(state)


def work_protect(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hora.elastic

    torch.set_num_threads(1)
    dist.init_process_group("hora")
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters())
    hora.elastic.protect(model, optimizer)
    is_over = torch.zeros(1)
    while not is_over.item():
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        number = int(next(iter(optimizer.state.values()))["step"])
        world, size = os.environ["HORA_GENERATION"], dist.get_world_size()
        log(folder, what="step", size=size, number=number, rank=dist.get_rank(), world=world)
        is_over.fill_((folder / "stop").exists())
        dist.all_reduce(is_over)
        time.sleep(0.01)
    dist.destroy_process_group()


def work_torchrun(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    log(folder, what="met", size=dist.get_world_size())
    model = DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters())
    step, checkpoint = 0, folder / "checkpoint"
    if checkpoint.exists():
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    log(folder, what="synced", size=dist.get_world_size())
    while not (folder / "stop").exists():
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        step += 1
        world = os.environ["TORCHELASTIC_RESTART_COUNT"]
        log(folder, what="step", size=dist.get_world_size(), number=step, world=world)
        if dist.get_rank() == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(content, folder / "partial")
            (folder / "partial").replace(checkpoint)
        time.sleep(0.01)
    os._exit(0)  # the ranks see the stop file at different steps


def torchft_manager(net: Any, optimizer: Any, num_replicas: int) -> Any:
    """Return the manager of a replica of one process; the environment names the lighthouse and its store."""
    from datetime import timedelta

    import torchft

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])

    return torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"net": net.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=num_replicas,
        timeout=timedelta(seconds=5),
        heartbeat_interval=timedelta(milliseconds=50),
        store_addr="127.0.0.1",
        store_port=int(os.environ["STORE_PORT"]),
        hostname="127.0.0.1",
        rank=0,
        world_size=1,
    )


def work_torchft(folder: Path) -> None:
    import torch
    import torchft

    torch.set_num_threads(1)
    net = network()
    inner = torch.optim.Adam(net.parameters())
    manager = torchft_manager(net, inner, 2)
    model = torchft.DistributedDataParallel(manager, net)
    optimizer = torchft.Optimizer(manager, inner)
    while not (folder / "stop").exists():
        before = manager.current_step()
        optimizer.zero_grad()
        model(torch.randn(32, 256)).square().mean().backward()
        optimizer.step()
        if manager.current_step() > before:
            size, number = manager.num_participants(), manager.current_step()
            log(folder, what="step", size=size, number=number, world=str(manager._quorum_id))
        time.sleep(0.01)
    os._exit(0)  # the ranks see the stop file at different steps


def in_turns(folder: Path, name: str, plain: Callable[[], None], guarded: Callable[[], None], is_first: bool) -> None:
    """Time both in alternating blocks of steps; each goes first in every other turn."""
    taken: dict[str, list[float]] = {"plain": [], "guarded": []}
    for turn in range(NUM_TURNS[name] + 1):
        pair = [("plain", plain), ("guarded", guarded)]
        for kind, step in pair if turn % 2 else reversed(pair):
            began = time.perf_counter()
            for _ in range(STEPS_A_TURN[name]):
                step()
            if turn:
                taken[kind].append((time.perf_counter() - began) / STEPS_A_TURN[name])
    if is_first:
        ratios = [guarded / plain for plain, guarded in zip(taken["plain"], taken["guarded"], strict=True)]
        log(folder, what=name, plain_s=statistics.median(taken["plain"]), ratio=statistics.median(ratios))


def trained(name: str) -> tuple[Any, Any]:
    """Return a network and its input."""
    import torch

    from benchmarks.models import WORKLOADS

    torch.manual_seed(0)
    return WORKLOADS[name].build(), torch.randn(WORKLOADS[name].shape)


def work_overhead_hora(folder: Path) -> None:
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    for name in STEPS_A_TURN:
        steps = []
        for guarded in (False, True):
            net, inputs = trained(name)
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD(net.parameters(), 1e-3), net.named_parameters())
            state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0, per_step=True) if guarded else None
            if state is not None:
                state.sync()

            def step(net: Any = net, inputs: Any = inputs, optimizer: Any = optimizer, state: Any = state) -> None:
                optimizer.zero_grad()
                net(inputs).square().mean().backward()
                optimizer.step()
                if state is not None:
                    state.step += 1

            steps.append(step)
        in_turns(folder, name, *steps, is_first=hvd.rank() == 0)


def work_overhead_protect(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hora.elastic
    from hora.torch.protection.protect import end_loop

    torch.set_num_threads(1)
    dist.init_process_group("hora")
    plain = dist.new_group()  # `protect` changes the calls of the default group alone
    for name in STEPS_A_TURN:
        steps = []
        for group in (plain, dist.group.WORLD):
            net, inputs = trained(name)
            model = DistributedDataParallel(net, process_group=group)
            optimizer = torch.optim.SGD(net.parameters(), 1e-3)
            if group is dist.group.WORLD:
                hora.elastic.protect(model, optimizer)

            def step(model: Any = model, inputs: Any = inputs, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

            steps.append(step)
        in_turns(folder, name, *steps, is_first=dist.get_rank() == 0)
        end_loop()
    dist.destroy_process_group()


def work_overhead_torchft(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    import torchft

    torch.set_num_threads(1)
    rank = int(os.environ["REPLICA"])
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    for name in STEPS_A_TURN:
        steps = []
        for guarded in (False, True):
            net, inputs = trained(name)
            optimizer: Any = torch.optim.SGD(net.parameters(), 1e-3)
            if guarded:
                manager = torchft_manager(net, optimizer, 2)
                model: Any = torchft.DistributedDataParallel(manager, net)
                optimizer = torchft.Optimizer(manager, optimizer)
            else:
                model = torch.nn.parallel.DistributedDataParallel(net)

            def step(model: Any = model, inputs: Any = inputs, optimizer: Any = optimizer) -> None:
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

            steps.append(step)
        in_turns(folder, name, *steps, is_first=rank == 0)
        dist.barrier()
        manager.shutdown(wait=False)
    os._exit(0)


def keep_replicas(folder: Path, worker: str, count: int) -> None:
    """Run a lighthouse and torchft's replicas; restart a dead replica after a second."""
    import torch.distributed as dist
    from torchft.coordination import LighthouseServer

    lighthouse = LighthouseServer(bind="127.0.0.1:0", min_replicas=2, **LIGHTHOUSE)
    stores: list[Any] = []
    address = f"http://127.0.0.1:{lighthouse.address().rpartition(':')[2]}"

    def start(number: int) -> subprocess.Popen[bytes]:
        # Under torchrun the agent owns the store: survivors must find it when a replica is killed.
        stores.append(dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
        own = {"REPLICA": str(number), "STORE_PORT": str(stores[-1].port)}
        environment = {**os.environ, "TORCHFT_LIGHTHOUSE": address, **own}
        return subprocess.Popen([*MYSELF, "--folder", str(folder), "--worker", worker], env=environment)

    replicas, due = [start(number) for number in range(count)], [0.0] * count
    try:
        while not (folder / "stop").exists() and any(replica.poll() is None for replica in replicas):
            for number, replica in enumerate(replicas):
                if replica.poll() is None or replica.returncode == 0:
                    continue
                due[number] = due[number] or time.monotonic() + 1.0
                if time.monotonic() > due[number]:
                    replicas[number], due[number] = start(number), 0.0
            time.sleep(0.01)
    finally:
        for replica in replicas:
            try:
                replica.wait(5)
            except subprocess.TimeoutExpired:
                replica.kill()
        lighthouse.shutdown()


def events(folder: Path) -> list[dict[str, Any]]:
    try:
        lines = (folder / "events").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:  # a worker was killed while writing it
            continue
    return found


def wait_for(what: str, find: Callable[[], Any], job: subprocess.Popen[bytes]) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (found := find()):
        if job.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not happen; the job's status is {job.poll()}")
        time.sleep(0.005)
    return found


@contextmanager
def running(command: list[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    with open(folder / "output", "wb") as output:
        job = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            yield job
            (folder / "stop").touch()
            job.wait(LIMIT_S)
        except RuntimeError as error:
            raise RuntimeError(f"{error}\n{(folder / 'output').read_text(errors='replace')[-4000:]}") from None
        finally:
            if job.poll() is None:
                job.terminate()
                job.wait(LIMIT_S)


def recovery(worker: str, command: list[str], num_kills: int) -> list[dict[str, float]]:
    """Return, for each kill, the seconds until the first worker reached each phase."""
    measured, victims = [], set()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with running([*command, "--folder", temporary, "--worker", worker], folder) as job:
            killed = 0.0
            for _ in range(num_kills):
                # Kill again only when all ranks are back and have done some steps.
                def whole(since: float = killed) -> list[dict[str, Any]]:
                    steps = [e for e in events(folder) if e["what"] == "step" and e["at"] > since and e["size"] == 3]
                    return steps if len(steps) > 15 else []

                steps = wait_for("three ranks training", whole, job)
                victim = random.choice(sorted({e["pid"] for e in steps[-3:]}))
                rank = next((e.get("rank", -1) for e in reversed(steps) if e["pid"] == victim), -1)
                time.sleep(random.uniform(0, 0.1))
                victims.add(victim)
                before = {e["world"] for e in events(folder) if e["what"] == "step"}
                killed = time.time()
                os.kill(victim, signal.SIGKILL)

                def after(before: set[str] = before, rank: int = rank, since: float = killed) -> dict[str, float]:
                    reached: dict[str, float] = {}
                    for event in events(folder):
                        if event["at"] > since and (event["what"] != "step" or event["world"] not in before):
                            reached.setdefault(event["what"], event["at"] - since)
                    return reached | {"rank": rank} if "step" in reached else {}

                measured.append(wait_for("a step after the kill", after, job))
            seen = events(folder)
            measured[-1]["lost"] = steps_lost(seen, victims)
            measured[-1]["newcomer"] = statistics.median(newcomers(seen) or [float("nan")])
            measured[-1]["guests"] = statistics.median(pauses(seen) or [float("nan")])
    return measured


def steps_lost(seen: list[dict[str, Any]], victims: set[int]) -> int:
    """Count the steps that survivors completed in a world and the next world repeats.

    If all survivors restart from the first step, all steps are lost.
    """
    worlds: dict[str, list[int]] = {}
    for event in seen:
        if event["what"] == "step" and event["pid"] not in victims:
            worlds.setdefault(event["world"], []).append(event["number"])
    return sum(max(max(before) - min(after) + 1, 0) for before, after in itertools.pairwise(worlds.values()))


def newcomers(seen: list[dict[str, Any]]) -> list[float]:
    """Return the seconds from the start of each late process to its first step."""
    began = min(e["at"] for e in seen if e["what"] == "step")
    started = {e["pid"]: e["at"] for e in seen if e["what"] == "start" and e["at"] > began}
    stepped: dict[int, float] = {}
    for event in seen:
        if event["what"] == "step":
            stepped.setdefault(event["pid"], event["at"])
    return [stepped[pid] - at for pid, at in started.items() if pid in stepped]


def pauses(seen: list[dict[str, Any]]) -> list[float]:
    """Return how much longer than usual the step took in which a newcomer first took part, for the other ranks."""
    found = []
    of: dict[int, list[dict[str, Any]]] = {}
    for event in seen:
        if event["what"] == "step":
            of.setdefault(event["pid"], []).append(event)
    for steps in of.values():
        gaps = [(b["at"] - a["at"], b["size"] - a["size"]) for a, b in itertools.pairwise(steps)]
        usual = statistics.median([gap for gap, grown in gaps if not grown] or [0.0])
        found += [gap - usual for gap, grown in gaps if grown > 0]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--peers", default="torchrun", help="torchrun, torchft, or both with a comma")
    parser.add_argument("--only", choices=("recovery", "overhead"))
    parser.add_argument("--worker", choices=WORKERS)
    parser.add_argument(
        "--replicas", type=int, help="keep this many of these workers running, as torchft's launcher does"
    )
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    peers = arguments.peers.split(",") if arguments.peers else []
    for peer in peers:
        if peer not in ("torchrun", "torchft"):
            raise SystemExit(f"--peers takes torchrun and torchft, but got {peer}")
    if arguments.replicas:
        keep_replicas(arguments.folder, arguments.worker, arguments.replicas)
    elif arguments.worker:
        log(arguments.folder, what="start")
        WORKERS[arguments.worker](arguments.folder)
    else:
        reports = {
            "recovery": lambda: report_recovery(arguments.kills, peers),
            "overhead": lambda: report_overhead(peers),
        }
        for name, report in reports.items():
            if arguments.only in (None, name):
                report()


WORKERS: dict[str, Callable[[Path], None]] = {
    "hora": work_hora,
    "protect": work_protect,
    "spares": work_protect,
    "torchrun": work_torchrun,
    "torchft": work_torchft,
    "overhead-hora": work_overhead_hora,
    "overhead-protect": work_overhead_protect,
    "overhead-torchft": work_overhead_torchft,
}


def report_recovery(num_kills: int, peers: list[str]) -> None:
    cooldown = ["--blacklist-cooldown-range", "1", "1"]
    # Use a fresh store for every restart: in a shared one ranks find the addresses of dead ranks. Allow more restarts
    # than kills, because some ranks fail by themselves.
    os.environ[FRESH_STORE] = "1"
    ours = [*HORA_RUN, "-np", "3", "--min-np", "2"]
    commands = {
        "hora": [*ours, *cooldown, *MYSELF],
        "protect": [*ours, *cooldown, *MYSELF],
        "spares": [*ours, "--spares", str(num_kills), *MYSELF],
        "torchrun": [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "3", "--max-restarts=100", *MYSELF[1:]],
        "torchft": [*MYSELF, "--replicas", "3"],
    }
    results = {name: recovery_of(name, commands[name], num_kills) for name in (*OURS, *peers)}
    for peer in peers:
        print(f"standing still after a kill, {peer} / hora: {results[peer] / results['hora']:.1f}")


def recovery_of(name: str, command: list[str], num_kills: int) -> float:
    measured = recovery(name, command, num_kills)
    for phase in ("noticed", "met", "synced", "step"):
        values = [m[phase] for m in measured if phase in m]
        if values:
            print(f"{name:9} {phase:8} after {statistics.median(values):6.3f} s (worst {max(values):.3f})")
    first = [m["step"] for m in measured if m["rank"] == 0]
    if first:
        print(f"{name:9} step     after {statistics.median(first):6.3f} s where rank 0 was killed ({len(first)} times)")
    last = measured[-1]
    print(
        f"{name:9} {len(measured)} kills, {last['lost']} steps lost; a newcomer's first step after "
        f"{last['newcomer']:.1f} s, which the others waited for {last['guests']:.3f} s"
    )
    return statistics.median(m["step"] for m in measured)


def report_overhead(peers: list[str]) -> None:
    elastic = ["-np", "2", "--min-np", "2"]
    commands = {"hora": [*HORA_RUN, "-np", "2", *MYSELF], "protect": [*HORA_RUN, *elastic, *MYSELF]}
    if "torchft" in peers:
        commands["torchft"] = [*MYSELF, "--replicas", "2"]
    for peer, command in commands.items():
        with tempfile.TemporaryDirectory() as temporary:
            arguments = ["--folder", temporary, "--worker", f"overhead-{peer}"]
            subprocess.run([*command, *arguments], check=True, stdin=subprocess.DEVNULL, timeout=600)
            for event in events(Path(temporary)):
                if event["what"] in STEPS_A_TURN:
                    step_ms, more = 1e3 * event["plain_s"], event["ratio"] - 1
                    print(f"{peer:9} {event['what']}: a step takes {step_ms:.2f} ms, fault tolerance {more:+.1%}")


if __name__ == "__main__":
    main()
