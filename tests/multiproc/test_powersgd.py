"""Compression.powersgd, compared with torch's own hook, and its contract with the optimizer.

Over TCP every rank is its own host, so all gradients are compressed; on one host none is.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from hvd_session import assert_same_everywhere, raises, session
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn import functional
from training import assert_close, distributed, mine, mlp, reference, sgd, train, weights

import horovod.torch as hvd

TCP = {"HORA_TRANSPORT": "tcp"}
pytestmark = pytest.mark.ranks(2, env=TCP)


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a model with matrices of several shapes, a convolution, vectors, and a matrix too small for rank 4."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Unflatten(1, (3, 4, 4)),
        nn.Conv2d(3, 16, 3, padding=1),
        nn.Flatten(),
        nn.Linear(256, 48),
        nn.Tanh(),
        nn.Linear(48, 48),
        nn.Tanh(),
        nn.Linear(48, 48),
        nn.Linear(48, 6),
    ).to(dtype)


def batch(rank: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(16, 48, generator=generator), torch.randint(0, 6, (16,), generator=generator)


def run(model, optimizer, steps, *, first=0, passes=1):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for part in range(passes):
            inputs, targets = batch(hvd.rank(), step * passes + part)
            functional.cross_entropy(model(inputs.to(next(model.parameters()).dtype)), targets).backward()
        optimizer.step()
    return model


def powersgd(**settings):
    return hvd.Compression.powersgd(**{"rank": 2, "start_step": 2, **settings})


def parameter_errors(optimizer) -> dict[str, torch.Tensor]:
    return optimizer.state_dict()["powersgd"]["errors"]


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_ten_steps_equal_torchs_hook(rank, tmp_path):
    hvd.init()
    try:
        place = hvd.broadcast_object(str(tmp_path / f"meet{rank}"), 0)
        dist.init_process_group("gloo", init_method=f"file://{place}", rank=hvd.rank(), world_size=hvd.size())
        theirs = nn.parallel.DistributedDataParallel(net(), gradient_as_bucket_view=True)
        state = PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=2)
        state.rng = SimpleNamespace(randint=lambda limit: 7)
        theirs.register_comm_hook(state, powerSGD_hook)
        run(theirs, sgd(theirs), 12)
        ours = net()
        optimizer = distributed(ours, compression=powersgd(rank=rank, seed=7))
        run(ours, optimizer, 12)
        assert len(optimizer.state_dict()["powersgd"]["factors"]) == (4 if rank == 4 else 5)
        assert_close(weights(ours), weights(theirs.module), 2e-5)
        plain = net()
        run(plain, distributed(plain), 12)
        assert any(not torch.allclose(a, b, atol=1e-3) for a, b in zip(weights(ours), weights(plain), strict=True))
        hvd.barrier()
        dist.destroy_process_group()
    finally:
        hvd.shutdown()


@session
def test_all_ranks_have_the_same_bits():
    model = net()
    run(model, optimizer := distributed(model, compression=powersgd()), 8)
    assert_same_everywhere(weights(model))
    errors = parameter_errors(optimizer)
    assert all(float(error.abs().max()) > 0 for error in errors.values())
    assert set(errors) == {"1.weight", "3.weight", "5.weight", "7.weight", "8.weight"}


@session
def test_errors_and_sent_values_add_up_to_the_gradient():
    """Summed over the ranks, gradient and old error equal the sent values and the new error."""
    model = net()
    optimizer = distributed(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), compression=powersgd())
    run(model, optimizer, 5)
    before = {name: error.clone() for name, error in parameter_errors(optimizer).items()}
    plain = copy.deepcopy(model)
    inputs, targets = batch(hvd.rank(), 5)
    functional.cross_entropy(plain(inputs), targets).backward()
    optimizer.zero_grad()
    functional.cross_entropy(model(inputs), targets).backward()
    optimizer.synchronize()
    after, own = parameter_errors(optimizer), dict(plain.named_parameters())
    for name, parameter in model.named_parameters():
        wanted = own[name].grad if name not in after else own[name].grad + before[name] - after[name]
        torch.testing.assert_close(hvd.allreduce(wanted, name=f"check.{name}"), parameter.grad, rtol=1e-4, atol=1e-6)


@session
def test_passes_per_step_sums_half_precision_and_another_memory_format():
    model, twice = net(), {"backward_passes_per_step": 2}
    run(model, distributed(model, sgd(model, lr=0.01), compression=powersgd(), **twice), 6, passes=2)
    assert_same_everywhere(weights(model))
    summed, averaged = net(), net()
    run(summed, distributed(summed, sgd(summed, lr=0.01), compression=powersgd(), op=hvd.Sum), 6)
    run(averaged, distributed(averaged, sgd(averaged, lr=0.02), compression=powersgd()), 6)
    assert_close(weights(summed), weights(averaged))
    half = net(torch.bfloat16)
    optimizer = distributed(half, compression=powersgd())
    run(half, optimizer, 5)
    assert_same_everywhere(weights(half))
    assert {error.dtype for error in parameter_errors(optimizer).values()} == {torch.float32}
    last = net().to(memory_format=torch.channels_last)
    run(last, distributed(last, compression=powersgd()), 5)
    first = net()
    run(first, distributed(first, compression=powersgd()), 5)
    assert_close(weights(last), weights(first))


@session
def test_a_high_rank_is_as_good_as_no_compression():
    model, plain = net(), net()
    run(model, distributed(model, compression=powersgd(rank=48, min_compression_rate=0.1)), 6)
    run(plain, distributed(plain), 6)
    assert_close(weights(model), weights(plain), 1e-3)


@session
def test_a_state_is_resumed():
    model = net()
    optimizer = distributed(model, compression=powersgd())
    run(model, optimizer, 5)
    saved, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    run(model, optimizer, 4, first=5)
    again = net()
    again.load_state_dict(values)
    fresh = distributed(again, compression=powersgd())
    fresh.load_state_dict(saved)
    # The first step of an optimizer is not compressed, so the errors are kept for the next one.
    run(again, fresh, 4, first=5)
    assert fresh.state_dict()["powersgd"]["num_steps"] == 9
    assert_same_everywhere(weights(again))
    assert_close(weights(again), weights(model), 0.05)
    # Another rank that loads the state ignores the errors, which are not its own.
    other = distributed(net(), compression=powersgd())
    other.load_state_dict(hvd.broadcast_object(saved, 0))
    found = parameter_errors(other)
    assert bool(found) == (hvd.rank() == 0)
    plain = torch.optim.SGD(net().parameters(), lr=0.1, momentum=0.9)
    plain.load_state_dict(saved)


@session
def test_only_rank_0_loads_a_state():
    """After a restart in which only the root reads the checkpoint, the members agree on steps and on new factors."""
    model = net()
    optimizer = distributed(model, compression=powersgd(start_step=4))
    run(model, optimizer, 6)
    saved, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again = net()
    fresh = distributed(again, compression=powersgd(start_step=4))
    if hvd.rank() == 0:
        fresh.load_state_dict(saved)
        again.load_state_dict(values)
    hvd.broadcast_parameters(again.state_dict(), 0)
    hvd.broadcast_optimizer_state(fresh, 0)
    run(again, fresh, 3, first=6)
    assert fresh.state_dict()["powersgd"]["num_steps"] == 9
    assert_same_everywhere(weights(again))


@session
def test_the_other_ranks_follow_when_rank_0_returns_to_an_earlier_state():
    model = net()
    optimizer = distributed(model, compression=powersgd())
    run(model, optimizer, 5)
    saved = copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, 2, first=5)
    if hvd.rank() == 0:
        optimizer.load_state_dict(saved)
    hvd.broadcast_optimizer_state(optimizer, 0)
    run(model, optimizer, 3, first=5)
    assert_same_everywhere(weights(model))


@session
def test_infinite_gradients_are_visible_on_all_ranks_and_leave_no_trace():
    model = net()
    optimizer = distributed(model, compression=powersgd())
    run(model, optimizer, 4)
    kept = weights(model)
    optimizer.zero_grad()
    inputs, targets = batch(hvd.rank(), 4)
    loss = functional.cross_entropy(model(inputs), targets)
    (loss * (float("inf") if hvd.rank() == 1 else 1.0)).backward()
    optimizer.synchronize()
    assert all(not bool(torch.isfinite(p.grad).all()) for p in model.parameters())
    optimizer.zero_grad()
    run(model, optimizer, 3, first=5)
    assert_same_everywhere(weights(model))
    assert all(bool(torch.isfinite(w).all()) for w in weights(model))
    assert any(not torch.equal(a, b) for a, b in zip(kept, weights(model), strict=True))


@pytest.mark.ranks(4, env=TCP)
@session(sets=True)
def test_process_sets_compress_among_their_members(sets):
    for process_set in sets:
        model = net()
        run(model, distributed(model, compression=powersgd(), process_set=process_set), 5)
        assert_same_everywhere(weights(model), process_set)


@session
def test_after_a_join_the_ranks_continue_together():
    model = net()
    optimizer = distributed(model, compression=powersgd())
    run(model, optimizer, 4)
    if hvd.rank() == 0:
        run(model, optimizer, 2, first=4)
    hvd.join()
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    run(model, optimizer, 3, first=6)
    assert_same_everywhere(weights(model))


@session
def test_different_settings_are_an_error_that_names_the_rank():
    model = net()
    optimizer = distributed(model, compression=powersgd(rank=2 + hvd.rank()))
    with raises(
        hvd.HorovodInternalError, "rank 0 has Compression.powersgd(rank=2", "rank 1 has Compression.powersgd(rank=3"
    ):
        run(model, optimizer, 2)
    model = net()
    optimizer = distributed(model, compression=powersgd() if hvd.rank() else hvd.Compression.none)
    with raises(hvd.HorovodInternalError, "rank 0 has Compression.none, rank 1 has Compression.powersgd"):
        run(model, optimizer, 2)


@session
def test_arguments_are_checked():
    for wrong in ({"rank": 0}, {"rank": 2.0}, {"start_step": 0}, {"min_compression_rate": 0}, {"seed": -1}):
        with raises(ValueError, next(iter(wrong))):
            hvd.Compression.powersgd(**wrong)
    model = net()
    for wrong in ({"op": hvd.Adasum}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"sharded": True}):
        with raises(ValueError, "sharded" if "sharded" in wrong else "powersgd"):
            distributed(model, compression=powersgd(), **wrong)
    with raises(ValueError, "DistributedOptimizer"):
        hvd.allreduce(torch.ones(3), compression=powersgd())
    with raises(AttributeError, "rank"):
        powersgd().rank = 3  # frozen: a compression cannot change between steps


@pytest.mark.ranks(2)
@session
def test_on_one_host_nothing_is_compressed():
    model = mlp()
    optimizer = distributed(model, compression=hvd.Compression.powersgd(rank=1, start_step=1, min_compression_rate=0.1))
    train(model, optimizer, 5, mine())
    assert_close(weights(model), reference())
    assert not optimizer.state_dict()["powersgd"]["factors"]


@session
def test_in_a_new_world_survivors_continue_and_a_newcomer_takes_part():
    """After an elastic reset, rank 1 has a new optimizer, and with it new error memory."""
    model = net()
    optimizer = distributed(model, compression=powersgd(start_step=3))
    run(model, optimizer, 5)
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:
        model = net()
        optimizer = distributed(model, compression=powersgd(start_step=3))
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    run(model, optimizer, 4, first=5)
    assert_same_everywhere(weights(model))
    state = optimizer.state_dict()["powersgd"]
    assert state["num_steps"] == 9
    assert state["factors"]
