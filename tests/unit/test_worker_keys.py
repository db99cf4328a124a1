"""Workers with their own keys at the rendezvous: each acts only for itself, in generations that include it."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from hora.errors import AuthenticationError, HorovodInternalError
from hora.net.client import FUNCTION_KEY, ControlClient
from hora.net.keys import HeldSecret, RankKeys
from hora.net.rendezvous import Rendezvous
from hora.net.wire import Connection, Credentials, connect, new_secret, worker_key
from hora.world import RendezvousEndpoint, World
from waiting import wait_until

LIMIT_S = 60.0


class Events:
    """Records the rendezvous' reports."""

    def __init__(self) -> None:
        self.seen: queue.SimpleQueue[tuple] = queue.SimpleQueue()

    def __getattr__(self, name: str):
        return lambda *args: self.seen.put((name, *args))


class Job:
    """A rendezvous of three workers on three hosts, each with its own key."""

    def __init__(self) -> None:
        self.secret, self.events = new_secret(), Events()
        self.server = Rendezvous("127.0.0.1", secret=self.secret, job="job", events=self.events)
        self.held = {worker: HeldSecret(worker_key(self.secret, worker)) for worker in range(3)}
        self.clients: list[ControlClient] = []
        self.publish(0, {0: 0, 1: 1, 2: 2})

    def publish(self, generation: int, ranks: dict[int, int]) -> None:
        """Publish a new generation with the rank of each worker."""
        size = len(ranks)
        self.worlds = {
            worker: World(
                rank=rank, size=size, generation=generation, worker=worker, rendezvous=self.rendezvous(worker)
            )
            for worker, rank in ranks.items()
        }
        self.server.publish(generation, self.worlds)
        wait_until("the generation is announced", lambda: self.server.generation == generation)

    def rendezvous(self, worker: int) -> RendezvousEndpoint:
        path = self.held[worker].path
        return RendezvousEndpoint(
            kind="hora", address="127.0.0.1", port=self.server.port, secret_file=path, job="job", worker=worker
        )

    def connect(self, worker: int) -> ControlClient:
        client = ControlClient.connect(
            self.rendezvous(worker), name=f"worker {worker}", timeout_s=LIMIT_S, worker=worker
        )
        self.clients.append(client)
        return client

    def taken_over(self, worker: int) -> Connection:
        """Return a connection with that worker's key, on which an attacker sends arbitrary messages."""
        where = "127.0.0.1", self.server.port
        return connect(where, Credentials(worker_key(self.secret, worker), "job", worker), timeout_s=LIMIT_S)

    def heard(self) -> list[tuple]:
        """Return the events reported so far."""
        self.connect(0).check([])
        found = []
        while not self.events.seen.empty():
            found.append(self.events.seen.get())
        return [what for what in found if what[0] != "joined"]

    def close(self) -> None:
        for client in self.clients:
            client.close()
        self.server.close()
        for held in self.held.values():
            held.close()


@pytest.fixture
def job() -> Iterator[Job]:
    job = Job()
    yield job
    job.close()


def gather(client: ControlClient, rank: int, size: int) -> list[bytes]:
    return list(client.gather("k", b"%d" % rank, rank=rank, size=size, timeout_s=LIMIT_S).members.values())


def test_a_worker_cannot_open_a_connection_under_another_number(job: Job):
    where = "127.0.0.1", job.server.port
    for claimed in (-1, 0, 2, 7):
        with pytest.raises(AuthenticationError):
            connect(where, Credentials(worker_key(job.secret, 1), "job", claimed), timeout_s=LIMIT_S)
    assert job.connect(1).check([])


def test_a_worker_registers_reports_and_leaves_only_for_itself(job: Job):
    with job.taken_over(1) as hostile:
        hostile.send({"op": "hello", "id": 1, "name": "worker 0", "worker": 0})
        with pytest.raises(EOFError):
            hostile.receive(limit_s=LIMIT_S)
    with job.taken_over(1) as hostile:
        hostile.send({"op": "hello", "id": 1, "name": "worker 0", "worker": 1})
        assert "error" not in hostile.receive(limit_s=LIMIT_S)[0]
        hostile.send({"op": "returned", "id": 2, "worker": 0}, b"mine")
        hostile.send({"op": "telemetry", "kind": "stack", "worker": 0}, b"mine")
        error = {"type": "E", "message": "m", "traceback": "t", "consequence": False}
        hostile.send({"op": "raised", "id": 3, "worker": 0} | error)
        hostile.send({"op": "next_world", "id": 4, "worker": 0, "generation": 0, "timeout_s": LIMIT_S})
        hostile.send({"op": "bye", "id": 5, "worker": 0})
        while hostile.receive(limit_s=LIMIT_S)[0]["re"] != 5:
            pass
    told = job.heard()
    assert {what[1] for what in told} == {1}
    assert [what[0] for what in told] == ["returned", "on_telemetry", "raised", "waiting"]


def test_a_worker_gathers_only_as_its_own_rank(job: Job):
    honest, hostile = [job.connect(worker) for worker in (0, 1, 2)], job.connect(1)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(gather, honest[0], 0, 3)]
        for rank in (0, 2, 3, -1):
            with pytest.raises(HorovodInternalError, match=f"worker 1 is not rank {rank} of generation 0"):
                gather(hostile, rank, 3)
        waiting += [pool.submit(gather, honest[rank], rank, 3) for rank in (1, 2)]
        assert [found.result(LIMIT_S) for found in waiting] == [[b"0", b"1", b"2"]] * 3


def rank_keys(client: ControlClient, world: World, epoch: str = "0.0") -> RankKeys:
    return RankKeys(world.rank, lambda ranks: client.rank_keys(world, epoch, ranks, timeout_s=LIMIT_S))


def test_each_rank_gets_only_its_own_keys(job: Job):
    clients = {worker: job.connect(worker) for worker in range(3)}
    keys = {worker: rank_keys(clients[worker], job.worlds[worker]) for worker in range(3)}
    assert len({one.shared for one in keys.values()}) == 1
    for here in range(3):
        for there in {0, 1, 2} - {here}:
            assert keys[here].towards(there) == keys[there].of(here)
    assert len({keys[here].towards(there).secret for here in range(3) for there in {0, 1, 2} - {here}}) == 6
    assert rank_keys(clients[0], job.worlds[0], "0.1").shared != keys[0].shared
    for claimed in (job.worlds[0], replace(job.worlds[1], generation=1)):
        with pytest.raises(HorovodInternalError, match="this worker is not rank"):
            rank_keys(clients[1], claimed)


def test_a_worker_outside_a_generation_gets_none_of_its_keys_and_cannot_take_part(job: Job):
    """Worker 1 was rank 1 on a host that was cut off; the job dropped it, and then the host returned."""
    zombie, before = job.connect(1), job.worlds[1]
    old = rank_keys(zombie, before)
    old.fetch([0])
    job.publish(1, {0: 0, 2: 1})
    for generation in (0, 1):
        with pytest.raises(HorovodInternalError, match="this worker is not rank"):
            rank_keys(zombie, replace(before, generation=generation))
    with pytest.raises(HorovodInternalError, match="worker 1 has no place in generation 1"):
        gather(zombie, 1, 2)
    with pytest.raises(HorovodInternalError, match="worker 1 has no place in generation 1"):
        zombie.set("address", b"mine")
    assert zombie.next_world(before, timeout_s=LIMIT_S) is None
    job.server.reject(1)
    wait_until("it is given up", lambda: 1 in job.server._given_up)
    with pytest.raises(HorovodInternalError, match="worker 1 was given up"):
        zombie.get("address", timeout_s=LIMIT_S)
    with pytest.raises(HorovodInternalError, match="worker 1 was given up"):
        job.connect(1)
    survivors = [job.connect(worker) for worker in (0, 2)]
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(gather, client, rank, 2) for rank, client in enumerate(survivors)]
        assert [found.result(LIMIT_S) for found in waiting] == [[b"0", b"1"]] * 2
    first, second = (rank_keys(client, job.worlds[worker]) for client, worker in zip(survivors, (0, 2), strict=True))
    assert second.towards(0) == first.of(1)
    assert first.of(1) not in (old.towards(0), old.of(0))
    assert first.shared != old.shared


def test_values_set_by_the_launcher_cannot_be_changed(job: Job):
    job.server.set(FUNCTION_KEY, b"the caller's function")
    hostile = job.connect(1)
    for attempt in (
        lambda: hostile.set(FUNCTION_KEY, b"another"),
        lambda: hostile.delete(FUNCTION_KEY),
        lambda: hostile.add(FUNCTION_KEY, 1),
    ):
        with pytest.raises(HorovodInternalError, match="set by the launcher alone"):
            attempt()
    assert job.connect(0).get(FUNCTION_KEY, timeout_s=LIMIT_S) == b"the caller's function"
