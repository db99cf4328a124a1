"""Optimizer settings from the environment: autotune, also with unequal batches, and the check for NaN."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch
from hvd_session import assert_runtime_works, assert_same_everywhere, session

import horovod.torch as hvd
from hora.errors import HorovodInternalError
from hora.torch.optimizer.autotune import DEFAULT

TRIALS = {
    "HOROVOD_AUTOTUNE": "1",
    "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1",
    "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "2",
    "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "6",
}
STEPS_A_TRIAL = 2 + 2  # the first two are not measured


def network() -> torch.nn.Module:
    """Return a model of 10 MB: several default buckets."""
    torch.manual_seed(0)
    return torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(10)))


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def distributed(model: torch.nn.Module) -> torch.optim.Optimizer:
    return hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())


def loss(model: torch.nn.Module, rank: int, number: int) -> torch.Tensor:
    return model(torch.full((2, 512), 0.1 * (rank + 1) + number)).pow(2).mean()


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, number: int) -> None:
    optimizer.zero_grad()
    loss(model, hvd.rank(), number).backward()
    optimizer.step()


def trained_alone(num_steps: int) -> torch.nn.Module:
    """Train on the average of all ranks' losses, without communication."""
    model = network()
    optimizer = sgd(model)
    for number in range(num_steps):
        optimizer.zero_grad()
        (sum(loss(model, rank, number) for rank in range(hvd.size())) / hvd.size()).backward()
        optimizer.step()
    return model


def check_autotune() -> None:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder, "log.csv")
        os.environ["HOROVOD_AUTOTUNE_LOG"] = str(log)
        try:
            hvd.init()
        finally:
            del os.environ["HOROVOD_AUTOTUNE_LOG"]
        model = network()
        optimizer = distributed(model)
        num_steps = 2 + 7 * STEPS_A_TRIAL + 3
        for number in range(num_steps):
            step(model, optimizer, number)
        assert_same_everywhere(model.parameters())
        for mine, right in zip(model.parameters(), trained_alone(num_steps).parameters(), strict=True):
            torch.testing.assert_close(mine, right)
        if hvd.rank() == 0:
            header, *rows = log.read_text().splitlines()
            assert header.endswith("tensor_fusion_threshold,score,overlap")
            assert len(rows) == 6 + 1  # the trials and the best setting
            assert {row.rpartition(",")[2] for row in rows} == {"0", "1"}  # with and without overlap
        hvd.barrier()
        hvd.shutdown()


@pytest.mark.ranks(2, env=TRIALS)
def test_autotune_tries_settings_stops_and_changes_no_result():
    check_autotune()


@pytest.mark.ranks(2, env=TRIALS | {"HORA_TRANSPORT": "tcp"})
def test_autotune_without_shared_memory():
    check_autotune()


@pytest.mark.ranks(2, env=TRIALS)
@session
def test_autotune_returns_to_the_default_when_a_rank_joins_during_tuning():
    model = network()
    optimizer = distributed(model)
    order = optimizer._bucket_order
    for number in range(2 + 2 * STEPS_A_TRIAL + hvd.rank() * STEPS_A_TRIAL):  # rank 1 makes one trial more
        step(model, optimizer, number)
    assert order._setting != DEFAULT
    hvd.join()
    step(model, optimizer, 0)
    step(model, optimizer, 1)
    assert order._tuner.done
    assert hvd.allgather_object(order._setting) == [DEFAULT] * 2
    assert_runtime_works()


@pytest.mark.ranks(2, env={"HORA_NAN_CHECK": "1"})
def test_a_nan_gradient_is_named_with_its_rank_and_parameter_before_its_reduction():
    hvd.init()
    model = network()
    optimizer = distributed(model)
    for number in range(3):
        step(model, optimizer, number)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    if hvd.rank() == 1:
        words = r"the gradient of 9\.bias on rank 1 has 512 NaN and 0 infinite of 512 values, in step \d+"
        with pytest.raises(FloatingPointError, match=words):
            (loss(model, 1, 3) * float("nan")).backward()
        hvd.shutdown()
    else:
        with pytest.raises(HorovodInternalError, match="shut down by rank 1"):
            step(model, optimizer, 3)
        hvd.shutdown()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
