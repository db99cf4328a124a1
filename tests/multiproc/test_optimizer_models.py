"""Twenty steps of several kinds of model, overlapped and sharded, equal one process on the combined batch."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import pytest
import torch
from hvd_session import assert_same_everywhere, session
from torch import nn
from torch.nn import functional
from training import MODELS, Embedded, assert_close, batch, joined, mine, mlp, of_all_ranks, seeded, train, weights

import horovod.torch as hvd

STEPS = 20


def check(name: str) -> None:
    """Compare in float64, to exclude rounding errors.

    SGD and Adam: one overlapped, the other sharded, depending on the number of ranks.
    """
    build, shape = MODELS[name]
    kinds = [
        lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=1e-3),
        lambda p: torch.optim.Adam(p, lr=1e-3),
    ]
    for make, sharded in zip(kinds, (hvd.size() > 2, hvd.size() <= 2), strict=True):
        model, single = build().double(), build().double()
        optimizer = hvd.DistributedOptimizer(
            make(model.parameters()), named_parameters=model.named_parameters(), sharded=sharded
        )
        train(model, optimizer, STEPS, in_double(mine(shape)))
        train(single, make(single.parameters()), STEPS, in_double(of_all_ranks(shape)))
        assert_close(weights(model), weights(single), 1e-9)
        assert_same_everywhere(weights(model))
        assert not sharded or optimizer.is_sharded


def in_double(data):
    def converted(step):
        inputs, targets = data(step)
        return inputs.double(), targets

    return converted


@pytest.mark.ranks(2, 4)
@session
def test_mlp():
    check("mlp")


@pytest.mark.ranks(2, 4, slow=(4,))
@session
def test_resnet():
    check("resnet")


@pytest.mark.ranks(2, 4)
@session
def test_lstm():
    check("lstm")


@pytest.mark.ranks(2, 4)
@session
def test_transformer_with_tied_embeddings():
    check("transformer")


@pytest.mark.ranks(2)
@session
def test_equals_distributed_data_parallel():
    """Compare with the same loop using DDP over gloo, in the same processes."""
    import torch.distributed as dist

    prefix = hvd.broadcast_object(f"ddp-{os.getpid()}-{time.monotonic_ns()}", 0)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    dist.init_process_group("gloo", store=dist.PrefixStore(prefix, store), rank=hvd.rank(), world_size=hvd.size())
    try:
        build, shape = MODELS["resnet"]
        make = lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9)  # noqa: E731
        parallel = nn.parallel.DistributedDataParallel(build())
        train(parallel, make(parallel.parameters()), STEPS, mine(shape))
        for sharded in (False, True):
            model = build()
            train(model, hvd.DistributedOptimizer(make(model.parameters()), sharded=sharded), STEPS, mine(shape))
            assert_close(weights(model), weights(parallel), 1e-5)
    finally:
        dist.destroy_process_group()


@pytest.mark.ranks(1, 2, 4)
@session
def test_sparse_embeddings():
    """Embeddings are reduced sparse or dense, with other rows on each rank; rank 0 once has no embedding gradient."""
    for as_dense in (False, True):
        model, single = seeded(Embedded)(), seeded(Embedded)()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1),
            named_parameters=model.named_parameters(),
            sparse_as_dense=as_dense,
        )
        train(model, optimizer, STEPS, mine((6,)))
        train(single, torch.optim.SGD(single.parameters(), lr=0.1), STEPS, of_all_ranks((6,)))
        assert model.embedding.weight.grad.is_sparse
        assert_close(weights(model), weights(single))
        assert_same_everywhere(weights(model))
        optimizer.zero_grad()
        inputs, targets = batch(hvd.rank(), 0, (6,))
        output = model.head(torch.zeros(4, 5)) if hvd.rank() == 0 else model(inputs)
        functional.cross_entropy(output, targets).backward()
        optimizer.step()
        assert_same_everywhere(weights(model))


@pytest.mark.ranks(1, 2, 3)
@session
def test_sparse_gradients_missing_on_a_rank_from_the_first_step():
    """The ranks that use a table change from step to step; in the first step no rank uses the second table."""
    for options in ({}, {"groups": 1}, {"sparse_as_dense": True}):
        tables, single = (nn.ModuleList([nn.Embedding(6, 2, sparse=True) for _ in range(2)]) for _ in range(2))
        for table in (*tables, *single):
            nn.init.ones_(table.weight)
        make = lambda net: torch.optim.SGD(net.parameters(), lr=0.1)  # noqa: E731
        optimizer = hvd.DistributedOptimizer(make(tables), tables.named_parameters(), **options)
        plain = make(single)
        for step in range(4):
            optimizer.zero_grad()
            plain.zero_grad()
            for rank in range(hvd.size()):
                used = (rank + step) % 2
                if step or used == 0:
                    (single[used](torch.tensor([rank, 5])).square().sum() / hvd.size()).backward()
                    if rank == hvd.rank():
                        tables[used](torch.tensor([rank, 5])).square().sum().backward()
            optimizer.step()
            plain.step()
        assert_close(weights(tables), weights(single))


@pytest.mark.ranks(1, 2, 4)
@session
def test_sparse_adam():
    for as_dense in (False, True):
        tables = [nn.Embedding(20, 4, sparse=True) for _ in range(2)]
        for table in tables:
            nn.init.ones_(table.weight)
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SparseAdam(tables[0].parameters(), lr=0.1), sparse_as_dense=as_dense
        )
        plain = torch.optim.SparseAdam(tables[1].parameters(), lr=0.1)
        for step in range(4):
            rows = [torch.arange(rank + 1) * 3 + step for rank in range(hvd.size())]
            optimizer.zero_grad()
            tables[0](rows[hvd.rank()]).square().sum().backward()
            optimizer.step()
            plain.zero_grad()
            (sum(tables[1](r).square().sum() for r in rows) / hvd.size()).backward()
            plain.step()
        assert_close([tables[0].weight.detach()], [tables[1].weight.detach()])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch's inductor needs a C++ compiler")
@pytest.mark.ranks(2)
@session
def test_a_model_compiled_by_inductor():
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", folder)
        for sharded in (False, True):
            model, single = mlp(), mlp()
            make = lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
            optimizer = hvd.DistributedOptimizer(make(model), sharded=sharded)
            train(torch.compile(model), optimizer, STEPS, mine((5,)))
            train(single, make(single), STEPS, of_all_ranks((5,)))
            assert_close(weights(model), weights(single), 1e-5)
            assert_same_everywhere(weights(model))


@pytest.mark.ranks(2)
@session
def test_compiled_model_autocast_and_grad_scaler():
    for sharded in (False, True):
        model, single = mlp(), mlp()
        compiled = torch.compile(model, backend="aot_eager")
        make = lambda net: torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)  # noqa: E731
        optimizer, plain = hvd.DistributedOptimizer(make(model), sharded=sharded), make(single)
        scalers = [torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3) for _ in range(2)]
        for step in range(6):
            for net, opt, scaler, (inputs, targets) in (
                (compiled, optimizer, scalers[0], batch(hvd.rank(), step)),
                (single, plain, scalers[1], joined(step, hvd.size())),
            ):
                opt.zero_grad()
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    loss = functional.cross_entropy(net(inputs), targets)
                if step == 4 and (opt is plain or hvd.rank() == 1):
                    loss = loss * float("inf")  # one rank overflows: all must skip this step
                scaler.scale(loss).backward()
                if opt is plain:
                    scaler.step(opt)
                else:
                    opt.synchronize()
                    scaler.unscale_(opt)
                    with opt.skip_synchronize():
                        scaler.step(opt)
                scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        assert_close(weights(model), weights(single), 2e-2)
        assert_same_everywhere(weights(model))
        assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.ranks(2)
@session
def test_nothing_grows_over_two_thousand_steps():
    for sharded in (False, True):
        parameter = nn.Parameter(torch.zeros(64))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1, momentum=0.9), sharded=sharded)

        def steps(count, parameter=parameter, optimizer=optimizer):
            for _ in range(count):
                optimizer.zero_grad()
                parameter.sum().backward()
                optimizer.step()

        steps(300)
        before = resources()
        steps(2000)
        after = resources()
        assert after["descriptors"] <= before["descriptors"]
        assert after["threads"] <= before["threads"]
        assert after["kib"] - before["kib"] < 2048, (before, after)


def resources() -> dict[str, int]:
    status = Path("/proc/self/status").read_text()
    field = lambda name: int(status.split(f"{name}:")[1].split()[0])  # noqa: E731
    return {"kib": field("VmRSS"), "threads": field("Threads"), "descriptors": len(os.listdir("/proc/self/fd"))}


def killed_in_mid_step(sharded: bool) -> None:
    hvd.init()
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(6)])
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), sharded=sharded)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 256)).sum()
        if step == 3 and hvd.rank() == 1:
            model[2].weight.register_post_accumulate_grad_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        loss.backward()
        if step < 3:
            optimizer.step()
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        optimizer.step()
    hvd.shutdown()


@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_is_killed_in_mid_step():
    killed_in_mid_step(sharded=False)


@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_is_killed_in_mid_step_of_a_sharded_optimizer():
    killed_in_mid_step(sharded=True)
