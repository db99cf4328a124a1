"""Training steps between hosts without negotiation; each rank is its own host here (see also `test_two_hosts`)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
from pathlib import Path

import pytest
import torch
from hvd_session import session

import horovod.torch as hvd
from hora import engine
from hora.engine.transport.host_reduction import HostLink
from waiting import wait_until

pytestmark = pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp"})

encrypted = pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp", "HORA_ENCRYPT": "always"})


LARGE = (1_100_000, 5, 1_100_000, 70)  # several buckets


class Training:
    """A model of several buckets with known gradients: that of rank r is r + 1."""

    def __init__(self, sizes=(3000, 5, 2000), **options):
        self.parameters = [torch.nn.Parameter(torch.zeros(size)) for size in sizes]
        named = [(f"p{number}", parameter) for number, parameter in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.parameters, lr=1.0), named, on_drift="ignore", **options
        )  # comparisons are announced
        self.num_steps = 0

    def step(self, expected_sum, *, scale=1.0):
        """Make one step, in which the gradients of all ranks add up to `expected_sum`."""
        before = [parameter.detach().clone() for parameter in self.parameters]
        self.optimizer.zero_grad()
        sum((parameter * (hvd.rank() + 1) * scale).sum() for parameter in self.parameters).backward()
        self.optimizer.step()
        self.num_steps += 1
        for parameter, old in zip(self.parameters, before, strict=True):
            wanted = torch.full_like(old, expected_sum * scale / hvd.size())
            torch.testing.assert_close(old - parameter.detach(), wanted, rtol=1e-4, atol=1e-4)


def rounds():
    """Return the number of rounds that this rank has negotiated."""
    (negotiation,) = engine.current_runtime().sets.trees().values()
    return negotiation.rounds


def assert_nothing_is_announced(training, num_steps=5):
    before = rounds()
    for _ in range(num_steps):
        training.step(6.0)
    found = rounds()
    training.step(6.0)  # no rank announces a join before all have counted; rank 0 checks once a second
    assert found == before


@encrypted
@session
def test_steady_steps_are_not_announced():
    for sizes in ((1,), (3000, 5, 2000), LARGE):
        training = Training(sizes)
        for _ in range(3):
            training.step(6.0)
        assert_nothing_is_announced(training, num_steps=20)
        training.step(6.0, scale=3.0)


@encrypted
@session
def test_joined_ranks_are_left_out_and_training_continues_without_announcements():
    join_in_turns(Training())
    join_in_turns(Training(LARGE))
    join_in_turns(Training(compression=hvd.Compression.int8))


def join_in_turns(training):
    for epoch in range(3):
        for _ in range(3):
            training.step(6.0)
        assert_nothing_is_announced(training)
        assert hvd.size() == 3
        order = [(rank + epoch) % 3 for rank in range(3)]  # the number of additional batches of each rank
        for batch in range(order[hvd.rank()]):
            training.step(sum(rank + 1 for rank in range(3) if order[rank] > batch))
        assert hvd.join() == order.index(2)
        for parameter in training.parameters:  # a joined rank has missed steps
            hvd.broadcast_(parameter.data, root_rank=0)
            assert (parameter == parameter[0]).all()


@session
def test_a_rank_joins_while_others_call_another_collective_first():
    """Rank 0 joins at once; the others call an allreduce before the step that detects the join."""
    training = Training()
    for _ in range(3):
        training.step(6.0)
    if hvd.rank() > 0:
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="metric").item() == 2.0
        training.step(5.0)
    hvd.join()
    for _ in range(2):
        training.step(6.0)
    assert_nothing_is_announced(training)


@encrypted
@session
def test_a_sharded_optimizer_announces_nothing():
    for sizes in ((3000, 5, 2000), LARGE):
        plain, training = Training(sizes), Training(sizes, sharded=True)
        for step in range(3):
            plain.step(6.0, scale=step + 1.0)
            training.step(6.0, scale=step + 1.0)
        assert_nothing_is_announced(training, num_steps=5)
        for _ in range(6):
            plain.step(6.0)
        for one, two in zip(plain.parameters, training.parameters, strict=True):
            assert torch.equal(one, two)


@session
def test_a_sharded_optimizer_reports_a_joined_rank():
    training = Training(sharded=True)
    for _ in range(3):
        training.step(6.0)
    if hvd.rank() > 0:
        with pytest.raises(hvd.HorovodInternalError, match=r"REDUCESCATTER is not supported with Join.*0"):
            training.step(6.0)
    hvd.join()


@session
def test_two_optimizers_step_in_any_order():
    first, second = Training(), Training((100, 200))
    for _ in range(3):
        first.step(6.0)
        second.step(6.0)
    before = rounds()
    for step in range(6):
        for training in (first, second) if step % 2 else (second, first):
            training.step(6.0)
    assert rounds() == before


@session
def test_missing_gradients_count_as_zeros_and_thawed_parameters_are_reduced():
    training = Training()
    frozen = training.parameters[0]
    frozen.requires_grad_(False)
    for step in range(12):
        frozen.requires_grad_(step >= 6)
        training.optimizer.zero_grad()
        used = [p for p in training.parameters if p.requires_grad]
        if step == 3 and hvd.rank() == 1:
            used = used[:1]
        before = [p.detach().clone() for p in training.parameters]
        sum((p * (hvd.rank() + 1)).sum() for p in used).backward()
        training.optimizer.step()
        moved = [(old - p.detach()).mean().item() for old, p in zip(before, training.parameters, strict=True)]
        expected = [0.0 if step < 6 else 2.0, 2.0, 4 / 3 if step == 3 else 2.0]
        assert moved == pytest.approx(expected, abs=1e-5), step


@session
def test_a_changed_order_is_negotiated_again():
    training = Training(LARGE)
    for step in range(30):
        training.optimizer.zero_grad()
        order = training.parameters if step < 10 else training.parameters[::-1]
        x = torch.ones(())
        for parameter in order:  # backward visits the last one first
            x = x + 0 * x + (parameter * (hvd.rank() + 1)).sum()
        x.backward()
        before = training.parameters[0].detach().clone()
        training.optimizer.step()
        torch.testing.assert_close(before - training.parameters[0].detach(), torch.full_like(before, 2.0))


@pytest.mark.ranks(3, lost=(1,), env={"HORA_TRANSPORT": "tcp"})
def test_a_rank_that_dies_during_training_is_named():
    hvd.init()
    training = Training((300_000,))
    for _ in range(3):
        training.step(6.0)

    def train():
        for step in range(100_000):
            if step == 10 and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            training.step(6.0)

    with pytest.raises(hvd.HorovodInternalError, match="rank 1 "):
        train()
    hvd.shutdown()


def test_a_rank_interrupted_while_waiting_for_another_host_is_named_and_all_can_restart(place):
    """Ctrl-C in the middle of a bucket: other hosts already have its data, so the step cannot be repeated."""
    look_around, interrupting = HostLink._look_around, []

    def interrupted(link):
        if interrupting:
            raise interrupting.pop()
        look_around(link)

    HostLink._look_around = interrupted
    try:
        hvd.init()
        training = Training()
        for _ in range(3):
            training.step(6.0)
        if hvd.rank() == 0:
            interrupting.append(KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                training.step(6.0)
            place.store.set("interrupted", "")
        else:
            place.store.wait(["interrupted"])
        named = r"^rank 0 was interrupted \(KeyboardInterrupt\).*hvd\.init\(\)"

        def two_steps():  # rank 0 has sent all of its small bucket, so the error may follow the first step
            training.step(6.0)
            training.step(6.0)

        with pytest.raises(hvd.HorovodInternalError, match=named):
            two_steps()
        hvd.shutdown()
    finally:
        HostLink._look_around = look_around
    hvd.init()
    Training().step(6.0)
    hvd.shutdown()


@pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp", "HOROVOD_STALL_CHECK_TIME_SECONDS": "1"})
@session
def test_only_a_late_rank_is_named():
    named = []
    with contextlib.ExitStack() as stack:
        own = stack.enter_context(tempfile.TemporaryDirectory())
        reports = [Path(folder, "named") for folder in hvd.allgather_object(own)]

        def note(record: logging.LogRecord) -> None:
            if "Missing ranks" in record.getMessage():
                named.append(record.getMessage())
                reports[hvd.rank()].touch()

        handler = logging.Handler()
        handler.emit = note
        logging.getLogger("hora").addHandler(handler)
        stack.callback(logging.getLogger("hora").removeHandler, handler)
        training = Training()
        for _ in range(3):
            training.step(6.0)
        if hvd.rank() == 1:
            wait_until("the others have reported this rank", lambda: reports[0].exists() and reports[2].exists())
        training.step(6.0)
    assert all("\n1: [" in line and "\n0: [" not in line and "\n2: [" not in line for line in named)
    assert bool(named) == (hvd.rank() != 1)
