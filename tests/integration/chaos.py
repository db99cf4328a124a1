"""Chaos: random faults over one elastic training on four ranks. `python tests/integration/chaos.py --faults 100`.

Ranks are killed, stopped and told to end, one or two at a time and also while the others recover; their slots come back
after a second and newcomers join. At the end the training must have done its epochs with every sample, its weights must
be those of an undisturbed run of the same steps, no committed step may have been lost, and nothing may be left behind.

With `--per-step` nothing is committed: no step at all may have been lost, and losses, weights and the optimizer's state
must be to the last bit those of a run with the same ranks in the same steps.

With `--hosts` the ranks are on three hosts, which are network namespaces (as root), the launcher on the first of them.
Cables are pulled as well, and the disk that commits are written to is full at times.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.dirname(sys.path[0]))

import psutil
from elastic_job import ElasticJob, assert_good_ending, assert_no_step_lost
from namespaces import Host, joined
from ssh_server import SshServer

from waiting import wait_until

# A stopped rank takes the stall check's time to be noticed, and then some: few of them. The limit is longer than a busy
# machine takes to import torch, during which a rank is as silent as a stopped one.
FAULTS = [signal.SIGKILL] * 8 + [signal.SIGTERM] * 3 + [signal.SIGSTOP]
ENVIRONMENT = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}


class Chaos:
    """A job under attack."""

    def __init__(
        self,
        work: Path,
        seed: int,
        *,
        num_proc: int = 4,
        pause_s: float = 0.05,
        per_step: bool = False,
        environment: dict[str, str] | None = None,
        durable: str = "",
        **arguments: Any,
    ) -> None:
        self.random = random.Random(seed)
        plan = {"samples": 96, "epochs": 10**6, "pause_s": pause_s, "per_step": per_step, "durable": durable}
        arguments = {"num_proc": num_proc, "min_num_proc": 1, "cooldown_range": (1, 1), **arguments}
        self.job = ElasticJob(work, plan, ENVIRONMENT | (environment or {}), **arguments)
        self.hurt: set[int] = set()
        self.faults: Counter[str] = Counter()

    def members(self) -> list[int]:
        """Processes of the last world that are unharmed."""
        entered = [(int(note.split("in world ")[1].split()[0]), int(note.split()[1])) for note in self.job.notes()]
        last = max((world for world, _ in entered), default=0)
        alive = {process.pid for process in self.job.processes()}
        return [pid for world, pid in entered if world == last and pid in alive and pid not in self.hurt]

    def strike(self) -> int:
        """Hurt one or two of those that have the state, but not all of them; returns how many."""
        candidates = self.members()
        count = min(self.random.choice((1, 1, 1, 2)), len(candidates) - 1)
        for pid in self.random.sample(candidates, max(count, 0)):
            self.hurt_one(pid)
        return max(count, 0)

    def hurt_one(self, pid: int) -> bool:
        """Return whether it was still there."""
        self.hurt.add(pid)
        fault = self.random.choice(FAULTS)
        try:
            os.kill(pid, fault)
        except ProcessLookupError:
            return False
        self.faults[fault.name] += 1
        time.sleep(self.random.uniform(0, 0.3))  # the second one: at any moment of the recovery
        return True

    def run(self, num_faults: int, min_steps: int = 0) -> None:
        done = 0
        while done < num_faults:
            step = self.job.step()
            # Somebody must have got over the last fault: then at least two have the state again, sooner or later.
            self.wait(f"a step after fault {done}", lambda step=step: self.job.step() > step)
            time.sleep(self.random.uniform(0, 1.0))
            done += self.strike()
        self.wait(f"step {min_steps}", lambda: self.job.step() >= min_steps)
        print(f"{done} faults in {self.job.step()} steps: {dict(self.faults)}", flush=True)
        self.finish()

    def finish(self) -> None:
        """Let the training end: it must be right, and nothing may be left."""
        (self.job.folder / "last_epoch").touch()
        results = self.job.results(limit_s=120)
        self.job.plan["epochs"] = results[0]["epoch"]
        assert_good_ending(self.job, results)
        self.assert_no_commit_was_lost()
        if self.job.plan["per_step"]:
            assert_no_step_lost(self.job, results)
            print(
                f"{len(results[0]['losses'])} steps in {len(set(results[0]['worlds']))} worlds, made again: the same "
                "bits"
            )

    def wait(self, what: str, happened) -> None:
        wait_until(what, lambda: happened() or self.job.process.poll() is not None, limit_s=90)
        assert self.job.process.poll() is None, self.job.text()[-5000:]

    def assert_no_commit_was_lost(self) -> None:
        commits = [(float(n.split()[0]), int(n.split()[4])) for n in self.job.notes("committed")]
        for note in self.job.notes():
            at, step = float(note.split()[0]), int(note.split("at step ")[1].split()[0])
            before = [number for when, number in commits if when < at]
            assert step >= max(before, default=0), f"step {max(before)} was committed, but then: {note}"


class HostChaos(Chaos):
    """The same on three hosts with two ranks each. A death bars its host, so one host at least stays unharmed."""

    NAMES = ("10.79.0.1", "second", "third")

    def __init__(self, work: Path, seed: int, hosts: list[Host], disk: Path, ssh: str, **arguments: Any) -> None:
        self.hosts, self.disk = hosts, disk
        super().__init__(
            work,
            seed,
            num_proc=6,
            environment={"HORA_SSH": ssh},
            durable=str(disk / "commits"),
            prefix=tuple(hosts[0].command()),
            hosts=",".join(f"{name}:2" for name in self.NAMES),
            network_interfaces=["cable"],
            start_timeout=60,
            **arguments,
        )

    def strike(self) -> int:
        """Hurt ranks of one or two hosts, pull a cable for a while, or fill the disk; returns the number of faults."""
        host_of = {int(note.split()[1]): note.split(" as ")[1].rpartition("/")[0] for note in self.job.notes()}
        members = self.members()
        inhabited = sorted({host_of[pid] for pid in members})
        kind = self.random.choice(("hurt",) * 8 + ("cut", "cut", "disk"))
        if kind == "disk":
            self.fill_disk()
            return 1
        count = min(self.random.choice((1, 1, 1, 2)), len(inhabited) - 1)
        if count < 1:
            return 0
        far = [name for name in inhabited if name != self.NAMES[0]]
        if kind == "cut" and far:
            self.cut(self.hosts[self.NAMES.index(self.random.choice(far))])
            return 1
        done = 0
        for name in self.random.sample(inhabited, count):
            its = [pid for pid in members if host_of[pid] == name]
            done += sum(self.hurt_one(pid) for pid in self.random.sample(its, self.random.randint(1, len(its))))
            self.hurt.update(its)
        return done

    def cut(self, host: Host) -> None:
        """Pull its cable: long enough to be given up, or not."""
        self.faults["cut"] += 1
        host.run("ip", "link", "set", "cable", "down")
        time.sleep(self.random.choice((0.5, 3.0, 3.0, 20.0)))
        host.run("ip", "link", "set", "cable", "up")

    def fill_disk(self) -> None:
        self.faults["disk full"] += 1
        with contextlib.suppress(OSError), (self.disk / "filler").open("wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        time.sleep(self.random.uniform(0.5, 3.0))
        (self.disk / "filler").unlink()

    def finish(self) -> None:
        super().finish()
        mine = [host.pid for host in self.hosts]
        wait_until("every process on the hosts is gone", lambda: all(len(inside(pid)) <= 2 for pid in mine))


def inside(holder: int) -> list[int]:
    """Processes of the network namespace that this one holds, itself and its sshd among them."""
    wanted, found = os.readlink(f"/proc/{holder}/ns/net"), []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/ns/net") == wanted:
                found.append(process.pid)
    return found


@contextlib.contextmanager
def small_disk(place: Path):
    """A file system of a megabyte."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


@contextlib.contextmanager
def chaos_on_hosts(work: Path, seed: int, **arguments: Any):
    """Three hosts, of which the second and the third let ssh in."""
    addresses = ("10.79.0.1", "10.79.0.2", "10.79.0.3")
    with contextlib.ExitStack() as stack:
        hosts = stack.enter_context(joined(addresses))
        disk = stack.enter_context(small_disk(work / "disk"))
        config = work / "ssh_config"
        for host, name, address in list(zip(hosts, HostChaos.NAMES, addresses, strict=True))[1:]:
            folder = work / name
            folder.mkdir()
            stack.enter_context(SshServer(folder, {name: address}, prefix=tuple(host.command())))
            with config.open("a") as file:
                file.write(f"Include {folder}/ssh_config\n")
        yield HostChaos(work, seed, hosts, disk, f"ssh -F {config}", **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps at least")
    parser.add_argument("--per-step", action="store_true")
    parser.add_argument("--hosts", action="store_true", help="three hosts, in network namespaces")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    make = chaos_on_hosts if arguments.hosts else chaos_here
    with (
        tempfile.TemporaryDirectory() as work,
        make(Path(work), arguments.seed, per_step=arguments.per_step) as chaos,
    ):
        began = time.monotonic()
        try:
            chaos.run(arguments.faults, arguments.steps)
        except BaseException:
            print(chaos.job.text()[-8000:])
            chaos.job.kill()
            raise
        print(f"all is well after {time.monotonic() - began:.0f} s", flush=True)


@contextlib.contextmanager
def chaos_here(work: Path, seed: int, **arguments: Any):
    """Four ranks of this host."""
    yield Chaos(work, seed, **arguments)


if __name__ == "__main__":
    main()
