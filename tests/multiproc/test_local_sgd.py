"""LocalSGD, DiLoCo and DESLOC. Over TCP every rank is its own host; otherwise all ranks share one."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch
from hvd_session import assert_same_everywhere, raises, session
from torch.nn import functional
from training import assert_close, assert_states_close, batch, mlp, sgd, train, weights

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
SGD1 = partial(torch.optim.SGD, lr=1.0)


def run(model, optimizer, steps, first=0):
    return train(model, optimizer, steps, lambda step: batch(hvd.rank(), first + step))


def averaged(every: int, steps: int, size: int, make=sgd) -> list[torch.Tensor]:
    """Train a model per host and average the parameters regularly; return this rank's weights."""
    models = [mlp() for _ in range(size)]
    optimizers = [make(model) for model in models]
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for parameters in zip(*(model.parameters() for model in models), strict=True):
                    mean = torch.stack(list(parameters)).mean(0)
                    for parameter in parameters:
                        parameter.copy_(mean)
    return weights(models[hvd.rank()])


@session
def test_averaging_every_step_is_plain_averaging_of_parameters():
    for make in (
        partial(hvd.DiLoCo, outer=SGD1, every=1, fragments=1, overlap=0, compression=hvd.Compression.none),
        partial(hvd.LocalSGD, every=1),
    ):
        model = mlp()
        run(model, make(sgd(model), model.named_parameters()), 6)
        assert_close(weights(model), averaged(1, 6, hvd.size()))
        assert_same_everywhere(weights(model))


@session
def test_hosts_diverge_between_exchanges():
    model = mlp()
    optimizer = hvd.LocalSGD(sgd(model), every=4)
    run(model, optimizer, 6)
    assert_close(weights(model), averaged(4, 6, hvd.size()))
    assert len({str(w) for w in hvd.allgather_object(weights(model)[0].tolist())}) == hvd.size()
    optimizer.exchange()
    assert_same_everywhere(weights(model))


def outer_by_hand(steps: int, every: int, size: int) -> list[torch.Tensor]:
    """Run DiLoCo with one fragment and no overlap in plain torch."""
    models = [mlp() for _ in range(size)]
    optimizers = [sgd(model) for model in models]
    anchors = [p.detach().clone() for p in models[0].parameters()]
    outer = torch.optim.SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(steps):
        for rank, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            optimizer.zero_grad()
            inputs, targets = batch(rank, step)
            functional.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        if (step + 1) % every == 0:
            for anchor, *values in zip(anchors, *(model.parameters() for model in models), strict=True):
                anchor.grad = anchor - torch.stack([v.detach() for v in values]).mean(0)
            outer.step()
            with torch.no_grad():
                for anchor, *values in zip(anchors, *(model.parameters() for model in models), strict=True):
                    for value in values:
                        value.copy_(anchor)
    return weights(models[0])


@session
def test_the_outer_optimizer_steps_on_pseudo_gradients():
    model = mlp()
    plain = {"fragments": 1, "overlap": 0, "compression": hvd.Compression.none}
    run(model, hvd.DiLoCo(sgd(model), every=3, **plain), 9)
    assert_close(weights(model), outer_by_hand(9, 3, hvd.size()))


@session
def test_fragments_are_exchanged_during_later_steps_with_every_compression():
    for compression, tolerance in (("none", 1e-5), ("bf16", 0.02), ("int8", 0.02)):
        model = mlp()
        optimizer = hvd.DiLoCo(
            sgd(model), outer=SGD1, every=8, fragments=2, overlap=3, compression=getattr(hvd.Compression, compression)
        )
        run(model, optimizer, 25)
        optimizer.exchange()
        assert_same_everywhere(weights(model))
        if compression == "none":
            wanted = weights(model)
        assert_close(weights(model), wanted, tolerance)
    # Updates made while a fragment is in flight are kept: with a single model, the average changes nothing.
    alone = mlp()
    same = lambda step: batch(0, step)  # noqa: E731
    train(
        alone,
        hvd.DiLoCo(sgd(alone), outer=SGD1, every=8, fragments=2, overlap=3, compression=hvd.Compression.none),
        25,
        same,
    )
    plain = mlp()
    train(plain, sgd(plain), 25, same)
    assert_close(weights(alone), weights(plain), 1e-4)


@session
def test_moments_have_their_own_periods():
    model = mlp()
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    optimizer = hvd.DESLOC(adam, every=2, moments={"exp_avg": 4, "exp_avg_sq": 8})
    for steps, same in ((2, ()), (2, ("exp_avg",)), (4, ("exp_avg", "exp_avg_sq"))):
        run(model, optimizer, steps, first=optimizer._num_steps)
        assert_same_everywhere(weights(model))
        for name in ("exp_avg", "exp_avg_sq"):
            found = hvd.allgather_object([optimizer.state[p][name].tolist() for p in model.parameters()])
            assert all(other == found[0] for other in found) == (name in same), (optimizer._num_steps, name)
    with raises(ValueError, "exp_avg", "SGD", "momentum_buffer"):
        wrong = mlp()
        run(wrong, hvd.DESLOC(sgd(wrong), every=1, moments={"exp_avg": 1}), 1)


@session
def test_a_state_is_complete_and_portable():
    options = {"every": 4, "overlap": 1, "compression": hvd.Compression.none}
    model = mlp()
    optimizer = hvd.DiLoCo(sgd(model), fragments=2, **options)
    run(model, optimizer, 8)
    saved, values = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    again = mlp()
    again.load_state_dict(values)
    fresh = hvd.DiLoCo(sgd(again), fragments=4, **options)
    fresh.load_state_dict(saved)
    assert_states_close(fresh.state_dict(), saved)
    run(again, fresh, 5, first=8)
    assert fresh.state_dict()["outer"]["num_steps"] == 13
    assert_same_everywhere(fresh.state_dict()["outer"]["anchors"])
    plain = sgd(mlp())
    plain.load_state_dict(saved)
    # An elastic job broadcasts the root's state to newcomers.
    hvd.broadcast_optimizer_state(fresh, 0)
    hvd.broadcast_parameters(again.state_dict(), 0)
    run(again, fresh, 4, first=13)
    fresh.exchange()
    assert_same_everywhere(weights(again))


@session
def test_a_state_is_loaded_while_fragments_are_in_flight():
    model = mlp()
    optimizer = hvd.DiLoCo(sgd(model), every=4, fragments=1, overlap=2, compression=hvd.Compression.none)
    run(model, optimizer, 3)
    saved = copy.deepcopy(optimizer.state_dict())
    run(model, optimizer, 2, first=3)
    optimizer.load_state_dict(saved)
    run(model, optimizer, 6, first=3)
    optimizer.exchange()
    assert_same_everywhere(weights(model))


@session
def test_different_settings_are_an_error_that_names_the_rank():
    model = mlp()
    with raises(hvd.HorovodInternalError, "rank 0 has LocalSGD every=4", "rank 1 has LocalSGD every=5"):
        run(model, hvd.LocalSGD(sgd(model), every=4 + hvd.rank()), 1)
    model = mlp()
    with raises(hvd.HorovodInternalError, "rank 0 has DiLoCo", "rank 1 has LocalSGD"):
        run(model, hvd.LocalSGD(sgd(model), every=4) if hvd.rank() else hvd.DiLoCo(sgd(model)), 1)


@session
def test_arguments_are_checked():
    model = mlp()
    for wrong in (
        {"every": 0},
        {"every": 2.5},
        {"every": 3, "fragments": 4},
        {"fragments": 0},
        {"every": 10, "overlap": 10},
        {"overlap": -1},
        {"compression": hvd.Compression.powersgd(rank=2)},
        {"outer": torch.optim.SGD(model.parameters(), lr=1.0)},
    ):
        with raises(ValueError, list(wrong)[-1]):
            hvd.DiLoCo(sgd(model), **wrong)
    with raises(ValueError, "plain optimizer", "sharded"):
        hvd.LocalSGD(hvd.DistributedOptimizer(sgd(model), sharded=True), every=2)
    with raises(ValueError, "LBFGS"):
        hvd.LocalSGD(torch.optim.LBFGS(model.parameters()), every=2)
    with raises(ValueError, "DESLOC's moments['exp_avg']"):
        hvd.DESLOC(sgd(model), every=2, moments={"exp_avg": 0})


@session
def test_complex_parameters_are_rejected():
    parameter = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    for make in (partial(hvd.LocalSGD, every=1), hvd.DiLoCo, hvd.DESLOC):
        with raises(ValueError, "real parameters", "theta", "complex64"):
            make(torch.optim.SGD([parameter], lr=0.1), [("theta", parameter)])
    model = mlp()
    optimizer = hvd.LocalSGD(sgd(model), every=1)
    with raises(ValueError, "real parameters", "complex64"):
        optimizer.add_param_group({"params": [parameter]})


@session
def test_float64_parameters_keep_their_precision_beside_float32():
    mean, rank = (hvd.size() - 1) / 2, hvd.rank()
    for make in (
        partial(hvd.LocalSGD, every=1),
        partial(hvd.DiLoCo, outer=SGD1, every=2, fragments=2, overlap=1),
        partial(hvd.DESLOC, every=1, moments={"exp_avg": 1}),
    ):
        values = [torch.full((3,), 1 / 3, dtype=dtype) for dtype in (torch.float64, torch.float32, torch.float64)]
        parameters = [torch.nn.Parameter(value.clone()) for value in values]
        optimizer = make(torch.optim.Adam(parameters, lr=0.0))
        for _ in range(5):
            optimizer.zero_grad()
            sum((p * 2.0**-40 * (1 + rank)).sum() for p in parameters).backward()
            optimizer.step()
        optimizer.exchange()
        assert all(torch.equal(p.detach(), value) for p, value in zip(parameters, values, strict=True))
        if make.func is hvd.DESLOC:
            moment = optimizer.state[parameters[0]]["exp_avg"]
            torch.testing.assert_close(moment, torch.full_like(moment, 2.0**-40 * (1 + mean) * (1 - 0.9**5)))


@session
def test_hosts_that_skip_different_steps_get_an_error():
    for ends_with_exchange in (False, True):
        model = mlp()
        optimizer = hvd.LocalSGD(sgd(model), every=50 if ends_with_exchange else 2)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        words = ("LocalSGD", "rank 0 has made", "left out 0", "rank 1 has made", "left out 1", "GradScaler")
        with raises(hvd.HorovodInternalError, *words):
            for step in range(6):
                optimizer.zero_grad()
                inputs, targets = batch(hvd.rank(), step)
                loss = functional.cross_entropy(model(inputs), targets)
                scaler.scale(loss * (float("inf") if step == 3 and hvd.rank() == 1 else 1.0)).backward()
                scaler.step(optimizer)
                scaler.update()
            optimizer.exchange()


@session
def test_several_optimizers_in_one_program():
    nets = [torch.nn.Linear(30, 30) for _ in range(3)]
    for net in nets:
        hvd.broadcast_parameters(net.state_dict(), 0)
    optimizers = [
        hvd.DiLoCo(sgd(nets[0]), nets[0].named_parameters(), every=8),
        hvd.DiLoCo(sgd(nets[1]), nets[1].named_parameters(), every=8),
        hvd.LocalSGD(sgd(nets[2]), nets[2].named_parameters(), every=4, overlap=2),
    ]
    for step in range(20):
        for net, optimizer in zip(nets, optimizers, strict=True):
            optimizer.zero_grad()
            net(torch.full((2, 30), 0.1 * step + hvd.rank())).square().mean().backward()
            optimizer.step()
    for optimizer in optimizers:
        optimizer.exchange()
    assert_same_everywhere([p for net in nets for p in net.parameters()])


@pytest.mark.parametrize("kind", ["LocalSGD", "DiLoCo", "DESLOC"])
def test_parameters_may_be_added_frozen_and_thawed(kind):
    """The result equals one process that trains every host's model and averages after each step."""
    hvd.init()
    make = {
        "LocalSGD": partial(hvd.LocalSGD, every=1),
        "DiLoCo": partial(hvd.DiLoCo, outer=SGD1, every=1, fragments=1, overlap=0, compression=hvd.Compression.none),
        "DESLOC": partial(hvd.DESLOC, every=1, moments={"exp_avg": 1, "exp_avg_sq": 1}),
    }[kind]

    def nets():
        return mlp(), torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(2))

    def one_step(model, extra, optimizer, rank, step):
        if step == 2:
            optimizer.add_param_group({"params": [extra], "lr": 0.05})
        model[0].requires_grad_(not 3 <= step < 5)
        model[2].requires_grad_(step >= 4)
        optimizer.zero_grad()
        inputs, targets = batch(rank, step)
        functional.cross_entropy(model(inputs) * extra, targets).backward()
        optimizer.step()

    def adam(model, unused):
        model[2].requires_grad_(False)
        return torch.optim.Adam([*model.parameters(), unused], lr=0.01)

    model, extra, unused = nets()
    optimizer = make(adam(model, unused))
    of_all = [nets() for _ in range(hvd.size())]
    plain = [adam(theirs, idle) for theirs, _, idle in of_all]
    for step in range(8):
        one_step(model, extra, optimizer, hvd.rank(), step)
        for rank, (theirs, more, _) in enumerate(of_all):
            one_step(theirs, more, plain[rank], rank, step)
        states = ["exp_avg", "exp_avg_sq"] if kind == "DESLOC" else []
        with torch.no_grad():
            for group in zip(*([*theirs.parameters(), more] for theirs, more, _ in of_all), strict=True):
                of_group = [list(group)]
                for name in states:
                    kept = [one.state[p] for one, p in zip(plain, group, strict=True)]
                    of_group += [[entry[name] for entry in kept]] if all(kept) else []
                for tensors in of_group:
                    mean = torch.stack(list(tensors)).mean(0)
                    for tensor in tensors:
                        tensor.copy_(mean)
    theirs, more, idle = of_all[hvd.rank()]
    assert_close([*weights(model), extra, unused], [*weights(theirs), more, idle], 1e-5)
    hvd.barrier()
    hvd.shutdown()


@session
def test_a_join_is_rejected():
    model = mlp()
    optimizer = hvd.LocalSGD(sgd(model), every=4)
    run(model, optimizer, 1)
    hvd.join()
    with raises(ValueError, "hvd.join()"):
        run(model, optimizer, 1)


@pytest.mark.ranks(1, 2)
@session
def test_on_one_host_gradients_are_reduced_in_every_step():
    model, plain = mlp(), mlp()
    run(model, hvd.LocalSGD(sgd(model), model.named_parameters(), every=2), 5)
    run(plain, hvd.DistributedOptimizer(sgd(plain), plain.named_parameters()), 5)
    assert_close(weights(model), weights(plain))
    assert_same_everywhere(weights(model))


@session
def test_in_a_new_world_a_newcomer_adopts_the_outer_state():
    """Simulate an elastic reset: rank 1 has a new optimizer, and fragments in flight are lost with the old world."""
    options = {"every": 4, "fragments": 2, "overlap": 1, "compression": hvd.Compression.none}
    model = mlp()
    optimizer = hvd.DiLoCo(sgd(model), **options)
    run(model, optimizer, 6)
    hvd.barrier()  # a rank that shuts down would abort the steps of a slower one
    hvd.shutdown()
    hvd.init()
    if hvd.rank() == 1:
        model = mlp()
        optimizer = hvd.DiLoCo(sgd(model), **options)
    hvd.broadcast_parameters(model.state_dict(), 0)
    hvd.broadcast_optimizer_state(optimizer, 0)
    run(model, optimizer, 5, first=6)
    assert optimizer.state_dict()["outer"]["num_steps"] == 11
    assert_same_everywhere(optimizer.state_dict()["outer"]["anchors"])
    optimizer.exchange()
    assert_same_everywhere(weights(model))


@session
def test_per_step_rollback_is_rejected():
    model = mlp()
    with raises(ValueError, "per_step=True", "LocalSGD"):
        hvd.elastic.TorchState(model=model, optimizer=hvd.LocalSGD(sgd(model), every=2), per_step=True)
