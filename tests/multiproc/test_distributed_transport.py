"""The transport over torch.distributed (gloo), directly: results, lost peers, and what is left behind."""

from __future__ import annotations

import os
import signal
import socket
import time

import pytest
import torch
import torch.distributed as dist
from rank_pool import ranks
from transport_checks import PIECE_BYTES, check_everything

from hora.engine.transport import gloo
from hora.engine.transport.gloo import DistributedTransport
from hora.errors import HorovodInternalError

LIMIT_S = 60.0


@pytest.fixture(scope="module")
def pool():
    with ranks(4) as made:
        yield made


def make(rank, size, store, guard=lambda: None, limit_s=LIMIT_S):
    gloo._PIECE_BYTES = PIECE_BYTES
    return DistributedTransport(store, rank, size, guard, limit_s, device="cpu", address="127.0.0.1")


def everything(rank, size, store):
    transport = make(rank, size, store)
    assert transport.name == "gloo"
    try:
        return check_everything(transport, rank, size)
    finally:
        transport.close()


@pytest.mark.parametrize("size", [2, 3, 4])
def test_every_operation_is_right_and_has_the_same_bits_everywhere(pool, size):
    results = pool.run(everything, size)
    assert len(results[0]) > 100
    for rank in range(1, size):
        for index, (mine, first) in enumerate(zip(results[rank], results[0], strict=True)):
            assert mine == first, f"result {index} of rank {rank} differs from rank 0's"


def listeners_and_group(rank, size, store):
    before = set(_listening())
    transport = make(rank, size, store)
    inside = set(_listening()) - before
    user_group_untouched = not dist.is_initialized()
    transport.close()
    return inside, set(_listening()) - before, user_group_untouched


def test_listens_on_loopback_only_and_leaves_the_users_group_alone(pool):
    for inside, after, untouched in pool.run(listeners_and_group, 2):
        assert inside
        assert all(address == "127.0.0.1" for address, _ in inside)
        assert after == set()
        assert untouched


def _listening():
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.family != socket.AF_UNIX:
                    yield sock.getsockname()[:2]
        except OSError:
            continue


def cycles(rank, size, store, num):
    used = []
    for number in range(num):
        transport = make(rank, size, dist.PrefixStore(str(number), store))
        tensor = torch.ones(3)
        transport.allreduce([tensor], [tensor], op=1, prescale=1.0, postscale=1.0)
        transport.close()
        used.append((len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))))
    return used


def test_making_and_closing_leaves_nothing_behind(pool):
    for used in pool.run(cycles, 3, 20):
        assert used[-1] == used[1]


def reduce_for_ever(transport):
    tensor = torch.ones(400_000)
    while True:
        transport.allreduce([tensor], [tensor], op=1, prescale=1.0, postscale=0.5)


def die_in_the_middle(rank, size, store, victim):
    transport = make(rank, size, store)
    transport.barrier()
    if rank == victim:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
    start = time.monotonic()
    try:
        reduce_for_ever(transport)
    except HorovodInternalError as error:
        message = str(error)
    elapsed_s = time.monotonic() - start
    with pytest.raises(HorovodInternalError):  # the transport stays unusable, at once
        transport.barrier()
    return elapsed_s, message


@pytest.mark.parametrize(("size", "victim"), [(2, 1), (4, 0)])
def test_a_killed_peer_is_an_error_on_every_other_member(size, victim):
    with ranks(size) as own_pool:
        results = own_pool.run(die_in_the_middle, size, victim, lost=(victim,))
    for rank, result in enumerate(results):
        if rank != victim:
            assert result[0] < 5
            assert "over gloo failed" in result[1]


def die_with_a_forked_child(rank, size, store):
    """A data loader's worker, say, that outlives its parent and has inherited everything."""
    transport = make(rank, size, store)
    transport.barrier()
    if rank == 1:
        child = os.fork()
        if child == 0:
            signal.pause()
        store.set("child", str(child))
        os.kill(os.getpid(), signal.SIGKILL)
    child = int(store.get("child"))
    start = time.monotonic()
    try:
        with pytest.raises(HorovodInternalError):
            reduce_for_ever(transport)
        os.kill(child, 0)  # it is still there
    finally:
        os.kill(child, signal.SIGKILL)
    return time.monotonic() - start


def test_a_child_of_the_killed_peer_does_not_keep_its_connections_alive():
    with ranks(2) as own_pool:
        assert own_pool.run(die_with_a_forked_child, 2, lost=(1,))[0] < 5


def stopped_by_guard(rank, size, store):
    """Member 0 waits for member 1 until its guard raises; member 1 comes too late and finds it gone."""
    start = time.monotonic()

    def guard():
        if rank == 0 and time.monotonic() - start > 0.5:
            raise HorovodInternalError("rank 1 is dead")

    transport = make(rank, size, store, guard)
    before = len(os.listdir("/proc/self/task"))
    start = time.monotonic()
    if rank == 1:
        store.get("given up")
    with pytest.raises(HorovodInternalError) as caught:
        transport.barrier()
    if rank == 0:
        store.set("given up", "1")
    deadline = time.monotonic() + 10
    while len(os.listdir("/proc/self/task")) >= before and time.monotonic() < deadline:
        time.sleep(0.02)  # gloo's threads end by themselves
    return str(caught.value), len(os.listdir("/proc/self/task")) < before


def test_the_guard_ends_a_wait_and_the_peer_notices(pool):
    (first, first_ended), (late, late_ended) = pool.run(stopped_by_guard, 2)
    assert first == "rank 1 is dead"
    assert "over gloo failed" in late
    assert first_ended
    assert late_ended


def missing_peer(rank, size, store):
    if rank == 1:
        return None
    start = time.monotonic()

    def guard():
        if time.monotonic() - start > 0.3:
            raise HorovodInternalError("rank 1 is dead")

    with pytest.raises(HorovodInternalError) as caught:
        make(rank, size, store, guard)
    by_guard = str(caught.value)
    with pytest.raises(HorovodInternalError) as caught:
        make(rank, size, dist.PrefixStore("again", store), limit_s=0.3)
    return by_guard, str(caught.value)


def test_connecting_to_a_missing_peer_ends_by_the_guard_or_the_limit(pool):
    by_guard, by_limit = pool.run(missing_peer, 2)[0]
    assert by_guard == "rank 1 is dead"
    assert "waited 0.3 s for 2 members to connect over gloo" in by_limit
