"""Modes of a user's thread, such as inference mode, do not affect the engine."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hvd_session import assert_runtime_works, session

import horovod.torch as hvd

pytestmark = [pytest.mark.ranks(1, 2, 3), pytest.mark.over_network, pytest.mark.both_ways]


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


MODES = {
    "inference": torch.inference_mode,
    "no_grad": torch.no_grad,
    "another default device": lambda: torch.device("meta"),  # replaces "cuda" on a machine without GPU
    "another default dtype": lambda: default_dtype(torch.float64),
}


@session
def test_every_operation_in_every_mode():
    for mode in MODES.values():
        with mode():
            _every_operation()
        assert_runtime_works()


def _every_operation():
    n, rank = hvd.size(), hvd.rank()
    ones = torch.ones(100, dtype=torch.float32, device="cpu")
    assert hvd.allreduce(ones, op=hvd.Sum)[0].item() == n
    assert hvd.allreduce_(ones.clone(), op=hvd.Average)[0].item() == 1.0
    handle = hvd.allreduce_async_(mine := ones.clone(), name="later", op=hvd.Sum, prescale_factor=0.5)
    while not hvd.poll(handle):  # the background thread makes progress
        pass
    hvd.synchronize(handle)
    assert mine[0].item() == n / 2
    assert hvd.allgather(torch.full((2, 1), rank, device="cpu")).flatten().tolist() == sorted([*range(n)] * 2)
    assert hvd.broadcast_(torch.full((3,), float(rank), device="cpu"), root_rank=0).tolist() == [0.0] * 3
    not_contiguous = torch.full((4, 2), float(rank), device="cpu").t()
    assert hvd.broadcast_(not_contiguous, root_rank=n - 1).tolist() == [[n - 1.0] * 4] * 2
    output, splits = hvd.alltoall(torch.full((n,), rank, device="cpu"), splits=[1] * n)
    assert (output.tolist(), splits.tolist()) == (list(range(n)), [1] * n)
    assert hvd.reducescatter(torch.ones(n, 2, device="cpu"), op=hvd.Sum).tolist() == [[n, n]]
    assert hvd.allgather_object({"rank": rank}) == [{"rank": peer} for peer in range(n)]
    assert hvd.broadcast_object("from the root" if rank == 0 else None, root_rank=0) == "from the root"
    hvd.barrier()


@session
def test_training_in_another_mode():
    for mode in ("another default device", "another default dtype"):
        for sharded in (False, True):
            _train_in(mode, sharded)


def _train_in(mode, sharded):
    torch.manual_seed(0)
    with default_dtype(torch.float32), torch.device("cpu"):
        models = [torch.nn.Linear(4, 2) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for model, context in zip(models, (contextlib.nullcontext, MODES[mode]), strict=True):
        with context():
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), sharded=sharded
            )
            hvd.broadcast_parameters(model.state_dict(), root_rank=0)
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for step in range(3):
                optimizer.zero_grad()
                model(torch.full((2, 4), float(step + hvd.rank()), dtype=torch.float32, device="cpu")).sum().backward()
                optimizer.step()
    plain, other = (model.state_dict() for model in models)
    assert all(torch.equal(plain[name], other[name]) for name in plain)


@session
def test_autograd_detects_a_tensor_modified_in_place():
    """As with torch's own operations, a gradient computed from the old value would be wrong."""
    for change in (lambda tensor: hvd.broadcast_(tensor, root_rank=0), hvd.allreduce_):
        weight = torch.ones(3, requires_grad=True)
        data = torch.full((3,), float(hvd.rank()))
        product = (weight * data).sum()  # saves data for the gradient
        change(data)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            product.backward()


@session
def test_sums_combine_the_ranks_of_a_host_in_order():
    parts = [torch.randn(1001, generator=torch.Generator().manual_seed(rank)) * 1e3 for rank in range(hvd.size())]
    for dtype in (torch.float32, torch.float16):
        wanted = parts[0].to(dtype).float()
        for part in parts[1:]:
            wanted = wanted + part.to(dtype).float()
        assert torch.equal(hvd.allreduce(parts[hvd.rank()].to(dtype), op=hvd.Sum), wanted.to(dtype))
