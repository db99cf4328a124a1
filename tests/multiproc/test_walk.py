"""The path of a gradient through the code, as drawn in ARCHITECTURE.md: few files, seldom visited twice."""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

import pytest
import torch
from hvd_session import session

import hora
import horovod.torch as hvd
from hora.engine.shm.native import library

pytestmark = pytest.mark.ranks(2)

FILES = {
    "torch/optimizer/base.py", "torch/optimizer/buckets.py", "torch/optimizer/order.py",
    "engine/schedule.py", "engine/queue.py", "engine/shm/counters.py", "engine/shm/reduction.py",
    "telemetry/meters.py",
}  # fmt: skip
FILES_OF_A_FIRST_ALLREDUCE = {
    "torch/ops.py", "torch/collective.py", "torch/process_sets.py", "torch/reduce_op.py", "torch/compression.py",
    "torch/autograd.py", "engine/process.py", "engine/runtime.py", "engine/request.py", "engine/queue.py",
    "engine/negotiation/shared_memory.py", "engine/negotiation/base.py", "engine/plan.py", "engine/status.py",
    "engine/execute.py", "engine/transport/shm.py", "engine/transport/arithmetic.py",
    "engine/shm/counters.py", "engine/shm/native.py", "telemetry/meters.py",
}  # fmt: skip
ROOT = Path(hora.__file__).parent


def calls_of(function):
    """Return the files of Hora that this thread called into, in order; consecutive calls into a file count once."""
    called = []

    def note(frame, event, _):
        if event == "call":
            called.append(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
    ours = [str(Path(name).relative_to(ROOT)) for name in called if Path(name).is_relative_to(ROOT)]
    return [name for name, _ in groupby(ours)]


@session
def test_a_gradient_passes_few_files_and_seldom_returns_to_one():
    if library() is None:
        pytest.skip("no native part")
    layer = torch.nn.Linear(512, 512, bias=False)  # one bucket, of which each rank reduces a slice
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layer.parameters(), lr=0.1), layer.named_parameters())

    def step():
        optimizer.zero_grad()
        loss = layer(torch.ones(4, 512)).sum()
        return calls_of(lambda: (loss.backward(), optimizer.step()))

    walks = [step() for _ in range(12)]  # the first step negotiates buckets; a rank that waits long checks on others
    shortest = min(walks, key=len)
    assert set(shortest) == FILES
    assert len(shortest) - len(FILES) <= 8, shortest


@session
def test_the_first_allreduce_passes_few_files():
    if library() is None:
        pytest.skip("no native part")
    walk = calls_of(lambda: hvd.allreduce(torch.ones(1000), name="new"))
    assert len(FILES_OF_A_FIRST_ALLREDUCE) <= 20
    assert set(walk) <= FILES_OF_A_FIRST_ALLREDUCE
