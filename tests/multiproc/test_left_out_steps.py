"""Steps left out after their gradients were reduced: training equals one process that never made them.

Covers gradients overlapped with backward, reduced one by one, or sharded, with and without shared memory.
"""

from __future__ import annotations

import itertools
import warnings
from contextlib import suppress

import pytest
import torch
from hvd_session import assert_same_everywhere, raises, session
from torch import nn
from torch.nn import functional
from training import assert_close, backward, batch, distributed, mlp, of_all_ranks, sgd, weights

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2)

MODES = {
    "overlapped": {},
    "per parameter": {"groups": 2},
    "accumulating": {"backward_passes_per_step": 2},
    "sharded": {"sharded": True},
    "sharded, accumulating": {"sharded": True, "backward_passes_per_step": 2},
}


class RefusedError(Exception):
    """Raised by a user's own hook."""


def clip(model, optimizer) -> None:
    norm = hvd.clip_grad_norm_(model.parameters(), 1e6)
    assert not torch.isfinite(norm)


def clip_strictly(model, optimizer) -> None:
    with raises(RuntimeError, "non-finite"):
        hvd.clip_grad_norm_(optimizer, 1e6, error_if_nonfinite=True)


def clip_some(model, optimizer) -> None:
    hvd.clip_grad_norm_([model[0].weight], 1e6)


def clip_and_synchronize(model, optimizer) -> None:
    hvd.clip_grad_norm_(model.parameters(), 1e6)
    optimizer.synchronize()


def synchronize(model, optimizer) -> None:
    optimizer.synchronize()


REDUCTIONS = (clip, clip_strictly, clip_some, clip_and_synchronize, synchronize)
CLEANUPS = {
    "optimizer.zero_grad": lambda model, optimizer: optimizer.zero_grad(),
    "zeros": lambda model, optimizer: optimizer.zero_grad(set_to_none=False),
    "model.zero_grad": lambda model, optimizer: model.zero_grad(),
}


def step(model, optimizer, way: str) -> None:
    if way == "clip":
        hvd.clip_grad_norm_(model.parameters(), 1e6)
    if way == "synchronize":
        optimizer.synchronize()
        with optimizer.skip_synchronize():
            optimizer.step()
    else:
        optimizer.step()


def run(model, optimizer, way: str, numbers, leave_out, passes: int = 1) -> None:
    """Make the ordinary steps of these numbers; before each, `leave_out(number)` may make one that does not count."""
    for number in numbers:
        leave_out(number)
        optimizer.zero_grad()
        for part in range(passes):
            backward(model, number * passes + part)
        step(model, optimizer, way)


def reference(num_steps: int, passes: int = 1) -> list[torch.Tensor]:
    model = mlp()
    optimizer = sgd(model)
    for number in range(num_steps):
        optimizer.zero_grad()
        for part in range(passes):
            inputs, targets = of_all_ranks()(number * passes + part)
            functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return weights(model)


def check_every_way(mode: str, reductions=REDUCTIONS) -> None:
    options = MODES[mode]
    passes = options.get("backward_passes_per_step", 1)
    wanted = reference(4, passes)
    for reduce, (cleanup, clean), way, first in itertools.product(
        reductions, CLEANUPS.items(), ("plain", "clip", "synchronize"), (0, 1)
    ):
        model = mlp()
        optimizer = distributed(model, **options)

        def leave_out(number, model=model, optimizer=optimizer, first=first, reduce=reduce, clean=clean):
            if number in (first, first + 2):
                for _ in range(passes):
                    backward(model, 77, scale=float("nan"))
                reduce(model, optimizer)
                clean(model, optimizer)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model, optimizer, way, range(4), leave_out, passes)
        words = f"{mode}: {reduce.__name__}, {cleanup}, then {way}, from step {first}"
        for got, want in zip(weights(model), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, msg=lambda m, words=words: f"{words}: {m}")
        assert_same_everywhere(weights(model))


@session
def test_a_step_left_out_in_overlapped_mode():
    check_every_way("overlapped")


@session
def test_a_step_left_out_parameter_by_parameter():
    check_every_way("per parameter")


@session
def test_a_step_left_out_while_accumulating():
    check_every_way("accumulating", (clip, synchronize))


@session
def test_a_step_left_out_in_sharded_mode():
    check_every_way("sharded")


@session
def test_a_step_left_out_while_accumulating_in_sharded_mode():
    check_every_way("sharded, accumulating", (clip, synchronize))


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@session
def test_a_step_left_out_without_shared_memory():
    check_every_way("overlapped", (clip,))
    check_every_way("sharded", (clip, clip_and_synchronize))


@session
def test_an_exception_inside_backward():
    """All ranks raise, or one: gradients that are ready by then are reduced and discarded."""

    def refuse(gradient):
        raise RefusedError

    wanted = reference(6)
    for (mode, options), where in itertools.product(MODES.items(), ("everywhere", "on the last rank")):
        if "accumulating" in mode:
            continue
        model = mlp()
        optimizer = distributed(model, **options)

        def leave_out(number, model=model, optimizer=optimizer, where=where):
            if number not in (0, 2, 4):
                return
            refuses = where == "everywhere" or hvd.rank() == hvd.size() - 1
            hook = model[2].weight.register_hook(refuse) if refuses else None
            with suppress(RefusedError):
                backward(model, number)
            if hook is not None:
                hook.remove()
            optimizer.synchronize()

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            run(model, optimizer, "plain", range(6), leave_out)
        assert_close(weights(model), wanted)


@session
def test_reduced_gradients_that_were_not_cleared_accumulate():
    """As in one process, nothing is lost between `synchronize` and the next backward, or counted twice."""
    for mode in ("overlapped", "per parameter", "sharded"):
        model, single = mlp(), mlp()
        optimizer, plain = distributed(model, **MODES[mode]), sgd(single)
        for number in range(4):
            optimizer.zero_grad()
            backward(model, 2 * number)
            optimizer.synchronize()
            backward(model, 2 * number + 1)
            optimizer.step()
            plain.zero_grad()
            for part in range(2):
                inputs, targets = of_all_ranks()(2 * number + part)
                functional.cross_entropy(single(inputs), targets).backward()
            plain.step()
        assert_close(weights(model), weights(single))


@session
def test_a_closure_is_reduced_after_gradients_were_clipped():
    for mode in ("overlapped", "sharded"):
        model = mlp()
        optimizer = distributed(model, **MODES[mode])
        for number in range(4):
            backward(model, 77, scale=float("nan"))
            hvd.clip_grad_norm_(model.parameters(), 1e6)

            def closure(model=model, optimizer=optimizer, number=number):
                optimizer.zero_grad()
                backward(model, number)
                hvd.clip_grad_norm_(model.parameters(), 1e6)

            optimizer.step(closure)
        assert_close(weights(model), reference(4))


@session
def test_a_residual_never_keeps_non_finite_values():
    compression = hvd.ErrorFeedback(hvd.Compression.bf16)
    model = mlp()
    optimizer = distributed(model, compression=compression)
    for number in range(5):
        optimizer.zero_grad()
        backward(model, number, scale=float("inf") if number == 2 else 1.0)
        if torch.isfinite(hvd.clip_grad_norm_(model.parameters(), 1e6)):
            optimizer.step()
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
    assert_same_everywhere(weights(model))


def wide() -> nn.Module:
    """Return a model of several default buckets with gaps between the parameters."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(601, 601) for _ in range(16)))


@pytest.mark.ranks(2)
@session
def test_a_step_left_out_in_many_buckets():
    """Buckets are reduced during backward, in alternating places."""

    def loss(model, rank, number):
        return model(batch(rank, number, (601,))[0]).square().mean()

    single = wide()
    plain = sgd(single, lr=0.01)
    for number in range(4):
        plain.zero_grad()
        sum(loss(single, rank, number) for rank in range(hvd.size())).div(hvd.size()).backward()
        plain.step()
    for sharded in (False, True):
        model = wide()
        optimizer = distributed(model, sgd(model, lr=0.01), sharded=sharded)
        for number in range(4):
            if number in (0, 2, 3):
                (loss(model, hvd.rank(), 77) * float("nan")).backward()
                hvd.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.zero_grad()
            optimizer.zero_grad()
            loss(model, hvd.rank(), number).backward()
            hvd.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
        assert_close(weights(model), weights(single))


@pytest.mark.ranks(2, 4)
@session
def test_gradients_of_two_optimizers_are_clipped_together():
    """All ranks reduce them in the same order, independent of object addresses."""
    spare = [object() for _ in range(1000 * hvd.rank())]
    models = [mlp() for _ in range(6)]
    optimizers = [
        distributed(model, sharded=bool(n % 2), named_parameters=model.named_parameters(prefix=f"{n}"))
        for n, model in enumerate(models)
    ]
    parameters = [parameter for model in models for parameter in model.parameters()]
    for number in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            backward(model, number)
        hvd.clip_grad_norm_(parameters, 1e6)
        for optimizer in optimizers:
            optimizer.step()
    for model in models:
        assert_close(weights(model), reference(3))
    assert len(spare) == 1000 * hvd.rank()


@pytest.mark.ranks(2)
def test_a_world_that_ends_during_backward():
    """The next world begins with a fresh step."""
    for mode in ("overlapped", "per parameter", "sharded"):
        hvd.init()
        model = mlp()
        optimizer = distributed(model, **MODES[mode])
        if hvd.rank() == 1:
            hvd.shutdown()
        else:
            with raises(hvd.HorovodInternalError, "rank 1"):
                hvd.barrier()
            with raises(hvd.HorovodInternalError, "rank 1"):
                backward(model)
            hvd.shutdown()
        hvd.init()
        run(model, optimizer, "plain", range(4), lambda number: None)
        assert_close(weights(model), reference(4))
        hvd.barrier()
        hvd.shutdown()
