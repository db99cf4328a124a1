"""A compromised host can impersonate only its own ranks, and a dropped host cannot rejoin.

The attacker holds the real keys of its workers; meanwhile the ranks of the job continue.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from elastic_job import ElasticJob

import horovod
from hora.errors import AuthenticationError, HorovodInternalError
from hora.net.client import ControlClient
from hora.net.keys import HeldSecret, RankKeys
from hora.net.wire import Credentials, connect
from hora.platforms.detect import detect_world
from hora.world import RendezvousEndpoint, World
from waiting import wait_until

LIMIT_S = 60.0


def work() -> tuple[list[str], float]:
    """Run on each of three ranks; rank 1 tries every misuse of its keys."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    tried = attack() if hvd.rank() == 1 else []
    total = hvd.allreduce(torch.tensor([float(hvd.rank())]), op=hvd.Sum).item()
    hvd.shutdown()
    return tried, total


def attack() -> list[str]:
    from hora import engine

    world, peers = detect_world(), engine.current_runtime()._bootstrap
    launcher = world.rendezvous.address, world.rendezvous.port
    key = Path(world.rendezvous.secret_file).read_bytes()
    own = ControlClient.connect(world.rendezvous, name="hostile", timeout_s=LIMIT_S)

    def say_hello_for_worker_0() -> None:
        with connect(launcher, Credentials(key, world.rendezvous.job, 1), timeout_s=LIMIT_S) as connection:
            connection.send({"op": "hello", "id": 1, "name": "worker 0", "worker": 0})
            connection.receive(limit_s=LIMIT_S)

    def at_control_tree(rank: int, claimed: int, secret: bytes) -> None:
        connect(peers._introductions[rank].place, Credentials(secret, "control", claimed), timeout_s=LIMIT_S)

    held = [peers.keys.towards(0).secret, peers.keys.towards(2).secret, peers.keys.of(2).secret, peers.keys.shared, key]
    attempts: dict[str, Callable[[], object]] = {
        "connect to the launcher as worker 0": lambda: connect(
            launcher, Credentials(key, world.rendezvous.job, 0), timeout_s=LIMIT_S
        ),
        "connect to the launcher as nobody": lambda: connect(
            launcher, Credentials(key, world.rendezvous.job), timeout_s=LIMIT_S
        ),
        "register as worker 0": say_hello_for_worker_0,
        "meet as rank 0": lambda: own.gather("k", b"", rank=0, size=3, timeout_s=LIMIT_S),
        "get rank 0's keys": lambda: own.rank_keys(replace(world, rank=0), "0.0", [2], timeout_s=LIMIT_S),
        "get a later generation's keys": lambda: own.rank_keys(replace(world, generation=1), "1.0", [], timeout_s=60.0),
        "replace the function": lambda: own.set("hora/function", b""),
        **{
            f"rank 0's control tree as rank 2, key {n}": lambda s=secret: at_control_tree(0, 2, s)
            for n, secret in enumerate(held)
        },
        **{
            f"a stream to rank 2 as rank 0, key {n}": lambda s=secret: at_control_tree(2, 0, s)
            for n, secret in enumerate(held)
        },
    }
    succeeded = []
    for name, attempt in attempts.items():
        try:
            attempt()
            succeeded.append(name)
        except (AuthenticationError, HorovodInternalError, EOFError):
            continue
    own.close()
    return succeeded


def test_a_rank_cannot_impersonate_another_rank_with_its_keys(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HORA_TRANSPORT", "tcp")
    results = horovod.run(work, num_proc=3)
    assert results == [([], 3.0)] * 3


class Zombie:
    """An attacker with everything that worker 1's host holds, as if that host were cut off and reconnected."""

    def __init__(self, job: ElasticJob) -> None:
        keys, env = [], {}
        for process in job.processes():
            for link in Path(f"/proc/{process.pid}/fd").iterdir():
                with suppress(OSError):
                    if "hora-private" in os.readlink(link):
                        keys.append(link.read_bytes())
            env |= process.environ()
        self.where = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])
        self.job, self.key = env["HORA_JOB"], next(key for key in keys if self.opens(env["HORA_JOB"], key))
        self.held = HeldSecret(self.key)
        rendezvous = RendezvousEndpoint(
            kind="hora",
            address=self.where[0],
            port=self.where[1],
            secret_file=self.held.path,
            job=self.job,
            worker=1,
        )
        self.world = World(rank=1, size=3, worker=1, rendezvous=rendezvous)
        self.client = ControlClient.connect(rendezvous, name="zombie", timeout_s=LIMIT_S)
        self.keys = self.ask(self.world)
        self.keys.fetch([0, 2])

    def opens(self, job: str, key: bytes) -> bool:
        try:
            connect(self.where, Credentials(key, job, 1), timeout_s=LIMIT_S).close()
        except (AuthenticationError, ValueError):
            return False
        return True

    def ask(self, world: World) -> RankKeys:
        epoch = f"{world.generation}.0"
        return RankKeys(world.rank, lambda ranks: self.client.rank_keys(world, epoch, ranks, timeout_s=LIMIT_S))


def hub_names(job: ElasticJob) -> set[str]:
    """Return the local sockets on which ranks of the job listen."""
    links = [link for process in job.processes() for link in Path(f"/proc/{process.pid}/fd").iterdir()]
    inodes = set()
    for link in links:
        with suppress(OSError):
            inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()]
    return {line[-1][1:] for line in lines if line[3] == "00010000" and line[6] in inodes and line[-1][:6] == "@hora-"}


def test_a_dropped_worker_cannot_rejoin_under_any_number(tmp_path: Path):
    job = ElasticJob(tmp_path, {"samples": 8000, "epochs": 1, "pause_s": 0.1}, num_proc=3, min_num_proc=2)
    wait_until("all three have trained", lambda: any(note.endswith("on 3") for note in job.notes("committed")))
    zombie = Zombie(job)
    os.kill(job.worker(1), signal.SIGKILL)
    wait_until("the others go on", lambda: any(note.endswith("on 2") for note in job.notes("committed")))
    for number in (0, 1, 2, 3):
        credentials = Credentials(zombie.key, zombie.job, number)
        with pytest.raises((AuthenticationError, HorovodInternalError)):
            ControlClient.connect(
                zombie.world.rendezvous, name="z", timeout_s=LIMIT_S, worker=number, credentials=credentials
            )
    for generation in (0, 1):
        with pytest.raises(HorovodInternalError):
            zombie.ask(replace(zombie.world, generation=generation))
    num_refused = 0
    for name in hub_names(job):
        for rank in (0, 2):
            try:
                connect(name, zombie.keys.towards(rank), timeout_s=LIMIT_S).close()
            except AuthenticationError:
                num_refused += 1
            else:
                pytest.fail("the keys of an earlier generation opened a control tree of this one")
    assert num_refused >= 4
    zombie.client.close()
    (job.folder / "stop").touch()
    results = job.results()
    assert [result["worker"] for result in results] == [0, 2]
    assert {3, 2} == set(results[0]["sizes"])
    assert results[0]["weights"] == results[1]["weights"]
