"""The path of a gradient through the code, as drawn in ARCHITECTURE.md: from file to file, seldom back."""

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
def test_a_steady_gradient_seldom_returns_to_a_file():
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
    assert len(shortest) - len(set(shortest)) <= 10, shortest
