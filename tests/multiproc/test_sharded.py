"""sharded=True: every optimizer equals its unsharded counterpart, and any rank can ask for its complete state."""

from __future__ import annotations

import contextlib
import copy
import mmap
import multiprocessing
import os
import warnings
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from hvd_session import assert_same_everywhere, raises, session
from torch import nn
from torch.nn import functional
from training import assert_close, assert_states_close, batch, mine, mlp, of_all_ranks, train, weights

import horovod.torch as hvd
from hora.engine.shm import segment

pytestmark = pytest.mark.ranks(1, 2, 4)

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01},
    "Adamax": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.01},
    "RMSprop": {"lr": 0.01, "momentum": 0.5, "centered": True},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 1.0},
    "ASGD": {"lr": 0.1, "t0": 2},
    "Rprop": {"lr": 0.01},
}


def adam(model, **options):
    return torch.optim.Adam(model.parameters(), **{"lr": 0.01, **options})


def sharded(optimizer, **options):
    return hvd.DistributedOptimizer(optimizer, sharded=True, **options)


@pytest.mark.ranks(2, 4)
@session
def test_gradients_of_half_precision_neither_overflow_nor_underflow():
    for count, shards in (
        (7, False),
        (300_000, False),
        (300_000, True),
    ):  # a direct reduction, a sliced one, a scattered one
        for number in (40000.0, 2.0**-24):
            parameter = nn.Parameter(torch.zeros(count, dtype=torch.float16))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), sharded=shards)
            for _ in range(3):  # buckets are used from the second or third step on
                optimizer.zero_grad()
                (parameter * number).sum().backward()
                optimizer.step()
                assert set(parameter.tolist()) == {-number}
                hvd.barrier()  # before another rank changes memory that this rank may share
                parameter.detach().zero_()
                hvd.barrier()


@pytest.mark.ranks(2, 4)
@session
def test_every_elementwise_optimizer_equals_its_unsharded_counterpart():
    from hora.torch.sharded.optimizer import ELEMENTWISE

    assert set(OPTIMIZERS) == set(ELEMENTWISE)
    for index, (name, options) in enumerate(OPTIMIZERS.items()):
        options = {**options, "foreach": index % 2 == 0}
        kind = getattr(torch.optim, name)
        models = [mlp(), mlp()]
        optimizer = sharded(kind(models[0].parameters(), **options))
        unsharded = hvd.DistributedOptimizer(kind(models[1].parameters(), **options))
        for model, opt in zip(models, (optimizer, unsharded), strict=True):
            train(model, opt, 4, mine())
        assert_close(weights(models[0]), weights(models[1]), 1e-5)
        assert_states_close(optimizer.state_dict(), unsharded.state_dict(), 1e-5)


@session
def test_unsupported_optimizers_and_options_are_rejected_by_name():
    model = mlp()
    matrices = [p for p in model.parameters() if p.dim() == 2]
    kinds = [getattr(torch.optim, name, None) for name in ("LBFGS", "SparseAdam", "Adafactor", "Muon")]  # as torch has
    lars = type("LARS", (torch.optim.SGD,), {})
    for optimizer in (lars(matrices, lr=0.1), *(kind(matrices) for kind in kinds if kind is not None)):
        with raises(ValueError, "sharded=True", type(optimizer).__name__):
            sharded(optimizer)
    with raises(ValueError, "Average or Sum"):
        sharded(adam(model), op=hvd.Max)
    with raises(ValueError, "groups"):
        sharded(adam(model), groups=2)
    with raises(ValueError, "Compression"):
        sharded(adam(model), compression=hvd.ErrorFeedback(hvd.Compression.fp16))
    if hvd.size() > 1:
        table = nn.Embedding(5, 2, sparse=True)
        optimizer = sharded(torch.optim.SGD(table.parameters(), lr=0.1))
        table(torch.tensor([1])).sum().backward()
        with raises(ValueError, "sparse gradients", "noname"):
            optimizer.step()


def two_groups(model):
    bias = [p for p in model.parameters() if p.dim() == 1]
    matrices = [p for p in model.parameters() if p.dim() == 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": bias, "lr": 0.05, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01)


@session
def test_groups_schedulers_frozen_layers_accumulation_and_compression():
    for options, tolerance in (({}, 1e-5), ({"compression": hvd.Compression.fp16}, 1e-2)):
        model, single = mlp(), mlp()
        for net in (model, single):
            net[2].weight.requires_grad_(False)
        optimizer, plain = sharded(two_groups(model), backward_passes_per_step=2, **options), two_groups(single)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.7) for o in (optimizer, plain)]
        for _ in range(3):
            train(model, optimizer, 2, mine(), accumulate=2)
            train(single, plain, 2, of_all_ranks(), accumulate=2)
            for scheduler in schedulers:
                scheduler.step()
        assert_close(weights(model), weights(single), tolerance)
        for net in (model, single):
            net[2].weight.requires_grad_(True)
        train(model, optimizer, 3, mine(), accumulate=2)
        train(single, plain, 3, of_all_ranks(), accumulate=2)
        assert_close(weights(model), weights(single), 3 * tolerance)
        assert_same_everywhere(weights(model))


class Branches(nn.Module):
    """Gradients of the branches arrive in the reverse of `order`."""

    def __init__(self, order):
        super().__init__()
        torch.manual_seed(3)
        self.branches = nn.ModuleList(nn.Linear(5, 3, bias=index % 3 > 0) for index in range(len(order)))
        self.order = order

    def forward(self, inputs):
        return sum(self.branches[index](inputs) for index in self.order)


@pytest.mark.ranks(2, 4)
@session
def test_many_buckets_share_a_few_places():
    """In any order, only a gradient whose place is in use waits for it."""
    from hora.torch.sharded import optimizer as module

    one_parameter_each = partial(module.plan_buckets, bucket_bytes=1)
    with mock.patch.object(module, "plan_buckets", one_parameter_each):
        _train_branches()


def _train_branches():
    forward, backward = list(range(11)), list(reversed(range(11)))
    orders = {"equal": forward, "opposite": backward if hvd.rank() else forward}
    for name, order in orders.items():
        models = [Branches(order), Branches(order)]
        optimizer, plain = sharded(adam(models[0])), adam(models[1])
        norms = []
        for step in range(4):
            models[0].order = order if step else forward
            for model, opt, data in zip(models, (optimizer, plain), (mine(), of_all_ranks()), strict=True):
                inputs, targets = data(step)
                opt.zero_grad()
                functional.cross_entropy(model(inputs), targets).backward()
                norms.append(hvd.clip_grad_norm_(model.parameters(), 0.05))
                opt.step()
        assert optimizer.is_sharded, name
        assert len(optimizer._shards.buckets) == 18
        assert_close(weights(models[0]), weights(models[1]), 1e-5)
        torch.testing.assert_close(norms[::2], norms[1::2])


@session
def test_clipping_by_the_global_norm():
    for clip in (
        lambda net: hvd.clip_grad_norm_(net.parameters(), 0.05),
        lambda net: hvd.clip_grad_norm_(net.parameters(), 0.05, norm_type=float("inf")),
        lambda net: hvd.clip_grad_norm_([net[0].weight], 0.01),
    ):
        norms: list[list[torch.Tensor]] = [[], []]
        models = [mlp(), mlp()]
        optimizers = [sharded(adam(models[0])), hvd.DistributedOptimizer(adam(models[1]))]
        for model, optimizer, found in zip(models, optimizers, norms, strict=True):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                train(model, optimizer, 5, mine(), lambda net, found=found, clip=clip: found.append(clip(net)))
        assert_close(norms[0], norms[1])
        assert_close(weights(models[0]), weights(models[1]))
        assert_same_everywhere(norms[0])


@session
def test_whole_gradients_after_synchronize():
    model, single = mlp(), mlp()
    optimizer, plain = sharded(adam(model)), adam(single)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(hvd.rank(), step)
        functional.cross_entropy(model(inputs), targets).backward()
        optimizer.synchronize()
        plain.zero_grad()
        inputs, targets = of_all_ranks()(step)
        functional.cross_entropy(single(inputs), targets).backward()
        assert_close([p.grad for p in model.parameters()], [p.grad for p in single.parameters()])
        for net in (model, single):
            torch.nn.utils.clip_grad_value_(net.parameters(), 0.01)
        with optimizer.skip_synchronize():
            optimizer.step()
        plain.step()
    assert_close(weights(model), weights(single))
    optimizer.zero_grad()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    if hvd.size() > 1:
        with raises(AssertionError, "without synchronize"), optimizer.skip_synchronize():
            optimizer.step()


@session
def test_state_is_portable():
    """A state saved by a sharded optimizer is loaded by a plain one, a sharded one, and a sharded one in training."""
    model = mlp()
    optimizer = sharded(two_groups(model))
    train(model, optimizer, 4, mine())
    state, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    single = mlp()
    plain = two_groups(single)
    train(single, plain, 4, of_all_ranks())
    assert_states_close(state, plain.state_dict())
    train(single, plain, 3, lambda step: of_all_ranks()(step + 4))
    for warm in (0, 2):
        for wrap, data in ((sharded, mine()), (lambda o: o, of_all_ranks())):
            other = mlp()
            loaded = wrap(two_groups(other))
            train(other, loaded, warm, data)
            other.load_state_dict(values)
            loaded.load_state_dict(copy.deepcopy(state))
            train(other, loaded, 3, lambda step, data=data: data(step + 4))
            assert_close(weights(other), weights(single))
            assert_states_close(loaded.state_dict(), plain.state_dict())


@session
def test_the_saved_state_has_the_moments_of_a_thawed_layer():
    model, single = mlp(), mlp()
    for net in (model, single):
        net[2].requires_grad_(False)
    optimizer, plain = sharded(adam(model)), adam(single)
    for steps in (3, 2):
        train(model, optimizer, steps, mine())
        train(single, plain, steps, of_all_ranks())
        for net in (model, single):
            net[2].requires_grad_(True)
    assert_states_close(optimizer.state_dict(), plain.state_dict())


@session
def test_a_checkpoint_of_rank_0_reaches_every_rank():
    model = mlp()
    optimizer = sharded(adam(model))
    train(model, optimizer, 3, mine())
    checkpoint = None
    if hvd.rank() == 0:  # only rank 0 asks for its state
        checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 2, mine())
    if hvd.rank() == 0:
        model.load_state_dict(checkpoint[0])
        optimizer.load_state_dict(checkpoint[1])
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 2, lambda step: batch(hvd.rank(), step + 3))
    single = mlp()
    train(single, adam(single), 5, of_all_ranks())
    assert_close(weights(model), weights(single))
    assert_same_everywhere(weights(model))


@session
def test_parameters_and_state_are_shared_between_the_ranks_of_a_host():
    if hvd.size() == 1:
        pytest.skip("no rank to share with")
    parameter = nn.Parameter(torch.zeros(100))
    optimizer = sharded(torch.optim.SGD([parameter], lr=1.0, momentum=0.9))
    for _ in range(2):
        optimizer.zero_grad()
        parameter.sum().backward()
        optimizer.step()
    hvd.barrier()
    if hvd.rank() == 1:
        with torch.no_grad():
            parameter[7] = 42.0
            optimizer.state[parameter]["momentum_buffer"][3] = 43.0
    hvd.barrier()
    assert parameter[7] == 42.0
    assert optimizer.state[parameter]["momentum_buffer"][3] == 43.0
    with raises(hvd.HorovodInternalError, "not supported with Join"):
        if hvd.rank() == 0:
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
        raise hvd.HorovodInternalError(f"not supported with Join {hvd.join()}")
    hvd.join() if hvd.rank() == 0 else None


@pytest.mark.ranks(2)
@session
def test_a_forked_child_has_its_own_copy():
    """It keeps the values at the time of the fork, whatever the ranks do later; no rank sees what it writes."""
    for shards in (True, False):
        parameter = nn.Parameter(torch.zeros(300_000))  # large enough for reduction in shared memory
        inner = torch.optim.SGD([parameter], lr=1.0, momentum=0.5)
        optimizer = hvd.DistributedOptimizer(inner, sharded=shards)

        def step(parameter=parameter, optimizer=optimizer):
            optimizer.zero_grad()
            parameter.sum().backward()
            optimizer.step()
            hvd.barrier()

        def seen(parameter=parameter, optimizer=optimizer):
            gradient = parameter.grad if parameter.grad is not None else torch.ones(1)
            momentum = optimizer.state_dict()["state"][0]["momentum_buffer"]
            return [tensor.unique().tolist() for tensor in (parameter.detach(), momentum, gradient)]

        for _ in range(3):
            step()
        before = seen()
        assert before == [[-4.25], [1.75], [1.0]]
        with _forked(lambda seen=seen, p=parameter: (seen(), _spoil(p))[0]) as answer:
            step()
            step()
            later = seen()
            got = answer()
            assert got == before, (shards, got, before)
        hvd.barrier()
        assert seen() == later != before


@pytest.mark.ranks(1)
def test_a_forked_child_without_memory_for_a_copy_exits_with_the_reason():
    memory = mmap.mmap(-1, 2**20)
    segment._copy_in_children(memory, 0, 2**20)
    errors, end = os.pipe()
    own = os.dup(2)
    os.dup2(end, 2)
    try:
        with mock.patch.object(segment._libc, "mmap", return_value=segment._FAILED):
            child = os.fork()
            if child == 0:
                os._exit(0)
    finally:
        os.dup2(own, 2)
        for descriptor in (own, end):
            os.close(descriptor)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    with open(errors) as file:
        assert "cannot have its own copy of 1 MiB" in file.read()


def _spoil(parameter):
    parameter.detach().fill_(99.0)
    if parameter.grad is not None:
        parameter.grad.fill_(99.0)


@contextlib.contextmanager
def _forked(function):
    """Fork; yield a function that has the child call `function`, and returns its result."""
    here, there = multiprocessing.Pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            there.recv()
            there.send(function())
            code = 0
        finally:
            os._exit(code)

    def answer():
        here.send("now")
        assert here.poll(60)
        return here.recv()

    yield answer
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@session
def test_training_continues_after_a_new_init():
    """Elastic training does the same: shut down, init, and step with the same optimizer."""
    model, single = mlp(), mlp()
    optimizer, plain = sharded(adam(model)), adam(single)
    train(model, optimizer, 3, mine())
    hvd.barrier()
    hvd.shutdown()
    hvd.init()
    train(model, optimizer, 3, lambda step: batch(hvd.rank(), step + 3))
    train(single, plain, 6, of_all_ranks())
    assert_close(weights(model), weights(single))


@pytest.mark.ranks(2, 3, env={"HORA_TRANSPORT": "tcp"})
@session
def test_without_shared_memory():
    """As between hosts, a step is a reduce-scatter, a step of the slice, and an all-gather."""
    model, single = mlp(), mlp()
    optimizer, plain = sharded(two_groups(model)), two_groups(single)
    clip = lambda net: hvd.clip_grad_norm_(net.parameters(), 0.1)  # noqa: E731
    train(model, optimizer, 3, mine(), clip)
    train(single, plain, 3, of_all_ranks(), lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
    assert_states_close(optimizer.state_dict(), plain.state_dict())
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    train(model, optimizer, 3, mine(), clip)
    train(single, plain, 3, of_all_ranks(), lambda net: torch.nn.utils.clip_grad_norm_(net.parameters(), 0.1))
    assert_close(weights(model), weights(single))
    unsharded = mlp()
    train(unsharded, hvd.DistributedOptimizer(two_groups(unsharded)), 3, mine())
    again = mlp()
    train(again, two_groups(again), 3, of_all_ranks())
    assert_close(weights(unsharded), weights(again))


fused = pytest.mark.skipif(torch.__version__.startswith("2.3."), reason="fused optimizers of CPUs came with torch 2.4")


def memory_mib(kind: str) -> float:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return int(rollup.split(f"{kind}:")[1].split()[0]) / 1024


@fused
@pytest.mark.ranks(4, env={"HORA_KEEP_FREED_MEMORY": "0"})
@session
def test_the_host_holds_parameters_and_state_once():
    private, shared = _sizes_held()
    assert shared < 1.1 * (1 + 4 + 2)  # parameters, the gradients of all ranks, two state tensors
    assert private < 4 * 0.5  # the model's initial copy is freed; nothing else is private


@fused
@pytest.mark.ranks(4)
@session
def test_the_host_holds_little_more_where_freed_memory_is_kept():
    private, shared = _sizes_held()
    assert shared < 1.1 * (1 + 4 + 2)
    assert private < 4 * 1.25  # the memory of one gradient is kept


def _sizes_held() -> list[float]:
    """Train ten million parameters with Adam on four ranks; unsharded, every rank would hold four times their size.
    Return the private and the shared memory of all ranks together, in units of the parameters' size.
    """
    model = nn.Linear(4000, 2500, bias=False)
    size_mib = model.weight.numel() * 4 / 2**20
    optimizer = sharded(adam(model, fused=True))
    private, shared = memory_mib("Pss_Anon"), memory_mib("Pss_Shmem")
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.ones(1, 4000)).sum().backward()
        optimizer.step()
    hvd.barrier()
    private, shared = memory_mib("Pss_Anon") - private, memory_mib("Pss_Shmem") - shared
    hvd.barrier()
    held: list[float] = (hvd.allreduce(torch.tensor([private, shared]), op=hvd.Sum) / size_mib).tolist()
    return held
