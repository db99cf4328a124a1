"""Several hosts simulated by processes of one host: shared memory inside each host, streams between them."""

from __future__ import annotations

import contextlib
import copy
import os
import signal

import pytest
import torch
import torch.distributed as dist
from groups import make_group
from transport_checks import PORTION_BYTES, Checker, check_everything, data, fingerprint

from hora.engine.request import Kind, Reduce, ReduceOp
from hora.engine.shm.native import absence, library
from hora.engine.shm.segment import Segment
from hora.engine.transport import distributed, hierarchical, native_hosts
from hora.engine.transport.base import LocalTransport, Membership
from hora.engine.transport.distributed import DistributedTransport
from hora.engine.transport.hierarchical import HierarchicalTransport
from hora.engine.transport.shm import ShmTransport
from hora.errors import HorovodInternalError
from hora.net import noise

needs_native = pytest.mark.skipif(library() is None, reason=f"no native part: {absence()}")
PLACES = {
    "even": [[0, 1], [2, 3]],
    "uneven": [[0, 3], [1], [2]],
    "apart": [[0], [1], [2], [3]],
}


def shared_memory(store, index, num):
    """Return what creates segments for the members of one host, which attach to them through /proc."""
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


def within(place, name):
    """Return the same rank with a store of its own namespace."""
    inner = copy.copy(place)
    inner.store = dist.PrefixStore(name, place.store)
    return inner


@contextlib.contextmanager
def made(place, hosts, check_alive=lambda: None, native=None, kind="tcp", name=""):
    """Create the transport that the engine would choose, with the native part or without."""
    native = library() is not None if native is None else native
    place = within(place, name) if name else place
    (number,) = (h for h, host in enumerate(hosts) if place.rank in host)
    host = hosts[number]
    near, index = dist.PrefixStore(f"host{number}", place.store), host.index(place.rank)
    share = shared_memory(near, index, len(host))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "_PORTION_BYTES", PORTION_BYTES)
        patch.setattr(hierarchical, "_PORTION_BYTES", 2**17)
        for size in ("_PAIR_MESSAGE_BYTES", "_MESSAGE_BYTES"):
            patch.setattr(native_hosts, size, 2**11)  # so that several hundred pieces are in flight
        patch.setattr(native_hosts, "_ONE_STEP_BYTES", 2**12)

        def connect(name, members):
            store = dist.PrefixStore(name, place.store)
            return make_group(kind, store, list(members).index(place.rank), len(members), check_alive)

        if native:
            local = (
                ShmTransport(share, Membership(index, len(host), check_alive)) if len(host) > 1 else LocalTransport()
            )
            transport = HierarchicalTransport(
                local, hosts, place.rank, share=share, connect=connect, check_alive=check_alive
            )
        else:
            group = connect("members", range(place.size))
            transport = DistributedTransport(group, hosts=sorted(map(sorted, hosts)))
        try:
            yield transport
        finally:
            transport.close()


@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())
@pytest.mark.both_ways
@pytest.mark.ranks(4)
def test_every_operation_is_correct_and_bit_identical_on_all_members(place, hosts):
    with made(place, hosts) as transport:
        assert transport.name in ("shm+tcp", "local+tcp", "shm", "tcp")
        results = check_everything(transport, place.rank, place.size, same_order=False)
    assert place.gather(results) == [results] * 4


@pytest.mark.ranks(4)
def test_sums_are_computed_within_each_host_first(place):
    with made(place, [[0, 2], [1, 3]]) as transport:
        tensor = Checker(transport, place.rank, place.size).own(3, 10_001, torch.float32)
        transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
    parts = [data(3, member, 10_001, torch.float32) for member in range(4)]
    assert torch.equal(tensor, (parts[0] + parts[2]) + (parts[1] + parts[3]))


CASES = [
    (torch.float32, Reduce(ReduceOp.AVERAGE)),
    (torch.float32, Reduce(ReduceOp.SUM, 0.3, 0.7)),
    (torch.float64, Reduce(ReduceOp.AVERAGE, 0.3)),
    (torch.float16, Reduce(ReduceOp.AVERAGE)),
    (torch.float16, Reduce(ReduceOp.SUM, 0.3, 0.7)),
    (torch.bfloat16, Reduce(ReduceOp.AVERAGE, 0.3)),
    (torch.bfloat16, Reduce(ReduceOp.SUM)),
    (torch.int16, Reduce(ReduceOp.SUM)),
    (torch.float32, Reduce(ReduceOp.AVERAGE, 1.0, 1.0, "fp16")),
    (torch.float32, Reduce(ReduceOp.SUM, 0.5, 0.3, "bf16+")),
    (torch.float32, Reduce(ReduceOp.AVERAGE, 1.0, 1.0, "int8")),
    (torch.float32, Reduce(ReduceOp.AVERAGE, 0.3, 0.7, "int8+")),
]


def reduced(place, hosts, transport, number, dtype, reduce, sizes):
    """Reduce private tensors, and with the native part shared data, twice; the second time with the residual."""
    if isinstance(transport, DistributedTransport):
        tensors = [[data(10 * turn + i, place.rank, size, dtype) for i, size in enumerate(sizes)] for turn in range(2)]
        for some in tensors:
            transport.allreduce(some, some, reduce)
        return [tensor for some in tensors for tensor in (*some, torch.cat(some))]
    (index,) = (h for h, host in enumerate(hosts) if place.rank in host)
    host = hosts[index]
    keeps = reduce.code.endswith("+")
    lost = [torch.zeros(size) for size in sizes] if keeps else []
    share = shared_memory(dist.PrefixStore(f"places{number}/{index}", place.store), host.index(place.rank), len(host))
    count = sum(sizes)
    segment = share(len(host) * count * dtype.itemsize)
    places = [segment.tensor(count * dtype.itemsize * i, count, dtype) for i in range(len(host))]
    mine, residual = places[host.index(place.rank)], torch.zeros(count) if keeps else None
    found = []
    for turn in range(2):
        tensors = [data(10 * turn + i, place.rank, size, dtype) for i, size in enumerate(sizes)]
        outputs = tensors if turn else [torch.empty_like(tensor) for tensor in tensors]
        transport.allreduce(tensors, outputs, reduce, lost)
        mine.copy_(torch.cat([data(10 * turn + i, place.rank, size, dtype) for i, size in enumerate(sizes)]))
        transport.barrier()
        transport.reduce_resident(Kind.ALLREDUCE, places, reduce, residual)
        transport.barrier()
        found += [*outputs, mine.clone()]
    return found


@pytest.mark.parametrize(
    ("hosts", "sizes"),
    [
        pytest.param(hosts, sizes, id=f"{name}-{many}", marks=[pytest.mark.slow] if seldom else [])
        for name, hosts in (PLACES | {"one alone": [[0, 2, 3], [1]]}).items()
        for many, sizes in {"several": (70_001, 0, 1, 999, 33_000), "one": (1,), "few": (900,)}.items()
        for seldom in [many == "several" and name not in ("even", "one alone")]
    ],
)
@needs_native
@pytest.mark.ranks(4)
def test_the_native_part_gives_the_same_bits(place, hosts, sizes, monkeypatch):
    monkeypatch.setattr(noise, "_RECORDS_OF_A_KEY", 300)  # to reach a key change
    found = {}
    for native, kind in ((True, "encrypted"), (True, "tcp"), (False, "tcp")):
        name = f"{native} {kind}"
        cases = [case for case in CASES if native or not case[1].code]  # only the native part supports codes
        with made(place, hosts, native=native, kind=kind, name=name) as transport:
            inner = within(place, name)
            found[name] = [reduced(inner, hosts, transport, n, *case, sizes) for n, case in enumerate(cases)]
    encrypted, plainly, without = found.values()
    for number, (case, tensors) in enumerate(zip(CASES, plainly, strict=True)):
        for other in (encrypted[number], *without[number : number + 1]):
            for one, two in zip(tensors, other, strict=True):
                assert torch.equal(one, two), (case, one, two)
    bits = [fingerprint(tensor) for tensors in plainly for tensor in tensors]
    assert place.gather(bits) == [bits] * 4


def halves(place, hosts, transport, number, dtype, reduce, count):
    """Reducescatter data in the host's memory, then allgather the result. `count`: elements of each member."""
    (index,) = (h for h, host in enumerate(hosts) if place.rank in host)
    host, size = hosts[index], 4 * count
    share = shared_memory(dist.PrefixStore(f"halves{number}/{index}", place.store), host.index(place.rank), len(host))
    segment = share(len(host) * size * dtype.itemsize)
    places = [segment.tensor(size * dtype.itemsize * i, size, dtype) for i in range(len(host))]
    mine = places[host.index(place.rank)]
    mine.copy_(data(number, place.rank, size, dtype))
    transport.barrier()
    assert transport.reduce_resident(Kind.REDUCESCATTER, places, reduce, None, HEADER)
    transport.barrier()
    own = mine.split(count)[place.rank].clone()
    mine.zero_()
    mine.split(count)[place.rank].copy_(own)
    transport.barrier()
    assert transport.reduce_resident(Kind.ALLGATHER, places, Reduce(), None, HEADER)
    transport.barrier()
    return mine.clone()


HEADER = bytes(range(32))


@pytest.mark.parametrize(
    "hosts",
    [PLACES["even"], PLACES["apart"], [[0, 1, 2], [3]], [[0], [1, 2], [3]]],
    ids=["even", "apart", "more", "uneven"],
)
@needs_native
@pytest.mark.ranks(4)
def test_a_reducescatter_and_an_allgather_give_the_bits_of_an_allreduce(place, hosts):
    cases = [case for case in CASES if not case[1].code]
    for kind in ("encrypted", "tcp"):
        name = f"halves {kind}"
        with made(place, hosts, kind=kind, name=name) as transport:
            inner = within(place, name)
            for number, (dtype, reduce) in enumerate(cases):
                for count in (1, 30_011):
                    found = halves(inner, hosts, transport, 100 * number + count, dtype, reduce, count)
                    whole = data(100 * number + count, place.rank, 4 * count, dtype)
                    transport.allreduce([whole], [whole], reduce)
                    assert torch.equal(found, whole), (name, dtype, reduce, count)


@needs_native
@pytest.mark.ranks(4)
def test_hosts_with_different_headers_change_no_data(place):
    """Host 1 executes something else, or refuses without doing anything."""
    hosts = PLACES["even"]
    for number, refuses in enumerate((False, True)):
        with made(place, hosts, kind="encrypted", name=f"{number}") as transport:
            share = shared_memory(dist.PrefixStore(f"void{number}/{place.rank // 2}", place.store), place.rank % 2, 2)
            segment = share(2 * 4 * 70_000)
            places = [segment.tensor(4 * 70_000 * index, 70_000, torch.float32) for index in range(2)]
            mine = places[place.rank % 2]
            mine.fill_(place.rank)
            transport.barrier()
            assert transport.reduce_resident(Kind.ALLREDUCE, places, Reduce(), None, HEADER)
            transport.barrier()
            assert set(mine.tolist()) == {6.0}
            if place.rank >= 2 and refuses:
                transport.refuse()
            else:
                header = HEADER if place.rank < 2 else HEADER[::-1]
                assert not transport.reduce_resident(Kind.ALLREDUCE, places, Reduce(), None, header)
            assert set(mine.tolist()) == {6.0}
            place.gather(number)


@pytest.mark.parametrize("altered", ["a record", "the next one"])
@needs_native
@pytest.mark.ranks(4)
def test_data_modified_between_hosts_is_an_error_on_both(place, altered, monkeypatch):
    """Slice leader 0 of the first host sends data that is not sealed with the current key of the connection."""
    monkeypatch.setattr("hora.engine.transport.group._GRACE_S", 0.0)
    tensor = torch.ones(100_000)
    lost = []

    def check_alive():
        if place.store.check(["lost"]):
            raise HorovodInternalError("the liveness check knows")

    with made(place, PLACES["even"], check_alive, kind="encrypted") as transport:
        transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
        assert torch.equal(tensor, torch.full_like(tensor, 4.0))
        if place.rank == 0:
            records = transport._between.group._outgoing[1]._records
            if altered == "a record":
                records._key, records._number = bytes(32), records._number
                records._begin()
            else:
                records._number += 1
        try:
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.SUM))
        except HorovodInternalError as error:
            lost.append(str(error))
            place.store.set("lost", "1")
    seen = place.gather(lost)
    assert "modified in transit" in seen[2][0]
    assert all(seen), seen


@pytest.mark.parametrize("hosts", [PLACES["even"], PLACES["uneven"]], ids=["even", "uneven"])
@pytest.mark.ranks(4)
def test_the_average_of_half_precision_neither_overflows_nor_underflows(place, hosts):
    with made(place, hosts) as transport:
        for dtype, number in ((torch.float16, 40000.0), (torch.float16, 2.0**-24), (torch.bfloat16, 1e38)):
            tensor = torch.full((10_001,), number, dtype=dtype)
            part = torch.empty(11, dtype=dtype)
            transport.reducescatter([tensor[:44]], [part], [[11] * 4], Reduce(ReduceOp.AVERAGE))
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.AVERAGE))
            expected = torch.tensor(number, dtype=dtype).item()
            assert set(tensor.tolist()) | set(part.tolist()) == {expected}


@pytest.mark.parametrize("code", ["fp16", "bf16", "int8", "int8+"])
@pytest.mark.parametrize("hosts", PLACES.values(), ids=PLACES.keys())
@needs_native
@pytest.mark.ranks(4)
def test_compressed_sums_are_nearly_equal_and_bit_identical_on_all_members(place, hosts, code):
    sizes, limit = (70_001, 3, 999), 2e-2 if code == "bf16" or code.startswith("int8") else 2e-3
    tensors = [data(number, place.rank, size, torch.float32) for number, size in enumerate(sizes)]
    expected = [sum(data(number, m, size, torch.float32) for m in range(4)) for number, size in enumerate(sizes)]
    outputs = [torch.empty_like(tensor) for tensor in tensors]
    lost = [torch.zeros_like(tensor) for tensor in tensors] if code.endswith("+") else []
    totals = [torch.zeros_like(tensor) for tensor in tensors]
    with made(place, hosts) as transport:
        for _ in range(20):
            transport.allreduce(tensors, outputs, Reduce(ReduceOp.AVERAGE, 0.5, 8.0, code), lost)
            for total, output, wanted in zip(totals, outputs, expected, strict=True):
                torch.testing.assert_close(output, wanted, rtol=limit, atol=8 * limit)
                total += output
        found = [total / 20 for total in totals]
    if lost:  # the residual was sent later
        for mean, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(mean, wanted, rtol=limit / 5, atol=limit / 2)
    bits = [output.tolist() for output in outputs]
    assert place.gather(bits) == [bits] * 4


@pytest.mark.parametrize("code", ["", "bf16", "int8+"])
@pytest.mark.parametrize("hosts", [PLACES["even"], PLACES["uneven"]], ids=["even", "uneven"])
@needs_native
@pytest.mark.ranks(4)
def test_data_in_a_hosts_memory_is_reduced_in_place(place, hosts, code):
    count, limit = 70_001, {"": 1e-6, "bf16": 2e-2, "int8+": 2e-2}[code]
    (number,) = (h for h, host in enumerate(hosts) if place.rank in host)
    host = hosts[number]
    expected = sum(data(5, member, count, torch.float32) for member in range(4)) / 2
    with made(place, hosts) as transport:
        share = shared_memory(dist.PrefixStore(f"resident{number}", place.store), host.index(place.rank), len(host))
        segment = share(len(host) * 4 * count)
        places = [segment.tensor(4 * count * index, count, torch.float32) for index in range(len(host))]
        mine, residual = places[host.index(place.rank)], torch.zeros(count) if code.endswith("+") else None
        totals = torch.zeros(count)
        for _ in range(10):
            mine.copy_(data(5, place.rank, count, torch.float32))
            transport.barrier()
            transport.reduce_resident(Kind.ALLREDUCE, places, Reduce(ReduceOp.AVERAGE, 0.5, 4.0, code), residual)
            transport.barrier()
            torch.testing.assert_close(mine, expected, rtol=limit, atol=4 * limit)
            totals += mine
        torch.testing.assert_close(totals / 10, expected, rtol=limit, atol=limit)
        found = mine.tolist()
    assert place.gather(found) == [found] * 4


@pytest.mark.ranks(4, lost=(3,))
def test_a_killed_member_is_an_error_on_all_others(place):
    """Only its peers detect the loss; they notify the rest, as the engine does."""

    def check_alive():
        if place.store.check(["lost"]):
            raise HorovodInternalError("a rank is lost")

    def train(transport):
        tensor = torch.ones(200_000)
        for step in range(1_000_000):
            if place.rank == 3 and step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            transport.allreduce([tensor], [tensor], Reduce(ReduceOp.AVERAGE))

    with made(place, [[0, 1], [2, 3]], check_alive) as transport:
        transport.barrier()
        with pytest.raises(HorovodInternalError):
            train(transport)
        place.store.set("lost", "1")
