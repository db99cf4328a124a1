"""Ranks that part under torch's DistributedDataParallel on the backend "hora" are noticed as under hvd."""

from __future__ import annotations

import contextlib
import logging

import pytest
import torch
import torch.distributed as dist
from hvd_session import needs_torch_2_7
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hora import torch_backend

pytestmark = [pytest.mark.ranks(2), needs_torch_2_7]
STEPS = 150


@contextlib.contextmanager
def group(place, backend="hora"):
    torch_backend.register()
    dist.init_process_group(backend, store=place.store, rank=place.rank, world_size=place.size)
    try:
        yield
        dist.barrier()
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def warned(*words: str):
    """Assert that rank 0 warns once with these words; without words that nobody warns."""
    records: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("hora").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("hora").removeHandler(handler)
    drifts = [text for text in records if "drift" in text]
    assert len(drifts) == (1 if words and dist.get_rank() == 0 else 0), drifts
    assert all(word in text for text in drifts for word in words), drifts


def made(build=lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Linear(20, 2))
    parallel = DistributedDataParallel(model)
    return parallel, build(parallel.parameters())


def train(model, optimizer, steps=STEPS, *, at=-1, change=lambda: None):
    """Train; rank 1 makes `change` before step number `at`."""
    for number in range(1, steps + 1):
        if number == at and dist.get_rank() == 1:
            change()
        optimizer.zero_grad()
        generator = torch.Generator().manual_seed(1000 * dist.get_rank() + number)
        model(torch.randn(8, 4, generator=generator)).square().mean().backward()
        optimizer.step()


def test_ranks_that_stay_together(place):
    with group(place):
        for build in (
            lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
            lambda parameters: ZeroRedundancyOptimizer(parameters, torch.optim.SGD, lr=0.01),
        ):
            with warned():
                train(*made(build))
        model, optimizer = made()
        with warned():
            for _ in range(STEPS // 2):
                with model.no_sync():
                    model(torch.randn(8, 4)).sum().backward()
                train(model, optimizer, 1)


def test_a_learning_rate_and_a_parameter(place):
    with group(place):
        model, optimizer = made()
        with warned("since step 21", "learning rate 0.001 on rank 1, 0.01 on rank 0", "hvd.allreduce(loss)"):
            train(model, optimizer, at=21, change=lambda: optimizer.param_groups[0].update(lr=0.001))
        model, optimizer = made()
        with warned("since a step after", "parameter 3.weight", "on rank 1"):
            train(model, optimizer, at=21, change=lambda: model.module[3].weight.data.add_(1))


def test_a_model_in_a_group_of_some_ranks(place):
    with group(place):
        for one in [dist.new_group([0]), dist.new_group([1]), dist.new_group([0, 1])]:
            if dist.get_rank(one) < 0:
                continue
            torch.manual_seed(0)
            model = DistributedDataParallel(nn.Linear(4, 2), process_group=one)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            both = dist.get_world_size(one) > 1
            with warned(*["learning rate 0.001 on rank 1"] if both else []):
                train(model, optimizer, at=21, change=lambda o=optimizer: o.param_groups[0].update(lr=0.001))


def test_ranks_with_unequal_inputs_are_no_difference(place):
    with group(place):
        model, optimizer = made()
        with warned():
            with Join([model]):
                train(model, optimizer, 60 if dist.get_rank() else 90)
            train(model, optimizer)
