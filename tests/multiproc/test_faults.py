"""Fail rank r in mid-collective by SIGKILL, exit or an exception: the others get an error that names it.

A wait that ends only at its own limit would outlast the test.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

import horovod.torch as hvd
from hora import engine
from waiting import wait_until

TCP = {"HORA_TRANSPORT": "tcp"}


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _leave():
    os._exit(3)


def _raise():
    # An uncaught exception ends the interpreter, whose exit handler shuts the runtime down.
    hvd.shutdown()
    os._exit(1)


DEATHS = {"sigkill": _kill, "exit": _leave, "raise": _raise}


def _fail(victim: int, death: str, place) -> None:
    """Kill the victim while every other rank is in an allreduce that cannot complete without it."""
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm")
    handle = None if place.rank == victim else hvd.allreduce_async(torch.ones(1000), name="never")
    place.gather("the others have submitted it")
    if place.rank == victim:
        DEATHS[death]()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.synchronize(handle)
    assert f"rank {victim}" in str(caught.value)
    assert "shut down" in str(caught.value)
    with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim}"):
        hvd.allreduce(torch.ones(2), name="later")
    hvd.shutdown()


@pytest.mark.parametrize("death", list(DEATHS))
@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_dies(death, place):
    _fail(1, death, place)


@pytest.mark.parametrize("death", list(DEATHS))
@pytest.mark.ranks(3, lost=(0,))
def test_rank_0_dies(death, place):
    _fail(0, death, place)


@pytest.mark.parametrize("death", list(DEATHS))
@pytest.mark.ranks(3, lost=(2,), env=TCP)
def test_rank_2_dies_without_shared_memory(death, place):
    _fail(2, death, place)


@pytest.mark.ranks(3, lost=(0,), env=TCP)
def test_rank_0_dies_without_shared_memory(place):
    _fail(0, "sigkill", place)


def _die_inside_a_large_reduction(victim: int) -> None:
    hvd.init()
    big = torch.ones(16_000_000)
    hvd.allreduce_(big, name="warm")
    if hvd.rank() == victim:
        queue = engine.current_runtime().sets.queue(0)
        hvd.allreduce_async_(big, name="big")
        wait_until("the reduction has begun", lambda: queue._stalls._since)
        _kill()

    def reduce_for_ever():
        for step in range(1000):
            hvd.allreduce_(big, name="big" if step == 0 else f"big{step}")

    with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim}"):
        reduce_for_ever()
    hvd.shutdown()


@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_dies_inside_a_large_reduction():
    _die_inside_a_large_reduction(1)


@pytest.mark.ranks(3, lost=(1,), env=TCP)
def test_rank_1_dies_inside_a_large_reduction_without_shared_memory():
    _die_inside_a_large_reduction(1)


@pytest.mark.ranks(3)
def test_a_rank_that_fails_to_execute_ends_the_operation_on_all_with_the_reason():
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm")
    if hvd.rank() == 1:
        queue = engine.current_runtime().sets.queue(0)
        queue.transport().allreduce = _no_memory
    with pytest.raises(hvd.HorovodInternalError, match="failed on rank 1: MemoryError: no more"):
        [hvd.allreduce(torch.ones(100_000), name=f"x{step}") for step in range(3)]
    hvd.shutdown()


def _no_memory(*arguments, **more):
    raise MemoryError("no more")


@pytest.mark.ranks(2)
def test_ctrl_c_in_mid_collective_ends_it_on_all_ranks():
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm")
    if hvd.rank() == 1:
        engine.current_runtime().sets.queue(0).transport().allreduce = _interrupted
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(torch.ones(4), name="x")
    with pytest.raises(hvd.HorovodInternalError, match=r"rank 1 was interrupted \(KeyboardInterrupt\)"):
        hvd.allreduce(torch.ones(4), name="x")
    hvd.shutdown()


def _interrupted(*arguments, **more):
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
def test_ctrl_c_while_waiting_for_other_ranks_affects_no_rank(place):
    hvd.init()
    if hvd.rank() == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                hvd.allreduce(torch.ones(4), name="early", op=hvd.Sum)
        finally:
            signal.signal(signal.SIGALRM, before)
        place.store.set("interrupted", "")
    else:
        place.store.wait(["interrupted"])
        assert hvd.allreduce(torch.ones(4), name="early", op=hvd.Sum).sum() == 8
    assert hvd.allreduce(torch.ones(4), name="later", op=hvd.Sum).sum() == 8
    hvd.barrier()
    hvd.shutdown()
