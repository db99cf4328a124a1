"""Several hosts played by the processes of one: shared memory inside each, streams between them."""

from __future__ import annotations

import contextlib
import os
import signal

import pytest
import torch
import torch.distributed as dist
from groups import make_group
from transport_checks import PORTION_BYTES, Checker, check_everything, data

from hora.engine.request import Reduce, ReduceOp
from hora.engine.shm.segment import Segment
from hora.engine.transport import distributed, hierarchical
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.local import LocalTransport
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError

LIMIT_S = 600.0  # longer than a test may take: no test passes because a wait was given up
PLACES = {
    "even": [[0, 1], [2, 3]],
    "uneven": [[0, 3], [1], [2]],
}


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


@contextlib.contextmanager
def made(place, hosts, guard=lambda: None):
    (number,) = (h for h, host in enumerate(hosts) if place.rank in host)
    host = hosts[number]
    local = LocalTransport()
    if len(host) > 1:
        near = dist.PrefixStore(f"host{number}", place.store)
        index = host.index(place.rank)
        local = ShmTransport(shared_memory(near, index, len(host)), index, len(host), guard, LIMIT_S)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_PORTION_BYTES", PORTION_BYTES)
        patch.setattr(hierarchical, "_PORTION_BYTES", PORTION_BYTES)

        def connect(name, members):
            store = dist.PrefixStore(name, place.store)
            return make_group("tcp", store, list(members).index(place.rank), len(members), guard, LIMIT_S)

        transport = HierarchicalTransport(local, hosts, place.rank, connect)
        try:
            yield transport
        finally:
            transport.close()


@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())
@pytest.mark.both_ways
@pytest.mark.ranks(4)
def test_every_operation_is_right_and_has_the_same_bits_everywhere(place, hosts):
    with made(place, hosts) as transport:
        assert transport.name in ("shm+tcp", "local+tcp", "shm")
        results = check_everything(transport, place.rank, place.size, same_order=False)
    assert place.gather(results) == [results] * 4


@pytest.mark.ranks(4)
def test_sums_go_through_each_host_first(place):
    with made(place, [[0, 2], [1, 3]]) as transport:
        tensor = Checker(transport, place.rank, place.size).own(3, 10_001, torch.float32)
        transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
    parts = [data(3, member, 10_001, torch.float32) for member in range(4)]
    assert torch.equal(tensor, (parts[0] + parts[2]) + (parts[1] + parts[3]))


@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())
@pytest.mark.ranks(4)
def test_the_average_of_half_precision_neither_overflows_nor_vanishes(place, hosts):
    with made(place, hosts) as transport:
        for dtype, number in ((torch.float16, 40000.0), (torch.float16, 2.0**-24), (torch.bfloat16, 1e38)):
            tensor = torch.full((10_001,), number, dtype=dtype)
            part = torch.empty(11, dtype=dtype)
            transport.reducescatter([tensor[:44]], [part], [[11] * 4], Reduce(ReduceOp.AVERAGE))
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.AVERAGE))
            expected = torch.tensor(number, dtype=dtype).item()
            assert set(tensor.tolist()) | set(part.tolist()) == {expected}


@pytest.mark.ranks(4, lost=(3,))
def test_a_killed_member_is_an_error_on_every_other_one(place):
    """Only those who talk to the lost member notice by themselves; they tell the rest, as the engine does."""

    def guard():
        if place.store.check(["lost"]):
            raise HorovodInternalError("a rank is lost")

    def train(transport):
        tensor = torch.ones(200_000)
        for step in range(1_000_000):
            if place.rank == 3 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.AVERAGE))

    with made(place, [[0, 1], [2, 3]], guard) as transport:
        transport.barrier()
        with pytest.raises(HorovodInternalError):
            train(transport)
        place.store.set("lost", "1")
