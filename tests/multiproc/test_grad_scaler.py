"""torch's usual `GradScaler` code: gradients are reduced before unscaling, and all ranks skip the same steps."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from hvd_session import assert_same_everywhere, raises, session
from torch import nn
from torch.nn import functional
from training import assert_close, batch, distributed, mlp, of_all_ranks, sgd, weights

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2)

MODES = {
    "overlapped": {},
    "per parameter": {"groups": 2},
    "accumulating": {"backward_passes_per_step": 2},
    "sharded": {"sharded": True},
}
CLIP = 0.05
NUM_STEPS = 6


def scaler_of(**options) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **{"init_scale": 1024.0, "growth_interval": 3, **options})


def clip(model, way: str) -> None:
    if way == "torch's":
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    if way == "hvd's":
        hvd.clip_grad_norm_(model.parameters(), CLIP)


def train(model, optimizer, scaler, data, way: str, bad_steps=(), passes: int = 1) -> None:
    """Train for some steps; `way` is how gradients are clipped, or "" if the user does not even unscale them."""
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        for part in range(passes):
            inputs, targets = data(number * passes + part)
            loss = functional.cross_entropy(model(inputs), targets)
            scaler.scale(loss * (float("inf") if number in bad_steps else 1.0)).backward()
        if way:
            scaler.unscale_(optimizer)
            clip(model, way)
        scaler.step(optimizer)
        scaler.update()


def check(options, kind=sgd, ways=("", "unscaled", "torch's", "hvd's"), **scaling) -> None:
    """Compare with one process, without infinities and with some on the last rank, in the first step too."""
    passes = options.get("backward_passes_per_step", 1)
    for way, bad_steps in itertools.product(ways, ((), (0, 3))):
        model, single = mlp(), mlp()
        optimizer, plain = distributed(model, kind(model), **options), kind(single)
        mine, reference = scaler_of(**scaling), scaler_of(**scaling)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            last = hvd.rank() == hvd.size() - 1
            train(
                model,
                optimizer,
                mine,
                lambda step: batch(hvd.rank(), step),
                way,
                bad_steps if last else (),
                passes,
            )
        train(single, plain, reference, of_all_ranks(), way, bad_steps, passes)
        assert mine.get_scale() == reference.get_scale(), (options, way)
        assert all(torch.isfinite(parameter).all() for parameter in model.parameters())
        assert_close(weights(model), weights(single))
        assert_same_everywhere(weights(model))


@session
def test_the_usual_code_in_overlapped_mode():
    check(MODES["overlapped"])


@session
def test_the_usual_code_parameter_by_parameter():
    check(MODES["per parameter"])


@session
def test_the_usual_code_while_accumulating():
    check(MODES["accumulating"])


@session
def test_the_usual_code_in_sharded_mode():
    check(MODES["sharded"])
    check({"sharded": True, "backward_passes_per_step": 2}, ways=("", "torch's"))


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@session
def test_the_usual_code_without_shared_memory():
    check(MODES["overlapped"], ways=("", "torch's"))
    check(MODES["sharded"], ways=("", "torch's"))


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@pytest.mark.both_ways
@session
def test_an_infinity_skips_one_step_with_every_compression():
    """The state that a compression keeps between steps, padding included, is finite again in the next step."""
    for name in ("none", "fp16", "bf16", "int8", "powersgd"):
        compression = getattr(hvd.Compression, name)
        if name == "powersgd":
            compression = compression(rank=8, start_step=2, min_compression_rate=0.1)
        for bad in (float("inf"), float("nan")):
            model, moved = mlp(), []
            if bad == float("inf"):  # two buckets: parameters without gradients have their own
                model.append(nn.Linear(3, 3)).unused = nn.Parameter(torch.zeros(3))
            optimizer = distributed(model, sgd(model, lr=0.02, momentum=0.0), compression=compression)
            scaler = scaler_of(init_scale=2.0**10, growth_interval=100)
            for number in range(10):
                before = weights(model)
                optimizer.zero_grad()
                inputs, targets = batch(hvd.rank(), number)
                loss = functional.cross_entropy(model(inputs), targets)
                scaler.scale(loss * (bad if number == 5 and hvd.rank() == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
                moved.append(not torch.equal(before[-1], weights(model)[-1]))
            assert scaler.get_scale() == 2.0**9, (name, bad, scaler.get_scale())
            assert moved == [number != 5 for number in range(10)], (name, bad, moved)
            assert_same_everywhere(weights(model))


@pytest.mark.skipif(torch.__version__.startswith("2.3."), reason="fused optimizers of CPUs came with torch 2.4")
@session
def test_a_fused_optimizer_that_would_unscale_by_itself():
    def fused(model):
        return torch.optim.Adam(model.parameters(), lr=0.01, fused=True)

    for mode in ("overlapped", "sharded"):
        check(MODES[mode], fused, ways=("", "torch's"))


@session
def test_a_disabled_scaler():
    """Clipping after `unscale_` applies to the reduced gradients nevertheless."""
    for mode in ("overlapped", "sharded"):
        model, single = mlp(), mlp()
        optimizer, plain = distributed(model, **MODES[mode]), sgd(single)
        train(model, optimizer, scaler_of(enabled=False), lambda step: batch(hvd.rank(), step), "torch's")
        train(single, plain, scaler_of(enabled=False), of_all_ranks(), "torch's")
        assert_close(weights(model), weights(single))


@session
def test_horovods_recommended_code():
    """It uses `synchronize`, `unscale_`, and a step that does not reduce."""
    for mode in ("overlapped", "sharded"):
        model, single = mlp(), mlp()
        optimizer, plain = distributed(model, **MODES[mode]), sgd(single)
        mine, reference = scaler_of(), scaler_of()
        for number in range(NUM_STEPS):
            optimizer.zero_grad()
            inputs, targets = batch(hvd.rank(), number)
            mine.scale(functional.cross_entropy(model(inputs), targets)).backward()
            optimizer.synchronize()
            mine.unscale_(optimizer)
            with optimizer.skip_synchronize():
                mine.step(optimizer)
            mine.update()
        train(single, plain, reference, of_all_ranks(), "")
        assert_close(weights(model), weights(single))


@session
def test_two_optimizers_of_one_scaler():
    """All ranks skip only the optimizer with infinities."""
    models, singles = [mlp(), mlp()], [mlp(), mlp()]
    optimizers = [
        distributed(model, named_parameters=model.named_parameters(prefix=f"{n}")) for n, model in enumerate(models)
    ]
    plain = [sgd(model) for model in singles]
    mine, reference = scaler_of(), scaler_of()
    for number in range(4):
        for of, nets, opts, data, bad in (
            (mine, models, optimizers, lambda step: batch(hvd.rank(), step), number == 2 and hvd.rank() == 0),
            (reference, singles, plain, of_all_ranks(), number == 2),
        ):
            inputs, targets = data(number)
            for opt in opts:
                opt.zero_grad()
            losses = [functional.cross_entropy(net(inputs), targets) for net in nets]
            of.scale(losses[0] * (float("inf") if bad else 1.0)).backward()
            of.scale(losses[1]).backward()
            for opt in opts:
                of.step(opt)
            of.update()
    assert mine.get_scale() == reference.get_scale()
    for model, single in zip(models, singles, strict=True):
        assert_close(weights(model), weights(single))


@pytest.mark.ranks(2)
@session
def test_adasum_cannot_be_unscaled_or_clipped_before_its_step():
    model = mlp()
    optimizer = distributed(model, op=hvd.Adasum)
    scaler = scaler_of()
    inputs, targets = batch(hvd.rank(), 0)
    scaler.scale(functional.cross_entropy(model(inputs), targets)).backward()
    with raises(ValueError, "Adasum", "unscaled"):
        scaler.step(optimizer)
    with raises(ValueError, "Adasum", "clipped"):
        hvd.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
