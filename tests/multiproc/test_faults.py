"""Fail rank r in mid-collective by SIGKILL, exit or an exception: the others hear of it at once, and who it was."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import horovod.torch as hvd
from hora import engine

GLOO = {"HORA_TRANSPORT": "gloo"}
LIMIT_S = 5


def _kill():
    os.kill(os.getpid(), signal.SIGKILL)


def _leave():
    os._exit(3)


def _raise():
    # What an uncaught exception does to the runtime: the interpreter ends and its exit handler shuts down.
    hvd.shutdown()
    os._exit(1)


DEATHS = {"sigkill": _kill, "exit": _leave, "raise": _raise}


def _survive(victim: int, death: str) -> None:
    """Every rank but the victim waits in an allreduce that can't complete."""
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm")
    started = time.monotonic()
    if hvd.rank() == victim:
        time.sleep(0.3)  # the others are inside by then; were they not, they would fail when they submit
        DEATHS[death]()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1000), name="never")
    waited = time.monotonic() - started
    assert waited < LIMIT_S, f"noticed after {waited:.1f} s"
    assert f"rank {victim}" in str(caught.value)
    assert "shut down" in str(caught.value)
    with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim}"):
        hvd.allreduce(torch.ones(2), name="later")
    hvd.shutdown()


@pytest.mark.parametrize("death", list(DEATHS))
@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_dies(death):
    _survive(1, death)


@pytest.mark.parametrize("death", list(DEATHS))
@pytest.mark.ranks(3, lost=(0,))
def test_rank_0_dies(death):
    _survive(0, death)


@pytest.mark.parametrize("death", list(DEATHS))
@pytest.mark.ranks(3, lost=(2,), env=GLOO)
def test_rank_2_dies_without_shared_memory(death):
    _survive(2, death)


@pytest.mark.ranks(3, lost=(0,), env=GLOO)
def test_rank_0_dies_without_shared_memory():
    _survive(0, "sigkill")


def _die_inside_a_large_reduction(victim: int) -> None:
    hvd.init()
    big = torch.ones(16_000_000)
    hvd.allreduce_(big, name="warm")
    started = None
    if hvd.rank() == victim:
        hvd.allreduce_async_(big, name="big")
        time.sleep(0.02)
        _kill()

    def reduce_for_ever():
        nonlocal started
        for step in range(1000):
            started = time.monotonic()
            hvd.allreduce_(big, name="big" if step == 0 else f"big{step}")

    with pytest.raises(hvd.HorovodInternalError, match=f"rank {victim}"):
        reduce_for_ever()
    assert time.monotonic() - started < LIMIT_S
    hvd.shutdown()


@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_dies_inside_a_large_reduction():
    _die_inside_a_large_reduction(1)


@pytest.mark.ranks(3, lost=(1,), env=GLOO)
def test_rank_1_dies_inside_a_large_reduction_without_shared_memory():
    _die_inside_a_large_reduction(1)


@pytest.mark.ranks(3)
def test_a_rank_that_cannot_do_its_part_ends_it_for_all_with_the_reason():
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm")
    if hvd.rank() == 1:
        queue = engine.current_runtime().process_sets.queue(0)
        queue.transport().allreduce = _no_memory
    with pytest.raises(hvd.HorovodInternalError, match="failed on rank 1: MemoryError: no more"):
        [hvd.allreduce(torch.ones(100_000), name=f"x{step}") for step in range(3)]
    hvd.shutdown()


def _no_memory(*arguments, **more):
    raise MemoryError("no more")


@pytest.mark.ranks(2)
def test_ctrl_c_in_mid_collective_ends_it_for_all():
    hvd.init()
    hvd.allreduce(torch.ones(4), name="warm")
    if hvd.rank() == 1:
        engine.current_runtime().process_sets.queue(0).transport().allreduce = _interrupted
        with pytest.raises(KeyboardInterrupt):
            hvd.allreduce(torch.ones(4), name="x")
    with pytest.raises(hvd.HorovodInternalError, match="failed on rank 1: it was interrupted"):
        hvd.allreduce(torch.ones(4), name="x")
    hvd.shutdown()


def _interrupted(*arguments, **more):
    raise KeyboardInterrupt


@pytest.mark.ranks(2)
def test_ctrl_c_while_waiting_for_the_others_harms_nobody():
    hvd.init()
    if hvd.rank() == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with pytest.raises(KeyboardInterrupt):
                hvd.allreduce(torch.ones(4), name="early", op=hvd.Sum)
        finally:
            signal.signal(signal.SIGALRM, before)
    else:
        time.sleep(1.0)
        assert hvd.allreduce(torch.ones(4), name="early", op=hvd.Sum).sum() == 8
    assert hvd.allreduce(torch.ones(4), name="later", op=hvd.Sum).sum() == 8
    hvd.barrier()
    hvd.shutdown()
