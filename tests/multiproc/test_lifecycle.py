"""Repeated starts and stops, many operations at once, threads, DataLoader workers, forks."""

from __future__ import annotations

import gc
import os
import signal
import threading
from operator import le

import psutil
import pytest
import torch
from hvd_session import assert_equal, assert_runtime_works, raises, session

import horovod.torch as hvd
from hora.engine import current_runtime
from waiting import wait_until

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
LIMIT_S = 180


@pytest.mark.ranks(1, 2)
def test_300_cycles_leave_nothing_behind():
    def cycle():
        hvd.init()
        assert hvd.allreduce(torch.ones(10), op=hvd.Sum).tolist() == [hvd.size()] * 10
        handle = hvd.allreduce_async(torch.ones(1), name="kept in the background")
        hvd.synchronize(handle)
        hvd.barrier()
        hvd.shutdown()

    me = psutil.Process()

    def usage():
        return me.num_fds(), threading.active_count(), me.num_threads()

    for _ in range(50):
        cycle()
    gc.collect()
    before, rss_before = usage(), me.memory_info().rss
    for _ in range(250):
        cycle()
    gc.collect()
    # The kernel needs a moment to remove a joined thread, longer on a busy machine.
    wait_until(f"descriptors and threads are as before: {before}", lambda: all(map(le, usage(), before)), limit_s=20)
    # 250 leaked staging areas, or even control pages, would be far larger.
    assert me.memory_info().rss - rss_before < 10 * 2**20


@pytest.mark.ranks(2)
def test_news_of_a_death_while_a_world_is_being_closed_is_no_error():
    hvd.init()
    report = current_runtime().peers.control_tree._events.lost
    other = 1 - hvd.rank()
    hvd.shutdown()
    report(other)  # as the control tree's thread may, until `close` has stopped it


@pytest.mark.parametrize("where", ["submit", "drive"])
@pytest.mark.ranks(1, 2)
def test_a_signal_handler_may_shut_down_at_any_point(where):
    hvd.init()
    negotiation = current_runtime().sets.queue(0).negotiation
    _shut_down_in(negotiation, {"submit": "announce", "drive": "poll"}[where])


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
def test_a_signal_handler_may_shut_down_in_the_middle_of_a_message():
    hvd.init()
    link = next(iter(current_runtime()._control_tree._links.values()))
    _shut_down_in(link.sealer, "frames")


def _shut_down_in(owner, method):
    """Raise a preemption signal on the last rank inside `method`; its handler shuts down."""
    assert_runtime_works()
    last = hvd.size() - 1
    if hvd.rank() == last:
        original = getattr(owner, method)

        def interrupted(*arguments):
            setattr(owner, method, original)
            signal.raise_signal(signal.SIGUSR2)
            return original(*arguments)

        setattr(owner, method, interrupted)
    before = signal.signal(signal.SIGUSR2, lambda *_: hvd.shutdown())
    try:
        with raises(hvd.HorovodInternalError, f"shut down by rank {last}"):
            hvd.allreduce(torch.ones(3))
    finally:
        signal.signal(signal.SIGUSR2, before)
        hvd.shutdown()
    assert not hvd.is_initialized()
    hvd.init()
    assert_runtime_works()
    hvd.barrier()
    hvd.shutdown()


@session
def test_handles_and_pending_operations_do_not_outlive_a_shutdown():
    first = hvd.allreduce_async(torch.ones(1), name="a")
    hvd.synchronize(first)
    left = hvd.grouped_allreduce_async([torch.ones(1)], name="left")
    hvd.barrier()
    hvd.shutdown()
    with raises(hvd.HorovodInternalError):
        hvd.synchronize(left)
    hvd.init()
    assert hvd.allreduce_async(torch.ones(1), name="a") == first
    assert hvd.synchronize(left) is None
    assert_equal(hvd.synchronize(first), torch.ones(1))


@pytest.mark.ranks(2, 3)
def test_restart_as_in_an_elastic_loop():
    """The next world has its own sets and handles, whatever was pending in the previous one."""
    from hora.torch import basics

    hvd.init(process_sets=[alone := hvd.ProcessSet([0])])
    left = hvd.grouped_allreduce_async([torch.ones(1)])
    hvd.synchronize(left)
    hvd.grouped_allreduce_async([torch.ones(1)])
    hvd.barrier()
    basics.restart()
    assert alone.process_set_id is None
    assert hvd.global_process_set.ranks == list(range(hvd.size()))
    assert hvd.allreduce_async(torch.ones(1), name="x") == left
    assert_equal(hvd.synchronize(left), torch.ones(1))
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.ranks(1, 2, 4)
@session
def test_10000_small_operations_in_flight():
    n = hvd.size()
    handles = [hvd.allreduce_async(torch.full((4,), float(i)), name=f"n{i}", op=hvd.Sum) for i in range(10_000)]
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle)[0].item() == i * n


@session
def test_eight_threads_submit_at_once():
    n, problems = hvd.size(), []

    def work(number):
        try:
            for i in range(60):
                name = f"t{number}.{i}"
                handle = hvd.allreduce_async(torch.full((3,), float(number)), name=name, op=hvd.Sum)
                gathered = hvd.allgather(torch.tensor([hvd.rank()]), name=name)
                mixed = hvd.grouped_allreduce([torch.ones(1), torch.ones(1).int()], name=name, op=hvd.Sum)
                assert hvd.synchronize(handle).tolist() == [number * n] * 3
                assert gathered.tolist() == list(range(n))
                assert [t.item() for t in mixed] == [n, n]
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    assert not problems, problems
    assert not any(thread.is_alive() for thread in threads)


@session
def test_a_blocked_thread_does_not_block_others():
    """One thread waits for an operation that completes last; those of the others complete meanwhile."""
    results = []
    waiter = threading.Thread(target=lambda: results.append(hvd.allreduce(torch.ones(1), name="z", op=hvd.Sum)))
    if hvd.rank() == 0:
        waiter.start()
    for i in range(20):
        assert hvd.allreduce(torch.ones(1), name=f"m{i}", op=hvd.Sum).item() == hvd.size()
    if hvd.rank() != 0:
        waiter.start()
    waiter.join(LIMIT_S)
    assert [result.item() for result in results] == [hvd.size()]


class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 24

    def __getitem__(self, i):
        return torch.tensor(float(i * i))


@pytest.mark.ranks(2)
@session
def test_data_loader_workers_beside_a_running_engine():
    for method, num_workers in (("fork", 2), ("spawn", 1)):
        loader = torch.utils.data.DataLoader(
            Squares(), batch_size=4, num_workers=num_workers, multiprocessing_context=method
        )
        total, pending = torch.zeros(()), []
        for i, batch in enumerate(loader):
            pending.append(hvd.allreduce_async(batch.sum(), name=f"{method}{i}", op=hvd.Sum))
        for handle in pending:
            total += hvd.synchronize(handle)
        assert total.item() == sum(i * i for i in range(24)) * hvd.size()
    assert_runtime_works()


class Shares(torch.utils.data.IterableDataset):
    """Divided by rank where it is read: in the workers of a DataLoader."""

    def __iter__(self):
        yield from range(hvd.rank(), 12, hvd.size())


@pytest.mark.ranks(1, 2, 3)
@session
def test_data_loader_workers_can_query_rank_and_size():
    loader = torch.utils.data.DataLoader(Shares(), batch_size=None, num_workers=1, multiprocessing_context="fork")
    assert list(loader) == list(range(hvd.rank(), 12, hvd.size()))
    assert_runtime_works()


@session
def test_a_forked_child_has_no_runtime_and_does_not_disturb_its_parents():
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert not hvd.is_initialized()
            with pytest.raises(hvd.HorovodInternalError, match=f"forked from rank {hvd.rank()}"):
                hvd.allreduce(torch.ones(1))
            hvd.shutdown()
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_runtime_works()
