"""Ranks that wait for each other in different collectives are named early, before the stall report."""

from __future__ import annotations

import logging
import re
import threading
import time

import pytest
import torch
from torch import nn
from training import backward

import horovod.torch as hvd
from waiting import wait_until

pytestmark = pytest.mark.ranks(2, 4, slow=(4,))

apart = pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp"})  # each rank is its own host

STEPS = 8  # more than those whose gradients are negotiated


class Warnings(logging.Handler):
    """Collects this rank's warnings; tells the ranks of the first one."""

    def __init__(self, place) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        self._place = place

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self._place.store.set("warned", "")


def made(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 3))
    return model, hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), 0.01), model.named_parameters(), **options
    )


def train(model, optimizer, steps: int) -> None:
    for number in range(1, steps + 1):
        optimizer.zero_grad()
        backward(model, number)
        optimizer.step()


def average() -> None:
    hvd.allreduce(torch.ones(1), name="metric")


def _part(place, early: bool, continue_training, continue_averaging) -> str:
    """Call one function on the ranks that leave the loop early, and the other one on the rest. Both wait for each other
    until rank 0 has warned. Then other threads make the calls that are missing. Returns rank 0's warning.
    """
    records = Warnings(place)
    logging.getLogger("hora").addHandler(records)
    try:
        if early:
            continue_averaging()
            continue_training()
        else:

            def release() -> None:
                wait_until("rank 0 has warned", lambda: place.store.check(["warned"]))
                continue_averaging()

            releasing = threading.Thread(target=release)
            releasing.start()
            continue_training()
            releasing.join()
        hvd.barrier()
    finally:
        logging.getLogger("hora").removeHandler(records)
    assert len(records.texts) == (hvd.rank() == 0), records.texts
    return "".join(records.texts)


def _leave_the_loop(place, *, rank_0_first: bool, steps: int = STEPS, **options) -> None:
    hvd.init()
    model, optimizer = made(**options)
    train(model, optimizer, steps)
    early = (hvd.rank() == 0) == rank_0_first
    text = _part(place, early, lambda: train(model, optimizer, 1), average)
    if hvd.rank() == 0:
        mine, theirs = re.split(r", and rank [123] waits in ", text)
        assert re.match(r"neither rank 0 nor rank [123] can go on: rank 0 waits in ", mine)
        averaging, reducing = (mine, theirs) if rank_0_first else (theirs, mine)
        assert "allreduce.metric" in averaging
        assert "allreduce.metric" not in reducing
        if steps:
            assert mine.count("(step ") == theirs.count("(step ") == 1
        for its, function in (averaging, "in average"), (reducing, "in train"):
            assert "test_standstill.py:" in its
            assert function in its
    hvd.shutdown()


def test_ranks_that_leave_the_loop_before_rank_0(place):
    _leave_the_loop(place, rank_0_first=False)


def test_rank_0_leaves_the_loop_first(place):
    _leave_the_loop(place, rank_0_first=True)


def test_in_the_first_step(place):
    _leave_the_loop(place, rank_0_first=False, steps=0)


@pytest.mark.ranks(2)
def test_with_a_sharded_optimizer(place):
    _leave_the_loop(place, rank_0_first=False, sharded=True)


@apart
def test_between_hosts(place):
    _leave_the_loop(place, rank_0_first=False)


@apart
def test_rank_0_between_hosts(place):
    _leave_the_loop(place, rank_0_first=True)


def test_two_named_collectives_in_another_order(place):
    hvd.init()
    text = _part(place, hvd.rank() == 0, lambda: hvd.allreduce(torch.ones(1), name="loss"), average)
    if hvd.rank() == 0:
        assert "rank 0 waits in allreduce.metric (" in text
        assert re.search(r"rank [123] waits in allreduce.loss \(", text)
    hvd.shutdown()


@pytest.mark.ranks(2)
def test_a_rank_that_can_go_on_is_not_named(place):
    """Rank 1 is late with its gradients, and only another thread of it waits for rank 0."""
    hvd.init()
    records = Warnings(place)
    logging.getLogger("hora").addHandler(records)
    model, optimizer = made()
    train(model, optimizer, STEPS)
    if hvd.rank() == 1:
        metric = hvd.allreduce_async(torch.ones(1), name="metric")
        waiting = threading.Thread(target=hvd.synchronize, args=(metric,))
        waiting.start()
        time.sleep(7)  # rank 0 looks several times meanwhile
        train(model, optimizer, 1)
        waiting.join()
    else:
        train(model, optimizer, 1)
        average()
    hvd.barrier()
    logging.getLogger("hora").removeHandler(records)
    assert records.texts == []
    hvd.shutdown()
