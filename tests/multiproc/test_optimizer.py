"""DistributedOptimizer: Horovod's contract for arguments, hooks, synchronize, step and zero_grad."""

from __future__ import annotations

import copy
import time
import warnings

import pytest
import torch
from hvd_session import assert_equal, assert_same_everywhere, raises, session
from torch import nn
from torch.nn import functional
from training import (
    assert_close,
    backward,
    batch,
    distributed,
    mine,
    mlp,
    of_all_ranks,
    reference,
    sgd,
    train,
    weights,
)

import horovod.torch as hvd
from hora.telemetry import meter

pytestmark = pytest.mark.ranks(1, 2, 4)


@session
def test_the_class_looks_like_the_optimizer_it_wraps():
    model = mlp()
    plain = sgd(model, weight_decay=0.01)
    plain.param_groups[0]["lr"] = 0.3
    optimizer = distributed(model, plain)
    assert type(optimizer).__name__ == "SGD"
    assert type(optimizer).__module__ == "horovod.torch.optimizer"
    assert isinstance(optimizer, torch.optim.SGD)
    assert optimizer.param_groups[0]["lr"] == 0.3
    assert optimizer.param_groups[0]["weight_decay"] == 0.01
    assert optimizer.backward_passes_per_step == 1
    assert optimizer.op == hvd.Average
    assert optimizer.gradient_predivide_factor == 1.0
    assert optimizer.process_set is hvd.global_process_set
    assert set(optimizer._parameter_names.values()) == {name for name, _ in model.named_parameters()}
    assert len(optimizer._requires_update) == (len(list(model.parameters())) if hvd.size() > 1 else 0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    backward(model)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.15
    with raises(ValueError, "already"):
        hvd.DistributedOptimizer(optimizer)


@session
def test_the_state_of_the_wrapped_optimizer_is_kept():
    model = mlp()
    plain = sgd(model)
    train(model, plain, 3, of_all_ranks())
    optimizer = distributed(model, plain)
    train(model, optimizer, 3, lambda step: batch(hvd.rank(), step + 3))
    model2 = mlp()
    train(model2, sgd(model2), 6, of_all_ranks())
    assert_close(weights(model), weights(model2))


@session
def test_invalid_arguments_are_rejected_with_the_reason():
    model = mlp()
    cases = [
        ({"named_parameters": ["a", "b"]}, "sequence of tuples"),
        ({"named_parameters": [(1, 2, 3)]}, "sequence of tuples"),
        ({"named_parameters": [("a", p) for p in model.parameters()]}, "must be unique"),
        ({"named_parameters": list(model.named_parameters())[1:]}, "were not named"),
        ({"backward_passes_per_step": 0}, "must be > 0"),
        ({"gradient_predivide_factor": 2.0, "op": hvd.Sum}, "gradient_predivide_factor"),
        ({"groups": 0}, "groups"),
        ({"groups": -3}, "groups"),
        ({"groups": [[1, 2]]}, "tensors"),
        ({"groups": [[model[0].weight], [model[0].weight]]}, "once"),
        ({"groups": "all"}, "groups"),
    ]
    for options, words in cases:
        with raises(ValueError, words):
            hvd.DistributedOptimizer(sgd(model), **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        hvd.DistributedOptimizer(sgd(model), num_groups=2)
    assert any(item.category is DeprecationWarning for item in caught)
    optimizer = distributed(model, named_parameters=[*model.named_parameters(), ("extra", torch.zeros(1))])
    with raises(ValueError, "must be > 0"):
        optimizer.set_backward_passes_per_step(0)


def test_names_are_checked_before_init():
    model = mlp()
    with raises(ValueError, "must be unique"):
        hvd.DistributedOptimizer(sgd(model), named_parameters=[("a", p) for p in model.parameters()])
    with raises(hvd.HorovodInternalError, "has not been initialized"):
        hvd.DistributedOptimizer(sgd(model))


@session
def test_training_equals_one_process_on_the_combined_batch():
    wanted = reference()
    for options in (
        {},
        {"named_parameters": None},
        {"groups": 2},
        {"groups": 100},
        {"gradient_predivide_factor": 4.0},
        {"gradient_predivide_factor": 4.0, "groups": 2},
        {"compression": hvd.Compression.none},
    ):
        model = mlp()
        train(model, distributed(model, **options), 5, mine())
        assert_close(weights(model), wanted)
        assert_same_everywhere(weights(model))
    model = mlp()
    groups = [[model[0].weight, model[4].bias], [model[2].weight]]
    train(model, distributed(model, groups=groups), 5, mine())
    assert_close(weights(model), wanted)


@session
def test_a_number_of_groups_gives_the_same_groups_in_any_order_of_parameters():
    model = mlp()
    named = list(model.named_parameters())
    if hvd.rank():
        named.reverse()
    plain = torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, groups=2)
    train(model, optimizer, 5, mine())
    assert_close(weights(model), reference())
    if hvd.size() > 1:
        named[0] = (f"rank{hvd.rank()}", named[0][1])
        with raises(ValueError, "same parameters on all ranks", "rank0"):
            hvd.DistributedOptimizer(plain, named_parameters=named, groups=2)


@session
def test_parameters_match_by_name_in_any_order():
    for sharded in (False, True):
        model = mlp()
        named = list(model.named_parameters())[:: -1 if hvd.rank() else 1]
        plain = torch.optim.SGD([parameter for _, parameter in named], lr=0.1, momentum=0.9)
        optimizer = hvd.DistributedOptimizer(plain, named_parameters=named, sharded=sharded)
        train(model, optimizer, 5, mine())
        assert_close(weights(model), reference())


@session
def test_sum_is_size_times_average():
    model = mlp()
    train(model, distributed(model, sgd(model, lr=0.1 / hvd.size()), op=hvd.Sum), 5, mine())
    assert_close(weights(model), reference())


@session
def test_min_reduces_elementwise():
    model = mlp()
    optimizer = distributed(model, op=hvd.Min)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        gradients = []
        for rank in range(hvd.size()):
            other = mlp()
            other.load_state_dict(model.state_dict())
            inputs, targets = batch(rank, step)
            functional.cross_entropy(other(inputs), targets).backward()
            gradients.append([p.grad for p in other.parameters()])
        optimizer.synchronize()
        wanted = [torch.stack(g).amin(0) for g in zip(*gradients, strict=True)]
        assert_close([p.grad for p in model.parameters()], wanted)
        with optimizer.skip_synchronize():
            optimizer.step()


@session
def test_compression_is_accurate_and_bit_identical_on_all_ranks():
    wanted = reference()
    for compression, tolerance in (
        (hvd.Compression.fp16, 1e-3),
        (hvd.Compression.bf16, 1e-2),
        (hvd.ErrorFeedback(hvd.Compression.bf16), 1e-2),
        (Doubling, 1e-5),
    ):
        for groups in (None, 2):
            model = mlp()
            train(model, distributed(model, compression=compression, groups=groups), 5, mine())
            assert_close(weights(model), wanted, tolerance)
            assert_same_everywhere(weights(model))
            assert all(p.grad.dtype == torch.float32 for p in model.parameters())
    with raises(ValueError, "fp16 or"):
        hvd.ErrorFeedback(hvd.Compression.none)


class Doubling:
    """A user's compressor that sends float64."""

    @staticmethod
    def compress(tensor):
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


@session
def test_error_feedback_loses_nothing_over_many_steps():
    """bf16 always drops a gradient below its last bit; error feedback accumulates it until it can be sent."""
    if hvd.size() == 1:
        pytest.skip("nothing is sent")
    parameter = nn.Parameter(torch.zeros(8))
    moved = {}
    for name, compression in (
        ("plain", hvd.Compression.bf16),
        ("feedback", hvd.ErrorFeedback(hvd.Compression.bf16)),
    ):
        with torch.no_grad():
            parameter.zero_()
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=compression)
        for _ in range(64):
            optimizer.zero_grad()
            ((1 + 1 / 1024) * parameter.sum()).backward()
            optimizer.step()
        moved[name] = -parameter[0].item()
        del optimizer
    exact = 64 * (1 + 1 / 1024)
    assert abs(moved["plain"] - exact) > 0.05
    assert abs(moved["feedback"] - exact) < 0.02


@session
def test_gradients_accumulate_over_backward_passes():
    model = mlp()
    optimizer = distributed(model, backward_passes_per_step=3)
    train(model, optimizer, 4, mine(), accumulate=3)
    single = mlp()
    train(single, sgd(single), 4, of_all_ranks(), accumulate=3)
    assert_close(weights(model), weights(single))
    optimizer.set_backward_passes_per_step(1)
    other = sgd(single)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, mine())
    train(single, other, 2, of_all_ranks())
    assert_close(weights(model), weights(single))


@session
def test_an_additional_backward_is_an_error():
    if hvd.size() == 1:
        pytest.skip("no hooks")
    for steps in (0, 3):  # before and after the order of buckets is agreed
        model = mlp()
        optimizer = distributed(model)
        train(model, optimizer, steps, mine())
        optimizer.zero_grad()
        backward(model)
        with raises(AssertionError, "backward_passes_per_step"):
            backward(model)
        optimizer.step()
        # The second backward has changed a gradient during its reduction, so the ranks may differ now.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, 1, mine())
        assert_same_everywhere(weights(model))
        optimizer.zero_grad()
        inputs, targets = batch(hvd.rank(), 0)
        with raises(AssertionError, "create_graph"):
            functional.cross_entropy(model(inputs), targets).backward(create_graph=True)
        optimizer.zero_grad()


@session
def test_zero_grad_raises_while_gradients_are_in_flight():
    if hvd.size() == 1:
        pytest.skip("no hooks")
    model = mlp()
    optimizer = distributed(model, backward_passes_per_step=2)
    optimizer.zero_grad()
    optimizer.zero_grad(set_to_none=False)
    backward(model)
    with raises(AssertionError, "race condition"):
        optimizer.zero_grad()
    backward(model)
    with raises(AssertionError, "race condition"):
        optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None for p in model.parameters())


@session
def test_zeroing_in_place():
    for steps in (1, 4):
        model, single = mlp(), mlp()
        optimizer, plain = distributed(model), sgd(single)
        for step in range(steps):
            for net, opt, data in ((model, optimizer, mine()), (single, plain, of_all_ranks())):
                opt.zero_grad(set_to_none=False)
                inputs, targets = data(step)
                functional.cross_entropy(net(inputs), targets).backward()
                opt.step()
        assert_close(weights(model), weights(single))


@session
def test_synchronize_clip_and_step_inside_skip_synchronize():
    model, single = mlp(), mlp()
    optimizer, plain = distributed(model), sgd(single)
    for step in range(4):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        with optimizer.skip_synchronize(), warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()
        plain.zero_grad()
        inputs, targets = of_all_ranks()(step)
        functional.cross_entropy(single(inputs), targets).backward()
        torch.nn.utils.clip_grad_norm_(single.parameters(), 0.05)
        plain.step()
    assert_close(weights(model), weights(single))
    assert_same_everywhere(weights(model))


@session
def test_step_after_synchronize_warns_once():
    model = mlp()
    optimizer = distributed(model)
    for step in range(3):
        optimizer.zero_grad()
        backward(model, step)
        optimizer.synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.step()
        assert len(caught) == 1
        assert "optimizer.step() called without optimizer.skip_synchronize()" in str(caught[0].message)
    assert_close(weights(model), reference(3))


@session
def test_clip_grad_norm_reduces_first():
    model, single = mlp(), mlp()
    norms = []
    optimizer = distributed(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, optimizer, 4, mine(), lambda net: norms.append(hvd.clip_grad_norm_(net.parameters(), 0.05)))
    wanted = []
    train(
        single,
        sgd(single),
        4,
        of_all_ranks(),
        lambda net: wanted.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)),
    )
    assert_close(norms, wanted)
    assert_close(weights(model), weights(single))
    optimizer.zero_grad()
    backward(model, scale=float("nan"))
    with raises(RuntimeError, "non-finite"):
        hvd.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)


@session
def test_channels_last_and_transposed_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(16, 3)).to(memory_format=torch.channels_last)
    odd = nn.Parameter(torch.arange(12.0).view(3, 4).t())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([*model.parameters(), odd], lr=0.1))
    x = torch.ones(2, 3, 4, 4).to(memory_format=torch.channels_last)
    for _ in range(3):
        optimizer.zero_grad()
        ((model(x).sum() + (odd * torch.arange(12.0).view(4, 3)).sum()) * (hvd.rank() + 1)).backward()
        optimizer.step()
    assert_same_everywhere([*model.parameters(), odd])
    mean = (hvd.size() + 1) / 2
    wanted = torch.arange(12.0).view(3, 4).t() - 0.3 * mean * torch.arange(12.0).view(4, 3)
    assert_close([odd.detach()], [wanted])


@session
def test_a_memory_format_that_differs_between_ranks_is_an_error():
    model = nn.Conv2d(3, 4, 3)
    if hvd.rank() == hvd.size() - 1 > 0:
        model = model.to(memory_format=torch.channels_last)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters())

    def train_on():
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(2, 3, 4, 4)).sum().backward()
            optimizer.step()

    if hvd.size() == 1:
        train_on()
    else:
        with raises(hvd.HorovodInternalError, "Mismatched parameters", "weight", "channels_last"):
            train_on()


@session
def test_gradients_stay_valid_after_the_step():
    model = mlp()
    optimizer = distributed(model)
    train(model, optimizer, 4, mine())
    kept = [p.grad.clone() for p in model.parameters()]
    assert_same_everywhere(kept)
    for p in model.parameters():
        p.grad.mul_(2)
    assert_equal(next(model.parameters()).grad, kept[0] * 2)
    hvd.barrier()
    assert_equal(next(model.parameters()).grad, kept[0] * 2)  # the other ranks' doubling has not affected this one


@pytest.mark.ranks(2)
@session
def test_time_between_backward_and_step_is_not_counted_as_backward():
    model = mlp()
    optimizer = distributed(model)
    for _ in range(3):
        backward(model)
        optimizer.step()
    before_s, paused_s = meter.between_s, 0.0
    for _ in range(2):
        backward(model)
        began = time.perf_counter()
        time.sleep(0.1)
        paused_s += time.perf_counter() - began
        optimizer.step()
    assert meter.between_s - before_s >= paused_s
