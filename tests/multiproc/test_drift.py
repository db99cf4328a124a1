"""Ranks that no longer train the same model are noticed, once, with the rank, the step and what differs."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
from hvd_session import raises, session
from torch import nn
from training import backward

import horovod.torch as hvd
from hora.errors import DriftError
from hora.telemetry import meter

pytestmark = pytest.mark.ranks(2, 4, slow=(4,))

apart = pytest.mark.ranks(3, env={"HORA_TRANSPORT": "tcp"})  # each rank is its own host

STEPS = 140  # more than the longest interval of comparisons, and the first ones


@contextlib.contextmanager
def warned(*words: str, on: int = 0):
    """Assert that one warning with these words comes, on one rank; without words that none comes on any rank."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logger = logging.getLogger("hora")
    logger.addHandler(handler)
    meter.pop_events()
    try:
        yield
    finally:
        logger.removeHandler(handler)
    drifts = [text for text in records if "drift" in text]
    events = [text for kind, text in meter.pop_events() if kind == "drift"]
    expected = 1 if words and hvd.rank() == on else 0
    assert len(drifts) == len(events) == expected, (drifts, events)
    for text in drifts + events:
        missing = [word for word in words if word not in text]
        assert not missing, f"{missing} not in: {text}"


def mlp(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


def made(model=None, build=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9), **options):
    model = model or mlp()
    return model, hvd.DistributedOptimizer(build(model.parameters()), model.named_parameters(), **options)


def train(model, optimizer, steps=STEPS, *, at=-1, change=lambda: None, step=None):
    """Train; the last rank makes `change` before step number `at`."""
    for number in range(1, steps + 1):
        if number == at and hvd.rank() == hvd.size() - 1:
            change()
        optimizer.zero_grad()
        backward(model, number)
        (step or optimizer.step)()


def last() -> int:
    return hvd.size() - 1


@session
def test_ranks_that_stay_together_are_not_reported():
    for options in ({}, {"sharded": True}, {"compression": hvd.Compression.fp16}, {"backward_passes_per_step": 2}):
        model, optimizer = made(**options)
        with warned():
            for number in range(STEPS):
                optimizer.zero_grad()
                for part in range(options.get("backward_passes_per_step", 1)):
                    backward(model, 2 * number + part)
                optimizer.step()


@session
def test_a_missing_broadcast():
    model, optimizer = made(mlp(seed=hvd.rank()))
    others = f"rank{'s 1-3' if hvd.size() > 2 else ' 1'}"
    with warned(
        "from the first steps on", "parameter 0.weight", "5 more parameters", others, "hvd.broadcast_parameters"
    ):
        train(model, optimizer, 12)
    model, optimizer = made(mlp(seed=hvd.rank()), sharded=True)
    with warned():  # the first step makes parameters in shared memory equal
        train(model, optimizer, 12)


@session
def test_a_learning_rate():
    for sharded in (False, True):
        model, optimizer = made(sharded=sharded)
        with warned("since step 21", f"learning rate 0.001 on rank {last()}, 0.01 on rank", "hvd.allreduce(loss)"):
            train(model, optimizer, at=21, change=lambda o=optimizer: o.param_groups[0].update(lr=0.001))


@session
def test_a_learning_rate_for_one_step_that_is_a_tensor_or_of_one_group():
    model, optimizer = made()
    with warned("since step 9", "learning rate 0.5 on rank"):
        rates = iter([0.01] * 8 + [0.5 if hvd.rank() == last() else 0.01] + [0.01] * STEPS)
        for _ in range(STEPS):
            optimizer.param_groups[0]["lr"] = next(rates)
            train(model, optimizer, 1)
    rate = torch.tensor(0.01)
    model, optimizer = made(build=lambda parameters: torch.optim.SGD(parameters, lr=rate, foreach=True))
    with warned("learning rate 0.005 on rank"):
        train(model, optimizer, at=21, change=lambda: rate.mul_(0.5))

    def in_two(parameters):
        first, *others = parameters
        return torch.optim.AdamW([{"params": [first]}, {"params": others}], lr=0.01)

    model, optimizer = made(build=in_two)
    with warned("since step 33", "betas of parameter group 1 [0.5, 0.9] on rank", "on all ranks"):
        train(model, optimizer, at=33, change=lambda: optimizer.param_groups[1].update(betas=(0.5, 0.9)))


@session
def test_a_scheduler_that_sees_only_its_ranks_loss():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1, factor=0.5)
    with warned("learning rate", "hvd.allreduce(loss)"):
        for epoch in range(20):
            train(model, optimizer, 10)
            scheduler.step(1.0 if hvd.rank() else 1.0 / (1 + epoch))


@session
def test_the_same_schedule_everywhere_is_no_difference():
    model, optimizer = made()
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS)

    def step():
        optimizer.step()
        scheduler.step()

    with warned():
        train(model, optimizer, step=step)


@session
def test_a_parameter_that_one_rank_changes():
    model, optimizer = made()
    with warned("since a step after", "parameter 2.weight", f"on rank {last()}", "by ", "one rank alone"):
        train(model, optimizer, at=21, change=lambda: model[2].weight.data.add_(1))


@session
def test_a_parameter_that_one_rank_takes_out_of_shared_memory():
    model, optimizer = made(sharded=True)

    def change():
        model[2].weight.data = model[2].weight.data + 1

    words = "since step 20", f"replacements of 2.weight.data 1 on rank {last()}", "set p.data alike on all ranks"
    with warned(*words):
        train(model, optimizer, at=21, change=change)
    # The next step has moved it back, with this rank's slice of it.
    assert len({str(value.tolist()) for value in hvd.allgather_object(model[2].weight.detach().clone())}) == 1


class Counting(nn.Module):
    """A model with a saved buffer, one that is not saved, and batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp()
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scale", torch.ones(3))
        self.register_buffer("cache", torch.zeros(3), persistent=False)

    def forward(self, x):
        self.cache += x.sum()
        return self.norm(self.body(x)) * self.scale


@session
def test_buffers_that_should_agree():
    model, optimizer = made(Counting())
    with warned():
        train(model, optimizer)
    with warned("buffer scale", f"on rank {last()}", "by 1e+02 %", 'local=["scale"]'):
        train(model, optimizer, at=21, change=lambda: model.scale.mul_(2))
    model, optimizer = made(Counting(), local=["scale"])
    with warned():
        train(model, optimizer, at=21, change=lambda: model.scale.mul_(2))


@session
def test_a_step_that_one_rank_leaves_out():
    model, optimizer = made()
    with warned("or before", f"on rank {last()}", "number of applied steps"):
        for number in range(1, STEPS):
            optimizer.zero_grad()
            backward(model, number)
            optimizer.synchronize()
            if number != 21 or hvd.rank() != last():
                with optimizer.skip_synchronize():
                    optimizer.step()


@session
def test_an_error_on_all_ranks_if_the_user_wants_it_on_one():
    model, optimizer = made(on_drift="error" if hvd.rank() == 0 else "warn")
    with raises(DriftError, "since step 5", "learning rate", f"rank {last()}"):
        train(model, optimizer, at=5, change=lambda: optimizer.param_groups[0].update(lr=0.5))
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    with warned():
        train(model, optimizer)  # it is said once


@session
def test_differences_by_intent():
    for options in ({"on_drift": "ignore"}, {"local": ["lr", "0", "2", "4"]}):
        model, optimizer = made(**options)
        with warned():
            train(model, optimizer, at=5, change=lambda optimizer=optimizer: optimizer.param_groups[0].update(lr=0.1))
    for wrong, word in (({"on_drift": "raise"}, "'raise'"), ({"local": "lr"}, "'lr'")):
        with raises(ValueError, word):
            made(**wrong)


@session
def test_a_broadcast_makes_ranks_equal_again():
    model, optimizer = made(mlp(seed=hvd.rank()))
    with warned():
        train(model, optimizer, 2)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer)


@pytest.mark.ranks(4)
@session(sets=True)
def test_each_process_set_compares_its_own_members(sets):
    model, optimizer = made(process_set=sets[1])
    with warned():
        optimizer.param_groups[0]["lr"] = 0.01 if hvd.rank() % 2 else 0.02
        train(model, optimizer)
    model, optimizer = made(process_set=sets[1])
    with warned("learning rate 0.5 on rank 3, 0.01 on rank 1", on=1):
        train(model, optimizer, at=21, change=lambda: optimizer.param_groups[0].update(lr=0.5))


@apart
@session
def test_between_hosts():
    for options in ({}, {"sharded": True}, {"compression": hvd.Compression.int8}):
        model, optimizer = made(**options)
        with warned():
            train(model, optimizer)
        with warned(f"since step {STEPS + 21}", "learning rate 0.001 on rank 2, 0.01 on ranks 0-1"):
            train(
                model, optimizer, at=21, change=lambda optimizer=optimizer: optimizer.param_groups[0].update(lr=0.001)
            )
    model, optimizer = made(mlp(seed=hvd.rank()))
    with warned("parameter 0.weight", "5 more parameters", "ranks 1-2"):
        train(model, optimizer, 12)


@session
def test_a_rank_that_has_joined_compares_again_later():
    model, optimizer = made()
    with warned():
        train(model, optimizer, 20 if hvd.rank() else 40)
        hvd.join()
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer)
    with warned("learning rate 0.001 on rank"):
        train(model, optimizer, at=21, change=lambda: optimizer.param_groups[0].update(lr=0.001))
