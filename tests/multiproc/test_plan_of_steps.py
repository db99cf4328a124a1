"""`hora.plan` on ranks that are their own hosts."""

from __future__ import annotations

import pytest
import torch
from hvd_session import raises, session

import hora
import horovod.torch as hvd


def net() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 10))


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@session
def test_all_ranks_get_the_same_plan_and_the_model_is_unchanged():
    torch.manual_seed(0)
    model = net()
    before = [p.detach().clone() for p in model.parameters()]
    rows = hora.plan(model, (torch.randn(16, 64), torch.randint(0, 10, (16,))))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(row.step_s > 0 and row.wire_bytes > 0 for row in rows)
    told = hvd.allgather_object([(row.name, row.step_s, row.wire_bytes) for row in rows])
    assert told[0] == told[1]
    assert len(hora.plan(model, torch.randn(16, 64), loss=lambda model, batch: model(batch).sum())) == len(rows)


@pytest.mark.ranks(2)
@session
def test_on_one_host_there_is_nothing_to_plan():
    with raises(ValueError, "one host"):
        hora.plan(net(), torch.randn(4, 64))
