"""Measure the cost of rendezvous and negotiation with many ranks: `python -m benchmarks.scale [--hosts 16 125 500]`.

A real launcher's rendezvous and a real rank 0 (control tree, negotiation and planner) each run in a process. The other
ranks are simulated, with real connections, keys and messages.

1. Rendezvous: all workers connect to the launcher and receive their keys, the ranks of their host and the address of
their parent in the tree, as in `hvd.init()`. Then rank 0's neighbours send the introductions of all ranks up the tree
and receive them back.
2. Negotiation: rank 0 and its neighbours, each for all ranks below it, announce known operations and wait for the
round. No other rank is connected to rank 0.
3. Training: rank 0 does steady steps of 25 buckets through its schedule. The other ranks and hosts have always arrived,
and the content of buckets is not sent.

Seconds are wall time on this machine, whose cores all of them share; bytes and messages are exact. docs/scale.md models
them.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import select
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from typing import Any

import psutil
import torch

from hora.engine.control_tree import ControlEvents, ControlTree, Whereabouts
from hora.engine.negotiation.base import Announcer, Reader
from hora.engine.negotiation.tree import ALL, SLOTS, Slots, TreeNegotiation, as_bytes
from hora.engine.plan import BatchPlanner
from hora.engine.queue import OperationQueue, QueueWorld
from hora.engine.rank_tree import FANOUT, Tree
from hora.engine.request import Kind, Reduce, Signature
from hora.engine.schedule import ReductionSchedule
from hora.engine.shm.counters import MEMBER_BYTES, Counter
from hora.engine.shm.segment import Segment
from hora.engine.status import StallLimits, TimelineRecorder, WorldStatus
from hora.engine.transport.base import LocalTransport
from hora.engine.transport.host_reduction import HostLink, HostReduction
from hora.net.keys import RankKeys, rank_keys
from hora.net.rendezvous import Rendezvous
from hora.net.wire import Connection, Credentials, connect, cut_parts, join_parts, new_secret, worker_key
from hora.world import RendezvousEndpoint, World

LIMIT_S = 600.0
JOB = "scale"
NUM_BUCKETS, NUM_STEPS = 25, 100
NUM_ANNOUNCED = 1000  # number of announcements, in rounds of 1, 25 and 200
SERIAL = 1  # the process set that negotiates: the world


def introduction(rank: int) -> bytes:
    """Return a rank's introduction to all others, as long as a real one."""
    values = {
        "rank": rank,
        "leader": rank // 8 * 8,
        "place": [f"10.1.{rank // 8 // 250}.{rank // 8 % 250}", 32768 + rank * 7919 % 28000],
        "pid": 1000 + rank * 104729 % 60000,
        "hostname": f"node-{rank // 8:03}.cluster.internal",
        "process_sets": [],
        "encrypt": "always",
        "has_native": True,
        "encrypts_natively": True,
        "settings": None,
    }
    return json.dumps(values).encode()


def operation(number: int) -> Signature:
    """Return one of the operations that ranks negotiate."""
    return Signature(int(Kind.ALLREDUCE), "allreduce", f"gradient.{number}", ("float32",), ((1_000_000,),))


@dataclass
class Traffic:
    """Bytes and messages of one end."""

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
    """A socket that counts its traffic."""

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
    """A simulated worker with its connections to the launcher and to rank 0."""

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
    """Events of a launcher that starts nothing."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def _usage() -> tuple[float, float]:
    """Return resident MiB and processor seconds of this process."""
    process = psutil.Process()
    return process.memory_info().rss / 2**20, sum(process.cpu_times()[:2])


def serve_launcher(pipe: Pipe, secret: bytes, size: int) -> None:
    """Run the launcher's process."""
    server = Rendezvous("127.0.0.1", secret=secret, job=JOB, events=_Events())
    rendezvous = RendezvousEndpoint(kind="hora", address="127.0.0.1", port=server.port, job=JOB)
    server.publish(0, {rank: World(rank=rank, size=size, worker=rank, rendezvous=rendezvous) for rank in range(size)})
    pipe.send(server.port)
    while pipe.recv() != "end":
        pipe.send(_usage())
    server.close()


class SimulatedHosts:
    """A transport between hosts whose other hosts have always reached the same bucket."""

    def reduce_resident(self, *_: object) -> bool:
        return True

    def close(self) -> None:
        """Nothing is held."""


class Training:
    """Rank 0's buckets and their schedule."""

    def __init__(self, queue: OperationQueue, num_near: int) -> None:
        segment = Segment.create(ReductionSchedule.num_bytes(num_near))
        schedule = ReductionSchedule(queue, segment, 0, limits=StallLimits(0.0, 0.0), near=range(num_near))
        link = HostLink(schedule, lambda *_: SimulatedHosts(), lambda *_: [])  # type: ignore[arg-type,return-value]
        places = [torch.zeros(1000) for _ in range(num_near)]
        names = [f"bucket.{index}" for index in range(NUM_BUCKETS)]
        self._buckets = [HostReduction(schedule, link, places, name=name, reduce=Reduce()) for name in names]
        link.connect(0)
        self._others = [Counter(segment.memory, peer * MEMBER_BYTES) for peer in range(1, num_near)]
        self._num_steps = 0

    def step(self) -> None:
        """Do one step; the other ranks of this host have arrived, so only rank 0's own work is measured."""
        self._num_steps += 1
        for other in self._others:
            other.store(2 * NUM_BUCKETS * self._num_steps + 1)
        for bucket in self._buckets:
            bucket.start(background=False)
        for bucket in self._buckets:
            bucket.wait()


def serve_rank_0(pipe: Pipe, world: bytes, size: int, ranks_per_host: int) -> None:
    """Run rank 0's process. An order is a number of operations to negotiate, or 0 for training steps; the answer is the
    processor seconds.
    """
    nothing = {name: lambda *_: None for name in ("lost", "leaving", "fault", "tick")}
    control_tree = ControlTree(
        0,
        size,
        ControlEvents(
            **nothing,
            negotiating=lambda serial, rank, header, payload: negotiation.receive(rank, header, payload),
            whereabouts=lambda serial: Whereabouts([]),
            standstill=lambda question: b"",
        ),
    )
    tree = tree_of(size, ranks_per_host)
    negotiation = TreeNegotiation(control_tree, SERIAL, tree, range(size), cache_capacity=1024)
    planner = BatchPlanner(range(size), fusion_threshold_bytes=2**27)
    control_tree.start(RankKeys(0, lambda ranks: rank_keys(world, 0, ranks)))
    pipe.send((control_tree.name, control_tree.listen_tcp("127.0.0.1")))
    control_tree.join(None, len(tree.children(0)), limit_s=LIMIT_S)
    begun = time.process_time()
    control_tree.gather("introduction", introduction(0), limit_s=LIMIT_S)
    pipe.send(time.process_time() - begun)
    operations = [operation(number) for number in range(1000)]
    status = WorldStatus(0, tell=lambda text: None, wake=lambda: None)
    queue = OperationQueue(
        0,
        range(size),
        QueueWorld(0, status, TimelineRecorder(0), lambda batch: None, lambda: None, None),
        negotiation=negotiation,
        planner=planner,
        stall=None,
        make_transport=lambda devices: LocalTransport(),
    )
    training = Training(queue, ranks_per_host)
    while (order := pipe.recv()) != "end":
        begun, left = time.process_time(), order
        if not order:
            for _ in range(NUM_STEPS):
                training.step()
        for one in operations[:order]:
            negotiation.announce(one, 0)
        while left:
            batches = negotiation.poll(planner)
            if batches is None:
                negotiation.wait()
            else:
                left -= sum(len(batch.parts) for batch in batches)
        pipe.send(time.process_time() - begun)
    queue.close()
    control_tree.close()


def tree_of(size: int, ranks_per_host: int) -> Tree:
    return Tree([range(first, min(first + ranks_per_host, size)) for first in range(0, size, ranks_per_host)])


def gather(workers: Sequence[Worker], key: str, groups: Sequence[str], values: Sequence[bytes]) -> None:
    """Gather once over all workers."""
    size = len(workers)
    for worker, group, value in zip(workers, groups, values, strict=True):
        header = {"op": "gather", "id": 1, "key": key, "rank": worker.rank, "size": size, "timeout_s": LIMIT_S}
        worker.send(header | {"group": group, "fanout": FANOUT}, value)
    for worker in workers:
        header, _ = worker.receive()
        assert "error" not in header, header


def meet(port: int, secret: bytes, workers: Sequence[Worker], ranks_per_host: int) -> None:
    """Send the messages of `hvd.init()` to the launcher."""
    for worker in workers:
        worker.connect(("127.0.0.1", port), Credentials(worker_key(secret, worker.rank), JOB, worker.rank))
        worker.send({"op": "hello", "id": 0, "name": f"rank {worker.rank}", "worker": worker.rank})
        worker.send({"op": "keys", "id": 0, "rank": worker.rank, "generation": 0, "epoch": "0.0"}, bytes(4))
    for worker in workers:
        worker.receive()
        worker.receive()
    hosts = [worker.rank // ranks_per_host for worker in workers]
    fingerprints = [f"{host:036}/4026531840" for host in hosts]
    speakers = [str(host * ranks_per_host) for host in hosts]
    gather(workers, "0.0/near", fingerprints, [f"hora-{'0' * 32}".encode() for _ in workers])
    gather(workers, "0.0/hosts", speakers, [f"hora-{'0' * 32}".encode() for _ in workers])
    gather(workers, "0.0/place", speakers, [b'["10.1.100.100", 40000]' for _ in workers])


def introduce(links: Sequence[Worker], tree: Tree) -> None:
    """Send the introductions of the ranks below rank 0's neighbours, and receive those of all ranks."""
    for link in links:
        parts = [(rank, introduction(rank)) for rank in tree.below(link.rank)]
        link.send({"want": "link"})
        link.send({"t": "gather", "what": "introduction", "parts": len(parts)}, join_parts(parts))
    for link in links:
        link.receive()


class Neighbour:
    """A neighbour of rank 0 in the tree, which announces for all ranks below it."""

    def __init__(self, link: Worker) -> None:
        self._link = link
        self._announcer, self._reader, self._slots = Announcer(1024), Reader({}), Slots()

    def announce(self, signatures: Sequence[Signature]) -> None:
        bits, data = 0, b""
        for signature in signatures:
            bit = self._slots.bit(signature)
            bits |= bit
            data += b"" if bit else self._announcer.encode(signature, 0)
        parts = [(SLOTS, as_bytes(bits))] if bits else []
        parts += [(ALL, data)] if data else []
        self._link.send({"t": "up", "set": SERIAL, "parts": len(parts)}, join_parts(parts))

    def await_rounds(self, num_operations: int) -> None:
        """Wait until all ranks have announced them, in one round or several."""
        while num_operations > 0:
            header, payload = self._link.receive()
            for who, data in cut_parts(payload, header["parts"]):
                if who == SLOTS:
                    num_operations -= int.from_bytes(data, "little").bit_count()
                    continue
                for signature, _ in self._reader.decode(data):
                    self._slots.learn(signature)
                    num_operations -= 1


def agree(neighbours: Sequence[Neighbour], rank_0: Pipe, num_operations: int) -> float:
    """Announce on all neighbours and wait for the rounds; return rank 0's processor seconds."""
    rank_0.send(num_operations)
    for neighbour in neighbours:
        neighbour.announce([operation(number) for number in range(num_operations)])
    used: float = _answer(rank_0)
    for neighbour in neighbours:
        neighbour.await_rounds(num_operations)
    return used


def run(num_hosts: int, ranks_per_host: int) -> dict[str, Any]:
    """Simulate a job and return the measurements."""
    size, secret, world = num_hosts * ranks_per_host, new_secret(), new_secret()
    context = multiprocessing.get_context("spawn")
    pipes, processes = [], []
    for serve, given in ((serve_launcher, (secret, size)), (serve_rank_0, (world, size, ranks_per_host))):
        here, there = context.Pipe()
        process = context.Process(target=serve, args=(there, *given), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    workers = [Worker(rank) for rank in range(size)]
    links = [Worker(rank) for rank in tree_of(size, ranks_per_host).neighbours(0)]
    try:
        found = _measure_meeting(pipes[0], secret, workers, ranks_per_host)
        return found | _measure_rounds(pipes[1], world, links, size, ranks_per_host)
    finally:
        for worker in (*workers, *links):
            worker.close()
        for pipe, process in zip(pipes, processes, strict=True):
            pipe.send("end")
            process.join(30)
            process.kill()


def _answer(pipe: Pipe) -> Any:
    assert pipe.poll(LIMIT_S), f"no answer within {LIMIT_S:g} s"
    return pipe.recv()


def _usage_of(pipe: Pipe) -> tuple[float, float]:
    pipe.send("usage")
    usage: tuple[float, float] = _answer(pipe)
    return usage


def _measure_meeting(launcher: Pipe, secret: bytes, workers: Sequence[Worker], ranks_per_host: int) -> dict[str, Any]:
    port = _answer(launcher)
    before = _usage_of(launcher)
    begun = time.perf_counter()
    meet(port, secret, workers, ranks_per_host)
    found: dict[str, Any] = {"ranks": len(workers), "meeting_s": time.perf_counter() - begun}
    after = _usage_of(launcher)
    sent = sum(worker.traffic.bytes_in for worker in workers)
    found |= {"launcher_sent_mb": sent / 1e6, "launcher_sent_mb_per_100_ranks": sent / 1e4 / len(workers)}
    return found | {"launcher_cpu_s": after[1] - before[1], "launcher_mib": after[0] - before[0]}


def _measure_rounds(
    rank_0: Pipe, world: bytes, links: Sequence[Worker], size: int, ranks_per_host: int
) -> dict[str, Any]:
    name, port = _answer(rank_0)
    for link in links:
        keys = RankKeys(link.rank, lambda ranks, rank=link.rank: rank_keys(world, rank, ranks))  # type: ignore[misc]
        near = link.rank < ranks_per_host
        link.connect(name if near else ("127.0.0.1", port), keys.towards(0))
    begun = time.perf_counter()
    introduce(links, tree_of(size, ranks_per_host))
    found = {"introduction_s": time.perf_counter() - begun, "introduction_cpu_s": _answer(rank_0)}
    found["introduction_sent_mb"] = Traffic.sum([link.traffic for link in links]).bytes_in / 1e6
    neighbours = [Neighbour(link) for link in links]
    for what, num_operations in (("round", 1), ("round_of_25", 25), ("round_of_200", 200)):
        num_rounds = min(NUM_ANNOUNCED // num_operations, 50)
        agree(neighbours, rank_0, num_operations)  # new operations are announced in full
        before = Traffic.sum([link.traffic for link in links])
        begun = time.perf_counter()
        used = [agree(neighbours, rank_0, num_operations) for _ in range(num_rounds)]
        found[f"{what}_s"] = (time.perf_counter() - begun) / num_rounds
        found[f"{what}_rank_0_cpu_ms"] = sorted(used)[num_rounds // 2] * 1e3
        passed = Traffic.sum([link.traffic for link in links]) - before
        found[f"{what}_rank_0_sent_kb"] = passed.bytes_in / num_rounds / 1e3
        found[f"{what}_rank_0_messages"] = (passed.messages_in + passed.messages_out) / num_rounds
    return found | _measure_steps(rank_0, links)


def _measure_steps(rank_0: Pipe, links: Sequence[Worker]) -> dict[str, Any]:
    """Do steps, and count the neighbours that received a message from rank 0."""
    rank_0.send(0)
    used = _answer(rank_0)
    waiting = [link for link in links if link.connection is not None and _readable(link.connection.sock)]
    return {f"step_of_{NUM_BUCKETS}_rank_0_cpu_ms": used / NUM_STEPS * 1e3, "step_rank_0_messages": len(waiting)}


def _readable(sock: socket.socket) -> bool:
    """Return whether there are unread bytes."""
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    return bool(poll.poll(200))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="*", default=[16, 125, 500])
    parser.add_argument("--ranks-per-host", type=int, default=8)
    options = parser.parse_args()
    runs = [run(num_hosts, options.ranks_per_host) for num_hosts in options.hosts]
    for name in runs[0]:
        print(f"{name:32}", *(f"{one[name]:12.4g}" for one in runs), flush=True)


if __name__ == "__main__":
    main()
