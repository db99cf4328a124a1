"""Several hosts played by the processes of one: shared memory inside each, gloo between them."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import ranks
from transport_checks import PIECE_BYTES, Checker, check_everything, data

from hora.engine.request import ReduceOp
from hora.engine.shm.segment import Segment
from hora.engine.transport import gloo, hierarchical
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.local import LocalTransport
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError

LIMIT_S = 60.0
PLACES = {
    "even": [[0, 1], [2, 3]],
    "uneven": [[0, 3], [1], [2]],
}


@pytest.fixture(scope="module")
def pool():
    with ranks(4) as made:
        yield made


def shared_memory(store, index, num):
    """A provider of segments for the members of one host, who find it through /proc."""
    calls = iter(range(1000))

    def provide(num_bytes):
        key = f"segment{next(calls)}"
        if index == 0:
            segment = Segment.create(num_bytes)
            store.set(key, f"/proc/{os.getpid()}/fd/{segment.descriptor}")
            for peer in range(1, num):
                store.get(f"{key}/{peer}")
            return segment
        segment = Segment.attach(os.open(store.get(key).decode(), os.O_RDWR))
        store.set(f"{key}/{index}", "attached")
        return segment

    return provide


def make(rank, store, hosts, guard=lambda: None):
    (number,) = (h for h, host in enumerate(hosts) if rank in host)
    host = hosts[number]
    gloo._PIECE_BYTES = hierarchical._PIECE_BYTES = PIECE_BYTES
    local = LocalTransport()
    if len(host) > 1:
        near = dist.PrefixStore(f"host{number}", store)
        index = host.index(rank)
        local = ShmTransport(shared_memory(near, index, len(host)), index, len(host), guard, LIMIT_S)
    return HierarchicalTransport(local, hosts, rank, store, guard, LIMIT_S, address="127.0.0.1")


def everything(rank, size, store, hosts):
    transport = make(rank, store, hosts)
    assert transport.name in ("shm+gloo", "local+gloo")
    try:
        return check_everything(transport, rank, size, same_order=False)
    finally:
        transport.close()


@pytest.mark.parametrize("place", PLACES)
def test_every_operation_is_right_and_has_the_same_bits_everywhere(pool, place):
    hosts = PLACES[place]
    size = sum(len(host) for host in hosts)
    results = pool.run(everything, size, hosts)
    for rank in range(1, size):
        for index, (mine, first) in enumerate(zip(results[rank], results[0], strict=True)):
            assert mine == first, f"result {index} of rank {rank} differs from rank 0's ({place})"


def order(rank, size, store, hosts):
    transport = make(rank, store, hosts)
    tensor = Checker(transport, rank, size).own(3, 10_001, torch.float32)
    transport.allreduce([tensor], [tensor], op=ReduceOp.SUM, prescale=1.0, postscale=1.0)
    transport.close()
    return tensor


def test_sums_go_through_each_host_first(pool):
    parts = [data(3, member, 10_001, torch.float32) for member in range(4)]
    for result in pool.run(order, 4, [[0, 2], [1, 3]]):
        assert torch.equal(result, (parts[0] + parts[2]) + (parts[1] + parts[3]))


def lose_a_host(rank, size, store, hosts, victim):
    """Only those who talk to the lost member notice by themselves; they tell the rest, as the engine does."""

    def guard():
        if store.check(["lost"]):
            raise HorovodInternalError("a rank is lost")

    transport = make(rank, store, hosts, guard)
    transport.barrier()
    tensor = torch.ones(200_000)
    start = time.monotonic()
    try:
        for step in range(1_000_000):
            if rank == victim and step == 5:
                os.kill(os.getpid(), 9)
            transport.allreduce([tensor], [tensor], op=ReduceOp.AVERAGE, prescale=1.0, postscale=1.0)
    except HorovodInternalError:
        store.set("lost", "1")
    return time.monotonic() - start


def test_a_killed_member_is_an_error_on_every_other_one():
    with ranks(4) as own_pool:
        elapsed = own_pool.run(lose_a_host, 4, [[0, 1], [2, 3]], 3, lost=(3,))
    assert all(seconds < 5 for seconds in elapsed[:3])
