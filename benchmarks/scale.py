"""What do many ranks cost where all of them meet? Run `python -m benchmarks.scale [--hosts 125] [--ranks-per-host 8]`.

A real launcher's rendezvous and a real rank 0 (its hub), each in a process of its own, and simulated workers without torch:
real connections with real keys, which say what ranks say when they meet and when they agree on an operation.

1. Meeting: all workers connect, get their keys, and exchange their introductions, hosts and addresses, as `hvd.init()` does.
2. Agreement: all ranks announce an operation that they have announced before, and wait until they have heard of all.

Seconds are wall time on this machine, where all of them share its cores; bytes and messages are exact. docs/scale.md has a
model of them, which tells of numbers of ranks that no machine here can play.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psutil

from hora.launch.control.rendezvous import Rendezvous
from hora.net.connection import Connection, connect
from hora.net.keys import RankKeys, rank_keys, worker_credentials
from hora.net.wire import new_secret
from hora.world import MeetingPoint, World

LIMIT_S = 300.0
JOB = "scale"
ANNOUNCEMENT = bytes(8)  # of an operation that is known by its number
# What a rank says of itself: about as long as `engine.peers` has it.
INTRODUCTION = {
    "hub_name": f"hora-{'0' * 32}",
    "fingerprint": f"{'0' * 36}/4026531840",
    "hostname": "node-000.cluster.internal",
    "process_sets": [],
    "settings": {"fusion_threshold_bytes": 134217728, "transport": "auto", "encrypt": "auto", "autotune": False},
    "more": "x" * 160,
}
INTRODUCTION_BYTES = len(json.dumps(INTRODUCTION))


@dataclass
class Traffic:
    """What passed at one end."""

    messages_out: int = 0
    messages_in: int = 0
    bytes_out: int = 0
    bytes_in: int = 0

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, name) - getattr(other, name) for name in vars(self)))

    @classmethod
    def sum(cls, some: Sequence[Traffic]) -> Traffic:
        return cls(*(sum(getattr(one, name) for one in some) for name in vars(cls())))


class _Counted:
    """A socket that counts."""

    def __init__(self, sock: socket.socket, traffic: Traffic) -> None:
        self._sock, self._traffic = sock, traffic

    def sendall(self, data: bytes) -> None:
        self._traffic.bytes_out += len(data)
        self._sock.sendall(data)

    def recv(self, limit: int) -> bytes:
        data = self._sock.recv(limit)
        self._traffic.bytes_in += len(data)
        return data

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sock, name)


@dataclass
class Worker:
    """A simulated worker: its connection to the launcher, and as a rank that to rank 0."""

    rank: int
    traffic: Traffic = field(default_factory=Traffic)
    connection: Connection | None = None

    def connect(self, where: tuple[str, int], credentials: Any) -> None:
        self.connection = connect(where, credentials, timeout_s=LIMIT_S)
        self.connection.sock = _Counted(self.connection.sock, self.traffic)  # type: ignore[assignment]

    def send(self, header: dict[str, Any], payload: bytes = b"") -> None:
        assert self.connection is not None
        self.traffic.messages_out += 1
        self.connection.send(header, payload)

    def receive(self) -> tuple[dict[str, Any], bytes]:
        assert self.connection is not None
        self.traffic.messages_in += 1
        return self.connection.receive(limit_s=LIMIT_S)

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()


class _Events:
    """Of a launcher that starts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _usage() -> tuple[float, float]:
    """Resident MiB and processor seconds of this process."""
    process = psutil.Process()
    return process.memory_info().rss / 2**20, sum(process.cpu_times()[:2])


def serve_launcher(pipe: Pipe, secret: bytes, size: int) -> None:
    """The launcher's process."""
    server = Rendezvous("127.0.0.1", secret=secret, job=JOB, events=_Events())
    meeting = MeetingPoint(kind="hora", address="127.0.0.1", port=server.port, job=JOB)
    server.publish(0, {rank: World(rank=rank, size=size, worker=rank, meeting=meeting) for rank in range(size)})
    pipe.send(server.port)
    while pipe.recv() != "end":
        pipe.send(_usage())
    server.close()


def serve_hub(pipe: Pipe, world: bytes, size: int) -> None:
    """Rank 0's process. Its engine needs torch, which is why the workers do without."""
    from hora.engine.hub import Hub, HubEvents

    nothing = {name: lambda *_: None for name in ("lost", "leaving", "fault", "announced", "tick")}
    hub = Hub(0, size, HubEvents(**nothing))
    hub.start(RankKeys(0, lambda ranks: rank_keys(world, 0, ranks)))
    pipe.send(hub.listen_tcp("127.0.0.1"))
    hub.wait_for_all(limit_s=LIMIT_S)
    while (order := pipe.recv()) != "end":
        if order == "announce":
            hub.announce(1, ANNOUNCEMENT)
        pipe.send(_usage())
    hub.close()


def gather(workers: Sequence[Worker], key: str, values: Sequence[bytes]) -> None:
    """All of them meet once."""
    size = len(workers)
    for worker, value in zip(workers, values, strict=True):
        worker.send(
            {"op": "gather", "id": 1, "key": key, "rank": worker.rank, "size": size, "timeout_s": LIMIT_S}, value
        )
    for worker in workers:
        header, _ = worker.receive()
        assert "error" not in header, header


def meet(port: int, secret: bytes, workers: Sequence[Worker]) -> None:
    """What `hvd.init()` says to the launcher."""
    for worker in workers:
        worker.connect(("127.0.0.1", port), worker_credentials(secret, JOB, worker.rank))
        worker.send({"op": "hello", "id": 0, "name": f"rank {worker.rank}", "worker": worker.rank})
        worker.send({"op": "keys", "id": 0, "rank": worker.rank, "generation": 0, "epoch": "0.0"}, bytes(4))
    for worker in workers:
        worker.receive()
        worker.receive()
    introductions = [json.dumps(INTRODUCTION | {"rank": worker.rank}).encode() for worker in workers]
    gather(workers, "0.0/introduction", introductions)
    gather(workers, "0.0/hosts", [b"[%d]" % worker.rank for worker in workers])
    gather(workers, "0.0/hub", [b'["10.1.100.100", 40000]' for _ in workers])
    gather(workers, "0.0/ready", [b"1"] * len(workers))


def agree(ranks: Sequence[Worker], size: int, announce: Callable[[], None]) -> int:
    """All ranks announce once and wait until they have heard of all; returns in how many rounds."""
    announce()  # rank 0
    for rank in ranks:
        rank.send({"t": "announce", "set": 1}, ANNOUNCEMENT)
    rounds = 0
    for rank in ranks:
        heard = 0
        while heard < size:
            header, _ = rank.receive()
            heard += header["parts"]
            rounds += rank is ranks[0]
    return rounds


def run(num_hosts: int, ranks_per_host: int, *, num_rounds: int = 5) -> dict[str, Any]:
    """Play it; what was measured."""
    size, secret, world = num_hosts * ranks_per_host, new_secret(), new_secret()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for serve, given in ((serve_launcher, secret), (serve_hub, world)):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, given, size), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    workers = [Worker(rank) for rank in range(size)]
    links = [Worker(rank) for rank in range(1, size)]
    try:
        return _measure(pipes, secret, world, workers, links, num_rounds, ranks_per_host)
    finally:
        for worker in (*workers, *links):
            worker.close()
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join(30)
            process.kill()


def _ask(pipe: Pipe, order: str = "usage") -> tuple[float, float]:
    pipe.send(order)
    assert pipe.poll(LIMIT_S), f"no answer within {LIMIT_S:g} s"
    answer: tuple[float, float] = pipe.recv()
    return answer


def _measure(
    pipes: Sequence[Pipe],
    secret: bytes,
    world: bytes,
    workers: Sequence[Worker],
    links: Sequence[Worker],
    num_rounds: int,
    ranks_per_host: int,
) -> dict[str, Any]:
    launcher, hub = pipes
    ports = [pipe.recv() if pipe.poll(LIMIT_S) else 0 for pipe in pipes]
    before = _ask(launcher)
    begun = time.perf_counter()
    meet(ports[0], secret, workers)
    found: dict[str, Any] = {"ranks": len(workers), "meeting_s": time.perf_counter() - begun}
    after = _ask(launcher)
    found |= {"launcher_cpu_s": after[1] - before[1], "launcher_mib": after[0] - before[0]}
    found["launcher"] = vars(Traffic.sum([worker.traffic for worker in workers]))
    for link in links:
        keys = RankKeys(link.rank, lambda ranks, rank=link.rank: rank_keys(world, rank, ranks))  # type: ignore[misc]
        link.connect(("127.0.0.1", ports[1]), keys.towards(0))
        link.send({"want": "hub"})
    begun = time.perf_counter()
    agree(links, len(workers), lambda: pipes[1].send("announce"))  # the first: also the time to join
    hub.recv()
    found["joining_s"] = time.perf_counter() - begun
    usage, so_far = _ask(hub), Traffic.sum([link.traffic for link in links])
    host_so_far = Traffic.sum([link.traffic for link in links[-ranks_per_host:]])
    times, rounds = [], 0
    for _ in range(num_rounds):
        begun = time.perf_counter()
        rounds += agree(links, len(workers), lambda: hub.send("announce"))
        times.append(time.perf_counter() - begun)
        hub.recv()
    after = _ask(hub)
    passed = Traffic.sum([link.traffic for link in links]) - so_far
    of_host = Traffic.sum([link.traffic for link in links[-ranks_per_host:]]) - host_so_far
    found |= {"round_s": sorted(times)[len(times) // 2], "messages_of_rounds": rounds / num_rounds}
    found |= {"hub_cpu_s": (after[1] - usage[1]) / num_rounds, "hub_mib": after[0]}
    found["rank_0"] = {name: value / num_rounds for name, value in vars(passed).items()}
    found["host"] = {name: value / num_rounds for name, value in vars(of_host).items()}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=125)
    parser.add_argument("--ranks-per-host", type=int, default=8)
    options = parser.parse_args()
    for name, value in run(options.hosts, options.ranks_per_host).items():
        print(f"{name:20} {value if not isinstance(value, float) else round(value, 4)}", flush=True)


if __name__ == "__main__":
    main()
