"""Chaos test: random faults during elastic training on four ranks. `python tests/integration/chaos.py --faults 100`.

Ranks are killed, stopped and terminated, one or two at a time, also while the other ranks recover. Their slots become
available again after a second, and new workers join. About every fourth step ends with a commit, as the
seed chooses. At the end all epochs must have covered every sample, the weights must equal those of an undisturbed run
of the same steps, no committed step may be lost, and no process may remain.

With `--per-step` a commit copies nothing. No step may be lost, and losses, weights and optimizer state must equal, bit
for bit, those of a run with the same ranks in the same steps.

With `--hosts` the ranks run on three hosts, which are network namespaces (requires root); the first one runs the
launcher. Faults then include unplugged cables and a full disk where commits are written.

With `--restarts` these hosts are the nodes of `hora run --join --run-id`. Faults then include launchers that are killed
and started again, also while ranks die, nodes that are killed, and launchers that are stopped.

With `--store` these hosts are the nodes of `hora run --join`, each with an etcd member. Faults then include killed and
stopped leaders, killed etcd members, and the unplugged cable of the leader's host.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(__file__))
sys.path.insert(0, os.path.dirname(sys.path[0]))
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "testbeds"))

import psutil
from elastic_job import ElasticJob, assert_good_ending, assert_no_step_lost
from job_process import BIN, JobProcess
from namespaces import Host, joined
from ssh_server import SshServer
from test_job_store import Etcd, secret_file

from waiting import wait_until

# Detecting a stopped rank takes at least the stall check's time, so SIGSTOP is rare. The limit must exceed the time
# that importing torch takes on a busy machine: a rank is silent meanwhile.
FAULTS = [signal.SIGKILL] * 8 + [signal.SIGTERM] * 3 + [signal.SIGSTOP]
ENVIRONMENT = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "10"}


class Chaos:
    """An elastic job and the faults injected into it."""

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
        more: dict[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        self.random = random.Random(seed)
        plan = {"samples": 96, "epochs": 10**6, "pause_s": pause_s, "per_step": per_step, "durable": durable}
        plan |= {"commits": seed, **(more or {})}
        arguments = {"num_proc": num_proc, "min_num_proc": 1, "cooldown_range": (1, 1), **arguments}
        self.job = ElasticJob(work, plan, ENVIRONMENT | (environment or {}), **arguments)
        self.hurt: set[int] = set()
        self.faults: Counter[str] = Counter()
        self.struck: list[str] = []

    def members(self) -> list[int]:
        """Return the unharmed processes of the latest world."""
        entered = [(int(note.split("in world ")[1].split()[0]), int(note.split()[1])) for note in self.job.notes()]
        last = max((world for world, _ in entered), default=0)
        alive = {process.pid for process in self.job.processes()}
        return [pid for world, pid in entered if world == last and pid in alive and pid not in self.hurt]

    def strike(self) -> int:
        """Inject faults into one or two members, but never into all of them; return the number of faults."""
        candidates = self.members()
        count = min(self.random.choice((1, 1, 1, 2)), len(candidates) - 1)
        for pid in self.random.sample(candidates, max(count, 0)):
            self.hurt_one(pid)
        return max(count, 0)

    def hurt_one(self, pid: int) -> bool:
        """Return whether the process still existed."""
        self.hurt.add(pid)
        fault = self.random.choice(FAULTS)
        try:
            os.kill(pid, fault)
        except ProcessLookupError:
            return False
        self.faults[fault.name] += 1
        time.sleep(self.random.uniform(0, 0.3))  # the second fault hits at any moment of the recovery
        return True

    def run(self, num_faults: int, min_steps: int = 0) -> None:
        done = 0
        while done < num_faults:
            step = self.job.step()
            # A step after the last fault means that the world has recovered and at least two ranks will hold the state.
            self.wait(f"a step after fault {done}", lambda step=step: self.job.step() > step)
            time.sleep(self.random.uniform(0, 1.0))
            before = Counter(self.faults)
            done += self.strike()
            self.struck += [f"{time.time():.3f} after step {step}: {dict(self.faults - before)}"]
        self.wait(f"step {min_steps}", lambda: self.job.step() >= min_steps)
        print(f"{done} faults in {self.job.step()} steps: {dict(self.faults)}", flush=True)
        self.finish()

    def finish(self) -> None:
        """Let the training end; check its results and that nothing is left."""
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
    """Chaos on three hosts with two ranks each. A dead rank's host is blacklisted, so at least one stays unharmed."""

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
        """Hurt ranks of one or two hosts, unplug a cable for a while, or fill the disk; return the number of faults."""
        host_of = {
            int(note.split()[1]): self.job.host(note.split(" as ")[1].rpartition("/")[0]) for note in self.job.notes()
        }
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
        if isinstance(self.job, NodesJob):
            far = list(self.NAMES)
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
        """Unplug the host's cable for a random time, which may or may not exceed the limit for dropping a host."""
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
        if isinstance(self.job, NodesJob) and self.job.etcd is not None:
            self.job.etcd.stop()
        mine = [host.pid for host in self.hosts]
        wait_until("every process on the hosts is gone", lambda: all(len(inside(pid)) <= 2 for pid in mine))


class NodesJob(ElasticJob):
    """A job of `hora run --join`: one node process on each of three hosts, any of which may be killed."""

    def __init__(
        self, work: Path, plan: dict[str, Any], environment: dict[str, str], hosts: list[Host], etcd: Etcd | None
    ):
        self.folder, self.work = work / "job", work
        self.folder.mkdir()
        self.plan = {"samples": 48, "epochs": 2, "batch": 2, **plan, "folder": str(self.folder)}
        self.hosts, self.etcd, self.past = hosts, etcd, []
        self.prefix, self.place = tuple(hosts[0].command()), {"network_interfaces": ["cable"], "start_timeout": 60}
        own = {"TORCHINDUCTOR_CACHE_DIR": str(work / "inductor"), "HORA_SECRET_FILE": str(secret_file(work))}
        self.environment = os.environ | own | environment
        self.nodes = [self._start(index) for index in range(len(hosts))]

    def _start(self, index: int) -> JobProcess:
        folder = self.work / f"node.{index}.{len(self.past)}"
        folder.mkdir()
        place = ["--nnodes", "3", "--node-rank", str(index), "--meet", "10.79.0.1:29500", "--slots-per-host", "2"]
        size = ["-np", "6", "--min-np", "1", "--start-timeout", "120", "--blacklist-cooldown-range", "1", "1"]
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', f"host{index}"]
        program = [sys.executable, str(Path(__file__).with_name("elastic_job.py")), json.dumps({"plan": self.plan})]
        again = ["--run-id", "chaos", "--leader-timeout", "180"] if self.etcd is None else []
        line = [str(BIN / "hora"), "run", *place, *size, *again, "--network-interfaces", "cable", *program]
        environment = self.environment if self.etcd is None else {**self.environment, "HORA_STORE": self.etcd.url}
        return JobProcess(self.hosts[index].command(*named, *line), folder, **environment)

    def host(self, name: str) -> str:
        return HostChaos.NAMES[int(name.partition("-")[0].removeprefix("host"))]

    @property
    def process(self) -> Any:
        """The first node process that has ended, else that of node 0."""
        ended = [node.process for node in self.nodes if node.process.poll() is not None]
        return ended[0] if ended else self.nodes[0].process

    def leader(self) -> int | None:
        """Return the index of the leading node, according to etcd if there is one."""
        if self.etcd is None:
            return 0
        line = ["etcdctl", "--endpoints", ",".join(self.etcd.members), "get", "--prefix", "/hora/"]
        env = {"ETCDCTL_API": "3", "PATH": os.environ["PATH"]}
        for host in self.hosts:
            found = subprocess.run(
                host.command(*line), capture_output=True, text=True, env=env, timeout=60, check=False
            )
            for key, value in itertools.pairwise(found.stdout.splitlines()):
                if key.endswith("/leader"):
                    name, _, _ = json.loads(value)["name"].rpartition(".")  # the rest is the entry's authentication
                    return int(name.removeprefix("host"))
        return None

    def kill_node(self, index: int, meanwhile: Callable[[], None] = lambda: None) -> None:
        """Kill a node's process but not its workers, then restart it."""
        self.nodes[index].process.kill()
        self.nodes[index].process.wait(30)
        self.past.append(self.nodes[index])
        meanwhile()
        self.nodes[index] = self._start(index)

    def lose_node(self, index: int) -> None:
        """Kill all processes of a node, then restart it."""
        self.nodes[index].kill()
        self.past.append(self.nodes[index])
        time.sleep(3.0)  # the leader expects no second node of that number
        self.nodes[index] = self._start(index)

    def processes(self) -> list[psutil.Process]:
        return [process for node in (*self.past, *self.nodes) for process in node.processes()]

    def text(self) -> str:
        return "\n".join(f"--- {node.log}\n{node.text()[-20000:]}" for node in (*self.past, *self.nodes))

    def kill(self) -> None:
        for node in (*self.past, *self.nodes):
            node.kill()

    def results(self, limit_s: float = 120.0) -> list[dict[str, Any]]:
        statuses = [node.wait(limit_s) for node in self.nodes]
        assert statuses == [0] * len(self.nodes), self.text()
        for node in (*self.past, *self.nodes):
            node.wait_for_the_last(60)
        files = sorted(self.folder.glob("result.*"), key=lambda file: int(file.suffix[1:]))
        found = [json.loads(file.read_text()) for file in files]
        return found[: found[0]["size"]]


class StoreChaos(HostChaos):
    """Chaos on three nodes that can all become leader, and on their etcd."""

    def __init__(self, work: Path, seed: int, hosts: list[Host], disk: Path, ssh: str, etcd: Etcd, per_step: bool):
        self.random, self.hosts, self.disk, self.etcd = random.Random(seed), hosts, disk, etcd
        plan = {"samples": 96, "epochs": 10**6, "pause_s": 0.05, "per_step": per_step, "durable": str(disk / "commits")}
        plan["commits"] = seed
        self.job = NodesJob(work, plan, {**ENVIRONMENT, "HORA_SSH": ssh}, hosts, etcd)
        self.hurt, self.faults, self.struck = set(), Counter(), []

    def strike(self) -> int:
        kind = self.random.choice(("any", "any", "any", "kill leader", "kill leader", "stop leader", "etcd", "etcd"))
        leader = self.job.leader() if "leader" in kind else None
        if kind == "etcd":
            index = self.random.randrange(3)
            self.etcd.kill(index)
            time.sleep(self.random.uniform(0.0, 5.0))
            self.etcd.start()
        elif leader is not None and kind == "kill leader":
            self.job.kill_node(leader)
        elif leader is not None:
            node = self.job.nodes[leader].process
            node.send_signal(signal.SIGSTOP)
            time.sleep(self.random.choice((1.0, 6.0)))
            node.send_signal(signal.SIGCONT)
        else:
            return super().strike()
        self.faults[kind] += 1
        return 1


class RestartChaos(HostChaos):
    """Chaos on three nodes whose launcher, the process of node 0, is killed and started again."""

    def __init__(self, work: Path, seed: int, hosts: list[Host], disk: Path, ssh: str, per_step: bool):
        self.random, self.hosts, self.disk = random.Random(seed), hosts, disk
        plan = {"samples": 96, "epochs": 10**6, "pause_s": 0.05, "per_step": per_step, "durable": str(disk / "commits")}
        plan["commits"] = seed
        self.job = NodesJob(work, plan, {**ENVIRONMENT, "HORA_SSH": ssh}, hosts, None)
        self.hurt, self.faults, self.struck = set(), Counter(), []

    def strike(self) -> int:
        kind = self.random.choice(("any", "any", "kill leader", "kill leader", "kill leader", "stop leader", "node"))
        leader = self.job.nodes[0].process
        if kind == "kill leader":
            self.job.kill_node(0, self.while_nobody_leads)
        elif kind == "stop leader":
            leader.send_signal(signal.SIGSTOP)
            time.sleep(self.random.choice((1.0, 6.0)))
            leader.send_signal(signal.SIGCONT)
        elif kind == "node" and len(self.inhabited()) > 1:
            self.job.lose_node(self.random.choice((1, 2)))
        else:
            return super().strike()
        self.faults[kind] += 1
        return 1

    def inhabited(self) -> set[str]:
        """Return the hosts of the present members."""
        members = set(self.members())
        notes = [note for note in self.job.notes() if int(note.split()[1]) in members]
        return {note.split(" as ")[1].rpartition("/")[0] for note in notes}

    def while_nobody_leads(self) -> None:
        """Let ranks train for a while, and perhaps hurt some, or kill the next leader while agents return to it."""
        time.sleep(self.random.choice((0.0, 1.0, 5.0)))
        if self.random.random() < 0.3:
            super().strike()
        if self.random.random() < 0.3:
            again = self.job._start(0)
            time.sleep(self.random.uniform(0.5, 4.0))
            again.process.kill()
            again.process.wait(30)
            self.job.past.append(again)
            self.faults["kill again"] += 1


def inside(holder: int) -> list[int]:
    """Return the processes in the network namespace of `holder`, including the holder and its sshd."""
    wanted, found = os.readlink(f"/proc/{holder}/ns/net"), []
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{process.pid}/ns/net") == wanted:
                found.append(process.pid)
    return found


@contextlib.contextmanager
def small_disk(place: Path):
    """Mount a file system of 1 MiB."""
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(place)], check=True, timeout=30)
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True, timeout=30)


@contextlib.contextmanager
def chaos_on_hosts(work: Path, seed: int, store: bool = False, restarts: bool = False, **arguments: Any):
    """Set up three hosts, the second and third with sshd. `store`: with an etcd member on each. `restarts`: one run."""
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
        if restarts:
            yield RestartChaos(work, seed, hosts, disk, f"ssh -F {config}", **arguments)
            return
        if not store:
            yield HostChaos(work, seed, hosts, disk, f"ssh -F {config}", **arguments)
            return
        etcd = Etcd(work, hosts=list(zip(hosts, addresses, strict=True)))
        etcd.start()
        stack.callback(etcd.stop)
        yield StoreChaos(work, seed, hosts, disk, f"ssh -F {config}", etcd, **arguments)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=100)
    parser.add_argument("--steps", type=int, default=0, help="train for so many steps at least")
    parser.add_argument("--per-step", action="store_true")
    parser.add_argument("--hosts", action="store_true", help="three hosts, in network namespaces")
    parser.add_argument("--restarts", action="store_true", help="three hosts whose launcher is started again")
    parser.add_argument("--store", action="store_true", help="three hosts that may all lead, and an etcd on them")
    parser.add_argument("--seed", type=int, default=random.randrange(10**6))
    arguments = parser.parse_args()
    print(f"seed {arguments.seed}", flush=True)
    make = functools.partial(chaos_on_hosts, store=True) if arguments.store else chaos_here
    make = functools.partial(chaos_on_hosts, restarts=True) if arguments.restarts else make
    make = chaos_on_hosts if arguments.hosts else make
    with (
        tempfile.TemporaryDirectory() as work,
        make(Path(work), arguments.seed, per_step=arguments.per_step) as chaos,
    ):
        began = time.monotonic()
        try:
            chaos.run(arguments.faults, arguments.steps)
        except BaseException:
            print(chaos.job.text()[-200_000:], *chaos.job.notes()[-60:], chaos.struck, sep="\n")
            chaos.job.kill()
            raise
        print(f"all is well after {time.monotonic() - began:.0f} s", flush=True)


@contextlib.contextmanager
def chaos_here(work: Path, seed: int, **arguments: Any):
    """Run four ranks on this host."""
    yield Chaos(work, seed, **arguments)


if __name__ == "__main__":
    main()
