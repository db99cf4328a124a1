"""How long does a training stand still when a rank dies, and what does a commit cost? `python benchmarks/elastic.py`.

1. Recovery: three ranks train; one is killed (SIGKILL), ten times over. The time from the kill to the next completed
   optimizer step, under `horovodrun --min-np 2` with a commit every step, and under `torchrun --max-restarts` with DDP
   and a checkpoint every step, same model, same data, one after the other. And where that time goes.
2. Commit: Adam, 25 M parameters, two ranks: one commit every 10 steps as a share of the steps' time; the same with the
   commits also written to disk.

`--worker` is what the ranks run.
"""

from __future__ import annotations

import argparse
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
LIMIT_S = 180.0


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def log(folder: Path, **event: Any) -> None:
    """One line per event, in one write: several processes append to the file."""
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
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0)
    state.register_reset_callbacks([lambda: log(folder, what="met", size=hvd.size())])

    def steps(state: Any) -> None:
        log(folder, what="synced", size=hvd.size())
        while not (folder / "stop").exists():
            optimizer.zero_grad()
            net(torch.randn(32, 256)).square().mean().backward()
            optimizer.step()
            state.step += 1
            log(folder, what="step", size=hvd.size(), rank=hvd.rank())
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
        log(folder, what="step", size=dist.get_world_size(), rank=dist.get_rank())
        if dist.get_rank() == 0:
            content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(content, folder / "partial")
            (folder / "partial").replace(checkpoint)
        time.sleep(0.01)
    os._exit(0)  # the ranks see the stop file at different steps


def work_commit(folder: Path, durable: bool) -> None:
    import torch

    import horovod.torch as hvd

    torch.set_num_threads(1)
    hvd.init()
    net = torch.nn.Sequential(*[torch.nn.Linear(2500, 2500) for _ in range(4)])
    optimizer = hvd.DistributedOptimizer(torch.optim.Adam(net.parameters()), net.named_parameters())
    state = hvd.elastic.TorchState(model=net, optimizer=optimizer, step=0)
    if durable:
        state.persist(folder / f"commits.{hvd.rank()}")
    inputs = torch.randn(32, 2500)
    steps_s, commits_s = [], []
    for step in range(45):
        began = time.perf_counter()
        optimizer.zero_grad()
        net(inputs).square().mean().backward()
        optimizer.step()
        steps_s.append(time.perf_counter() - began)
        if step % 10 == 9:
            began = time.perf_counter()
            state.commit()
            commits_s.append(time.perf_counter() - began)
    state.flush()
    if hvd.rank() == 0:
        num = sum(p.numel() for p in net.parameters())
        # The first steps and the first commits make buffers; they are not what a training pays.
        log(
            folder,
            what="commit",
            step_s=statistics.median(steps_s[5:]),
            commit_s=statistics.median(commits_s[1:]),
            num=num,
        )


# ---- measuring ------------------------------------------------------------------------------------------------------


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
    """For each kill the seconds until the first worker reached each phase."""
    measured = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        with running([*command, __file__, "--folder", temporary, "--worker", worker], folder) as job:
            killed = 0.0
            for _ in range(num_kills):
                # Full strength, and some steps done: then the next blow.
                def whole(since: float = killed) -> list[dict[str, Any]]:
                    steps = [e for e in events(folder) if e["what"] == "step" and e["at"] > since and e["size"] == 3]
                    return steps if len(steps) > 15 else []

                steps = wait_for("three ranks training", whole, job)
                victim = random.choice(sorted({e["pid"] for e in steps[-3:]}))
                time.sleep(random.uniform(0, 0.1))
                killed = time.time()
                os.kill(victim, signal.SIGKILL)

                def after(victim: int = victim, since: float = killed) -> dict[str, float]:
                    reached: dict[str, float] = {}
                    later = [e for e in events(folder) if e["at"] > since and e["pid"] != victim]
                    begun = [e for e in later if e["what"] in ("met", "synced")]
                    for event in [e for e in later if e["what"] == "noticed"] + begun:
                        reached.setdefault(event["what"], event["at"] - since)
                    first = min((e["at"] for e in begun if e["what"] == "synced"), default=float("inf"))
                    steps = [e for e in later if e["what"] == "step" and e["at"] > first]
                    return reached | {"step": steps[0]["at"] - since} if steps else {}

                measured.append(wait_for("a step after the kill", after, job))
    return measured


def commit_cost(durable: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        arguments = ["--folder", temporary, "--worker", "durable" if durable else "commit"]
        command = [str(BIN / "horovodrun"), "-np", "2", sys.executable, __file__, *arguments]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, timeout=600)
        return events(folder)[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--only", choices=("recovery", "commit"))
    parser.add_argument("--worker", choices=("hora", "torchrun", "commit", "durable"))
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.worker:
        work: dict[str, Callable[[Path], None]] = {"hora": work_hora, "torchrun": work_torchrun}
        work["commit"] = lambda folder: work_commit(folder, durable=False)
        work["durable"] = lambda folder: work_commit(folder, durable=True)
        work[arguments.worker](arguments.folder)
        return
    if arguments.only != "commit":
        report_recovery(arguments.kills)
    if arguments.only != "recovery":
        report_commits()


def report_recovery(num_kills: int) -> None:
    cooldown = ["--blacklist-cooldown-range", "1", "1"]
    ours = [str(BIN / "horovodrun"), "-np", "3", "--min-np", "2", *cooldown, sys.executable]
    # A fresh store for every restart: with the shared one its ranks find the addresses of dead ones. And more restarts than
    # kills: those that fail by themselves are restarted.
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    theirs = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", "3", "--max-restarts=100"]
    results = {}
    for name, command in (("hora", ours), ("torchrun", theirs)):
        results[name] = recovery_of(name, command, num_kills)
    ratio = results["torchrun"] / results["hora"]
    print(f"standing still after a kill, torchrun / hora: {ratio:.1f}")


def recovery_of(name: str, command: list[str], num_kills: int) -> float:
    measured = recovery(name, command, num_kills)
    for phase in ("noticed", "met", "synced", "step"):
        values = [m[phase] for m in measured if phase in m]
        if values:
            print(f"{name:9} {phase:8} after {statistics.median(values):6.3f} s (worst {max(values):.3f})")
    return statistics.median(m["step"] for m in measured)


def report_commits() -> None:
    for durable in (False, True):
        cost = commit_cost(durable)
        share = cost["commit_s"] / (10 * cost["step_s"])
        where = "memory and disk" if durable else "memory"
        print(
            f"commit to {where}: {cost['num'] / 1e6:.1f} M parameters, step {cost['step_s']:.3f} s, commit "
            f"{cost['commit_s']:.3f} s: {share:.1%} at one commit every 10 steps"
        )


if __name__ == "__main__":
    main()
