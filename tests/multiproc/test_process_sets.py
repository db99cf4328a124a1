"""Process sets: static and dynamic ones, their numbers, errors, and independence of each other."""

from __future__ import annotations

import os
import threading

import pytest
import torch
from hvd_session import assert_runtime_works, even_and_odd, raises, session, world_size

import horovod.torch as hvd
from hora.engine import current_runtime

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
several = pytest.mark.ranks(2, 3, 4)


def end():
    hvd.barrier()
    hvd.shutdown()


@session
def test_global_set():
    everyone = hvd.global_process_set
    assert everyone.process_set_id == 0
    assert everyone.ranks == list(range(hvd.size()))
    assert (everyone.size(), everyone.rank(), everyone.included()) == (hvd.size(), hvd.rank(), True)
    assert str(everyone) == f"ProcessSet(process_set_id=0, ranks={everyone.ranks}, mpi_comm=None)"


def test_before_registration():
    some = hvd.ProcessSet([2, 0, 1])
    assert some.ranks == [0, 1, 2]
    assert (some.process_set_id, some.mpi_comm, some.size(), some.rank()) == (None, None, None, None)
    assert hvd.global_process_set.included() is None
    assert some != hvd.ProcessSet([0, 1, 2])
    for nonsense in (["a"], [1.0], [True], 3, "01", [None]):
        with raises(ValueError):
            hvd.ProcessSet(nonsense)
    for call in (hvd.add_process_set, hvd.remove_process_set):
        with raises(ValueError, "has not been initialized"):
            call(some)


@several
def test_static_sets():
    even, odd = even_and_odd()
    hvd.init(process_sets=[even, odd])
    assert (even.process_set_id, odd.process_set_id) == (1, 2)
    known = hvd.mpi_ops._basics._get_process_set_ids_and_ranks()
    assert known == {0: list(range(hvd.size())), 1: even.ranks, 2: odd.ranks}
    mine, other = (odd, even) if hvd.rank() % 2 else (even, odd)
    assert (mine.included(), other.included()) == (True, False)
    assert mine.rank() == hvd.rank() // 2
    assert (even.size(), odd.size()) == ((hvd.size() + 1) // 2, hvd.size() // 2)
    with raises(ValueError, f"rank {hvd.rank()} is not a member"):
        other.rank()
    got = hvd.allreduce(torch.tensor([hvd.rank()]), op=hvd.Sum, process_set=mine)
    assert got.item() == sum(mine.ranks)
    for call in (lambda: hvd.add_process_set([0]), lambda: hvd.remove_process_set(even)):
        with raises(ValueError, "HOROVOD_DYNAMIC_PROCESS_SETS"):
            call()
    end()
    assert even.process_set_id is None
    hvd.init(process_sets=[odd, even])
    assert (odd.process_set_id, even.process_set_id) == (1, 2)
    end()


@several
def test_invalid_and_mismatched_sets_raise_on_every_rank_in_init():
    n = world_size()
    for bad in ([0, n], [-1, 0], [0, 0], []):
        with raises(ValueError, "initialization failed"):
            hvd.init(process_sets=[hvd.ProcessSet(bad)])
        assert not hvd.is_initialized()
    rank = int(os.environ["HOROVOD_RANK"])
    for differing in (
        [hvd.ProcessSet([0])] if rank == 0 else [],
        [hvd.ProcessSet([rank % 2])],
        [hvd.ProcessSet([0 if rank else 99])],
        [hvd.ProcessSet([0]), hvd.ProcessSet([1])] if rank == 0 else [hvd.ProcessSet([1]), hvd.ProcessSet([0])],
    ):
        with raises(ValueError, "initialization failed", "rank 0 has"):
            hvd.init(process_sets=differing)
        assert not hvd.is_initialized()
    hvd.init()
    assert_runtime_works()
    end()


@several
def test_init_names_a_repeated_entry_and_stays_initialized():
    first, again, world = (
        hvd.ProcessSet([0]),
        hvd.ProcessSet([0]),
        hvd.ProcessSet(reversed(range(world_size()))),
    )
    with raises(ValueError, "process_sets[1]", "[0]"):
        hvd.init(process_sets=[first, again])
    assert hvd.is_initialized()
    hvd.init(process_sets=[first])
    assert first.process_set_id == 1
    with raises(ValueError, "process_sets[1]", "global"):
        hvd.init(process_sets=[first, world])
    with raises(ValueError, "process_sets[0]", "not registered"):
        hvd.init(process_sets=[hvd.ProcessSet([1])])
    assert_runtime_works()
    end()


def test_init_arguments():
    for process_sets in ("static", 3, [[0]], {"a": 1}, [None]):
        with raises(ValueError, "process_sets"):
            hvd.init(process_sets=process_sets)
    for comm in ("x", 3, object(), [None]):
        with raises(ValueError, "comm"):
            hvd.init(comm=comm)
    assert not hvd.is_initialized()
    hvd.init(comm=[0], process_sets="Dynamic")
    hvd.init()
    assert_runtime_works()
    end()


@several
def test_dynamic_sets():
    hvd.init(process_sets="dynamic")
    n = hvd.size()
    for cycle in range(3):
        pair = hvd.add_process_set([1, 0]) if n > 2 else hvd.add_process_set(hvd.ProcessSet([1]))
        single = hvd.add_process_set(hvd.ProcessSet([n - 1])) if n > 2 else hvd.add_process_set([0])
        assert (pair.process_set_id, single.process_set_id) == (1, 2)
        for some in (pair, single):
            if some.included():
                got = hvd.allgather(torch.tensor([hvd.rank()]), process_set=some, name=f"c{cycle}")
                assert got.tolist() == some.ranks
        with raises(ValueError, "exists already"):
            hvd.add_process_set(list(pair.ranks))
        with raises(ValueError, "exists already"):
            hvd.add_process_set(range(n))
        for bad in ([0, n], [0, 0], []):
            with raises(ValueError, str(bad[-1]) if bad else "at least one"):
                hvd.add_process_set(bad)
        copy = hvd.ProcessSet(pair.ranks)
        copy.process_set_id = pair.process_set_id
        assert hvd.remove_process_set(pair) is True
        assert pair.process_set_id is None
        assert pair.size() is None
        with raises(ValueError, "does not exist, or has not been registered"):
            hvd.allreduce(torch.ones(1), process_set=pair)
        for call in (copy.size, copy.rank, lambda c=copy: hvd.allreduce(torch.ones(1), process_set=c)):
            with raises(ValueError, "does not exist, or has not been registered"):
                call()
        assert hvd.remove_process_set(pair) is False
        assert hvd.remove_process_set(hvd.global_process_set) is False
        assert hvd.remove_process_set(single) is True
    assert_runtime_works()
    end()


@pytest.mark.ranks(3)
@pytest.mark.over_network
def test_removal_with_operations_in_flight():
    """Negotiated operations are executed, although rank 1 polls for them only when it removes the set."""
    hvd.init(process_sets="dynamic")
    for cycle in range(2):
        some = hvd.add_process_set([0, 1])
        agreed = orphan = None
        if some.included():
            if hvd.rank() == 1:
                _look_for_rounds_in_the_removal_only(some.process_set_id)
            agreed = hvd.allreduce_async(torch.full((100_000,), 1.0 + hvd.rank()), op=hvd.Sum, process_set=some)
            if hvd.rank() == 0:
                orphan = hvd.allreduce_async(torch.ones(3), name="orphan", process_set=some)
        assert hvd.remove_process_set(some) is True
        if agreed is not None:
            assert set(hvd.synchronize(agreed).tolist()) == {3.0}
        if orphan is not None:
            with raises(hvd.HorovodInternalError, "process set 1 with the ranks [0, 1] has been removed") as caught:
                hvd.synchronize(orphan)
            assert "shut down" not in str(caught.value)
        assert "hora-set-1" not in [thread.name for thread in threading.enumerate()], cycle
    assert_runtime_works()
    end()


def _look_for_rounds_in_the_removal_only(number):
    runtime = current_runtime()
    queue, negotiation = runtime.sets.queue(0), runtime.sets.queue(number).negotiation
    world, poll, removing = queue.world, negotiation.poll, threading.Event()

    def change(batch):
        removing.set()
        queue.world = world
        return world.change_sets(batch)

    queue.world = world._replace(change_sets=change)
    negotiation.poll = lambda planner: poll(planner) if removing.is_set() else None


@several
def test_dynamic_mode_by_environment_variable():
    os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
    try:
        hvd.init()
        assert hvd.add_process_set([0]).process_set_id == 1
        end()
    finally:
        del os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"]


@several
def test_ranks_that_disagree_on_a_new_set():
    hvd.init(process_sets="dynamic")
    with raises(hvd.HorovodInternalError, "mismatched", "[0]", "[1]"):
        hvd.add_process_set([min(hvd.rank(), 1)])
    assert hvd.add_process_set([0]).process_set_id == 1
    assert_runtime_works()
    end()


@several
def test_no_set_can_be_added_during_shutdown():
    hvd.init(process_sets="dynamic")
    if hvd.rank() == 0:
        hvd.shutdown()
    else:
        with raises(hvd.HorovodInternalError, "has been shut down"):
            hvd.barrier()
        with raises(ValueError, "has been shut down"):
            hvd.add_process_set([0])
        hvd.shutdown()


@several
def test_sets_do_not_wait_for_one_another():
    """The odd set completes many barriers and reductions while the even one waits for its first member."""
    hvd.init(process_sets="dynamic")
    even, odd = (hvd.add_process_set(half) for half in even_and_odd())
    if hvd.rank() in odd.ranks:
        for i in range(20):
            hvd.barrier(odd)
            assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=odd, name=f"o{i}").item() == odd.size()
        hvd.allreduce(torch.ones(1), name="the odd ones are through")
    else:
        late = hvd.rank() == 0
        handle = None if late else hvd.allreduce_async(torch.ones(1), op=hvd.Sum, process_set=even, name="late")
        hvd.allreduce(torch.ones(1), name="the odd ones are through")
        if handle is None:
            handle = hvd.allreduce_async(torch.ones(1), op=hvd.Sum, process_set=even, name="late")
        assert hvd.synchronize(handle).item() == even.size()
    end()


@several
def test_unnamed_operations_of_a_set_do_not_affect_other_sets():
    hvd.init(process_sets=[hvd.ProcessSet([0])])
    alone = hvd.ProcessSet([0])
    hvd.init(process_sets=[alone])
    if hvd.rank() == 0:
        for _ in range(5):
            hvd.allreduce(torch.ones(1), process_set=alone)
    assert_runtime_works()
    end()


@several
def test_same_name_in_two_sets_at_once():
    hvd.init(process_sets=(halves := even_and_odd()))
    mine = next(half for half in halves if half.included())
    handles = [
        hvd.allreduce_async(torch.ones(2), name="same", op=hvd.Sum, process_set=some)
        for some in (hvd.global_process_set, mine)
    ]
    assert [hvd.synchronize(handle)[0].item() for handle in handles] == [hvd.size(), mine.size()]
    end()


@several
def test_sets_used_by_threads_at_once():
    hvd.init(process_sets=(halves := even_and_odd()))
    mine = next(half for half in halves if half.included())
    problems = []

    def work(process_set, name):
        try:
            for i in range(50):
                got = hvd.allreduce(torch.ones(3), op=hvd.Sum, process_set=process_set, name=f"{name}{i}")
                assert got.tolist() == [process_set.size()] * 3
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=a) for a in ((mine, "m"), (hvd.global_process_set, "g"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not problems, problems
    end()
