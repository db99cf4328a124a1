"""Memory that the engine and the program both use: parameters and gradients which programs move, share and keep."""

from __future__ import annotations

import copy
import gc

import pytest
import torch
from hvd_session import assert_same_everywhere, raises, session
from torch import nn
from training import assert_close, distributed, mine, mlp, of_all_ranks, sgd, train, weights

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(2)

WIDTHS = (10, 20_000)  # reduced whole by every rank, and in slices


def line(width: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(width, 4))


def reduced(parameter, optimizer, value):
    """Compute the gradient `value` on average; every rank has its own."""
    (parameter.sum() * (value + hvd.rank() - (hvd.size() - 1) / 2)).backward()
    optimizer.synchronize()
    return parameter.grad


@session
def test_kept_gradients_keep_their_values():
    for width in WIDTHS:
        parameter = line(width)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        kept = []
        for number in range(6):
            optimizer.zero_grad()
            gradient = reduced(parameter, optimizer, number)
            kept.append([gradient, gradient.view(-1)[3:], gradient.detach()[1], gradient.numpy()][number % 4])
            del gradient
            with optimizer.skip_synchronize():
                optimizer.step()
        for number, gradient in enumerate(kept):
            assert (torch.as_tensor(gradient) == number).all(), (width, number)
        kept[1].fill_(7.0)  # is nobody else's
        assert (parameter.grad == 5).all()


@session
def test_gradients_that_accumulate_in_place_stay_where_they_are():
    """Without `set_to_none` a gradient is the same tensor in all steps, as in torch, and whoever holds it sees sums."""
    for width in WIDTHS:
        parameter = line(width)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        for _ in range(3):
            optimizer.zero_grad()
            reduced(parameter, optimizer, 1)
        kept = parameter.grad
        for _ in range(3):
            optimizer.zero_grad(set_to_none=False)
            assert reduced(parameter, optimizer, 2) is kept
        assert (kept == 2).all()


@session
def test_a_gradient_replaced_while_it_is_reduced_is_an_error_that_names_it():
    parameter = line(20_000)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), [("line", parameter)])
    for replace in (False, False, False, True, False):
        optimizer.zero_grad()
        (parameter.sum() * (1 + hvd.rank())).backward()
        if replace:
            parameter.grad = parameter.grad.clamp(-0.1, 0.1)
            with raises(ValueError, "line", "synchronize()"):
                optimizer.step()
        else:
            optimizer.step()
    assert (parameter == -6).all()


@session
def test_gradients_shared_while_they_are_reduced():
    for width in WIDTHS:
        parameter = line(width)
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0))
        for number in range(6):
            optimizer.zero_grad()
            (parameter.sum() * (1 + hvd.rank())).backward()
            if number in (0, 3):
                parameter.grad.share_memory_()
            optimizer.step()
            assert (parameter.grad == 1.5).all(), (width, number)


@session
def test_gradients_shared_while_they_are_reduced_one_by_one():
    """In the first step of an optimizer, and in groups in all steps."""
    for number in range(30):
        parameter, in_groups = line(200_000), number % 2 == 1
        groups = [[parameter]] if in_groups else None
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), groups=groups)
        for is_cleared in (True, True, False) if in_groups else (True,):
            optimizer.zero_grad(set_to_none=is_cleared)
            (parameter.sum() * (1 + hvd.rank())).backward()
            parameter.grad.share_memory_()
            optimizer.step()
            assert (parameter.grad == 1.5).all(), number


@session
def test_gradients_of_groups_stay_where_they_are():
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.zeros(7, 4, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), groups=[[parameter]])
        reduced(parameter, optimizer, 1)
        optimizer.zero_grad(set_to_none=False)
        kept = parameter.grad
        for value in (2, 3, 4):
            assert reduced(parameter, optimizer, value) is kept
            assert (kept == value).all()
            optimizer.zero_grad(set_to_none=False)


@session
def test_a_model_that_was_converted_is_an_error_that_names_a_parameter():
    for sharded, names in ((False, "4.bias"), (True, "bias")):
        model = mlp()
        optimizer = distributed(model, sharded=sharded)
        train(model, optimizer, 3, mine())
        model.double()
        optimizer.zero_grad()
        with raises(ValueError, names, "float64", "float32", "wrap the optimizer again"):
            model(torch.ones(2, 5, dtype=torch.float64)).sum().backward()
            optimizer.step()
        del optimizer
        hvd.barrier()
        optimizer = distributed(model, sharded=sharded)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.ones(2, 5, dtype=torch.float64) * hvd.rank()).sum().backward()
            optimizer.step()
        assert_same_everywhere(weights(model))


@session
def test_other_processes_see_the_steps_of_a_shared_model():
    """As with a plain optimizer: an evaluating process has the parameters that were sent to it."""
    for when in (0, 2):
        model, single = mlp(), mlp()
        optimizer = distributed(model, sharded=True)
        train(model, optimizer, when, mine())
        queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
        queue.put(model.state_dict())
        received = queue.get()
        train(model, optimizer, 3, mine())
        plain = sgd(single)
        train(single, plain, when, of_all_ranks())
        train(single, plain, 3, of_all_ranks())
        assert_close(weights(model), weights(single))
        assert_close(received.values(), weights(single))


@session
def test_state_that_was_sent_elsewhere_is_up_to_date():
    model, single = mlp(), mlp()
    optimizer, plain = distributed(model, sharded=True), sgd(single)
    train(model, optimizer, 2, mine())
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put(optimizer.state_dict())
    queue.get()
    train(single, plain, 2, of_all_ranks())
    train(model, optimizer, 3, mine())
    train(single, plain, 3, of_all_ranks())
    for parameter, other in zip(model.parameters(), single.parameters(), strict=True):
        mine_, theirs = optimizer.state[parameter]["momentum_buffer"], plain.state[other]["momentum_buffer"]
        torch.testing.assert_close(mine_, theirs, rtol=1e-5, atol=1e-5)
    assert_close(weights(model), weights(single))


@session
def test_the_last_optimizer_of_a_model_reduces_its_gradients():
    """A notebook's cell is called again, while another cell's variable still has the first optimizer."""
    for first in (True, False):
        for second in (True, False):
            for is_held in (True, False):
                model, single = mlp(), mlp()
                earlier = distributed(model, sharded=first)
                train(model, earlier, 3, mine())
                train(single, sgd(single), 3, of_all_ranks())
                held = earlier if is_held else None
                del earlier
                optimizer = distributed(model, sharded=second)
                train(model, optimizer, 3, mine())
                train(single, sgd(single), 3, of_all_ranks())
                assert_close(weights(model), weights(single))
                if held is not None:
                    copy.deepcopy(held.state_dict())


@session
def test_parameters_are_private_after_their_sharded_optimizer():
    model, single = mlp(), mlp()
    optimizer = distributed(model, sharded=True)
    train(model, optimizer, 3, mine())
    train(single, sgd(single), 3, of_all_ranks())
    del optimizer
    gc.collect()
    train(model, sgd(model), 3, of_all_ranks())
    train(single, sgd(single), 3, of_all_ranks())
    hvd.barrier()
    assert_close(weights(model), weights(single))
