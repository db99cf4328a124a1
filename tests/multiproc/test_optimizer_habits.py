"""Common uses of DistributedOptimizer: missing and frozen gradients, closures, joining, loading, deleting it."""

from __future__ import annotations

import copy
import gc
import inspect
import threading
import weakref

import pytest
import torch
from hvd_session import assert_runtime_works, assert_same_everywhere, raises, session
from torch import nn
from torch.nn import functional
from training import (
    assert_close,
    assert_states_close,
    backward,
    batch,
    distributed,
    mine,
    mlp,
    of_all_ranks,
    sgd,
    train,
    weights,
)

import horovod.torch as hvd
from hora.telemetry import meter

pytestmark = pytest.mark.ranks(1, 2, 4)


@session
def test_missing_gradients_are_zeros_and_all_ranks_have_equal_weights():
    """Each rank uses another branch; the gradients of unused branches count as zero."""
    model = nn.ModuleDict({str(i): nn.Linear(3, 2) for i in range(4)} | {"head": nn.Linear(2, 1)})
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    single = nn.ModuleDict({str(i): nn.Linear(3, 2) for i in range(4)} | {"head": nn.Linear(2, 1)})
    single.load_state_dict(model.state_dict())
    optimizer, plain = distributed(model), sgd(single)
    x = torch.arange(6.0).view(2, 3)

    def loss(net, rank, step):
        return net["head"](net[str((rank + step) % 4)](x) * (rank + 1)).mean()

    for step in range(12):
        optimizer.zero_grad()
        loss(model, hvd.rank(), step).backward()
        optimizer.step()
        assert all(p.grad is not None for p in model.parameters()) or hvd.size() == 1
        plain.zero_grad()
        for p in single.parameters():
            p.grad = torch.zeros_like(p)
        (sum(loss(single, rank, step) for rank in range(hvd.size())) / hvd.size()).backward()
        if hvd.size() == 1:
            for p, q in zip(model.parameters(), single.parameters(), strict=True):
                if p.grad is None:
                    q.grad = None
        plain.step()
    assert_close(weights(model), weights(single), 1e-4)
    assert_same_everywhere(weights(model))


@session
def test_closures_are_synchronised_after_each_evaluation():
    model, single = mlp(), mlp()
    optimizer, plain = distributed(model), sgd(single)

    def closure(net, opt, data):
        def evaluate():
            opt.zero_grad()
            inputs, targets = data
            loss = functional.cross_entropy(net(inputs), targets)
            loss.backward()
            return loss

        return evaluate

    for step in range(4):
        loss = optimizer.step(closure(model, optimizer, mine()(step)))
        assert loss.item() > 0
        plain.step(closure(single, plain, of_all_ranks()(step)))
    assert_close(weights(model), weights(single))

    model, single = mlp(), mlp()
    options = {"lr": 0.5, "max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = distributed(model, torch.optim.LBFGS(model.parameters(), **options))
    plain = torch.optim.LBFGS(single.parameters(), **options)
    for step in range(2):
        optimizer.step(closure(model, optimizer, mine()(step)))
        plain.step(closure(single, plain, of_all_ranks()(step)))
    assert_close(weights(model), weights(single), 1e-3)
    assert_same_everywhere(weights(model))


@session(sets=True)
def test_process_sets_reduce_among_their_members(sets):
    process_set = sets[-1]
    model = mlp()
    train(model, distributed(model, process_set=process_set), 5, mine())
    single = mlp()
    ranks = process_set.ranks
    parts = lambda step: tuple(torch.cat(t) for t in zip(*[batch(r, step) for r in ranks], strict=True))  # noqa: E731
    train(single, sgd(single), 5, parts)
    assert_close(weights(model), weights(single))
    assert_same_everywhere(weights(model), process_set)


def test_ranks_outside_the_process_set_step_on_their_own():
    first = hvd.ProcessSet([0]) if hvd_size() == 1 else hvd.ProcessSet(range(hvd_size() - 1))
    hvd.init(process_sets=None if hvd_size() == 1 else [first])
    try:
        if hvd.size() > 1 and hvd.rank() == hvd.size() - 1:
            model, single = mlp(), mlp()
            train(model, distributed(model, process_set=first), 3, mine())
            train(single, sgd(single), 3, mine())
            assert_close(weights(model), weights(single))
        hvd.barrier()
    finally:
        hvd.shutdown()


def hvd_size() -> int:
    import os

    return int(os.environ["HOROVOD_SIZE"])


@session
def test_join_with_uneven_batches():
    """Rank r has r more batches than rank 0; a joined rank adds zeros, and no rank waits for it."""
    for warm in (0, 1, 3):
        model = mlp()
        optimizer = distributed(model)
        train(model, optimizer, warm, mine())
        for step in range(hvd.rank()):
            optimizer.zero_grad()
            backward(model, 10 + step)
            optimizer.step()
        assert hvd.join() in range(hvd.size())
        hvd.broadcast_parameters(model.state_dict(), root_rank=hvd.size() - 1)
        hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)
        train(model, optimizer, 3, mine())
        assert_same_everywhere(weights(model))
        single = mlp()
        plain = sgd(single)
        train(single, plain, warm, of_all_ranks())
        for step in range(hvd.size() - 1):
            plain.zero_grad()
            losses = []
            for rank in range(step + 1, hvd.size()):
                inputs, targets = batch(rank, 10 + step)
                losses.append(functional.cross_entropy(single(inputs), targets))
            (sum(losses) / hvd.size()).backward()
            plain.step()
        train(single, plain, 3, of_all_ranks())
        assert_close(weights(model), weights(single), 1e-4)


@session
def test_parameters_frozen_and_thawed_and_added_later():
    model, single = mlp(), mlp()
    for net in (model, single):
        net[0].requires_grad_(False)
    extra, extra2 = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, plain = distributed(model), sgd(single)
    train(model, optimizer, 3, mine())
    train(single, plain, 3, of_all_ranks())
    for net in (model, single):
        net[0].requires_grad_(True)
    train(model, optimizer, 3, mine())
    train(single, plain, 3, of_all_ranks())
    assert_close(weights(model), weights(single))
    optimizer.add_param_group({"params": [extra], "lr": 0.5})
    plain.add_param_group({"params": [extra2], "lr": 0.5})
    for _ in range(3):
        optimizer.zero_grad()
        plain.zero_grad()
        (extra.sum() * hvd.rank()).backward()
        (extra2.sum() * (hvd.size() - 1) / 2).backward()
        optimizer.step()
        for p in single.parameters():
            p.grad = torch.zeros_like(p) if hvd.size() > 1 else None
        plain.step()
    assert_close([extra, *weights(model)], [extra2, *weights(single)])


@session
def test_parameters_replaced_in_their_group():
    """Gaussian splatting does this when it adds points."""

    def trained(wrap, losses):
        points = nn.Parameter(torch.arange(6.0).view(3, 2) / 6)
        optimizer = wrap(torch.optim.SGD([points], lr=0.1))
        for number in range(8):
            if number in (3, 5):
                points = nn.Parameter(torch.cat([points.detach(), points.detach()[:1] + 1]))
                optimizer.param_groups[0]["params"][0] = points
            optimizer.zero_grad()
            sum((points - rank - number).square().sum() for rank in losses).div(len(losses)).backward()
            optimizer.step()
        return points.detach()

    alone = trained(lambda optimizer: optimizer, range(hvd.size()))
    found = trained(hvd.DistributedOptimizer, [hvd.rank()])
    if hvd.size() > 1:
        with raises(ValueError, "sharded=True", "add_param_group"):
            trained(lambda optimizer: hvd.DistributedOptimizer(optimizer, sharded=True), [hvd.rank()])
        with raises(ValueError, "hvd.LocalSGD", "add_param_group"):
            trained(lambda optimizer: hvd.LocalSGD(optimizer, every=2), [hvd.rank()])
    assert_close([found], [alone])


@session
def test_requires_grad_toggled_between_two_optimizers():
    """A GAN freezes the discriminator while the generator learns, and vice versa."""

    def nets():
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 5)), mlp()

    def adversarial(generator, critic, opt_g, opt_c, data, steps=6):
        for step in range(steps):
            inputs, targets = data(step)
            for p in critic.parameters():
                p.requires_grad_(True)
            opt_c.zero_grad()
            functional.cross_entropy(critic(generator(inputs).detach()), targets).backward()
            opt_c.step()
            for p in critic.parameters():
                p.requires_grad_(False)
            opt_g.zero_grad()
            (-functional.cross_entropy(critic(generator(inputs)), targets)).backward()
            opt_g.step()

    results = []
    for wrap, data in ((lambda o: hvd.DistributedOptimizer(o), mine()), (lambda o: o, of_all_ranks())):
        generator, critic = nets()
        adversarial(generator, critic, wrap(sgd(generator)), wrap(sgd(critic)), data)
        results.append(weights(generator) + weights(critic))
    assert_close(*results)
    assert_same_everywhere(results[0])


@session
def test_every_torch_optimizer():
    for kind in torch.optim.Optimizer.__subclasses__():
        # Other tests import optimizers of torch.distributed, which take another optimizer.
        if not kind.__module__.startswith("torch.optim") or kind.__name__ in ("LBFGS", "SparseAdam"):
            continue
        accepted = inspect.signature(kind).parameters
        options = {key: value for key, value in {"lr": 0.01, "momentum": 0.5}.items() if key in accepted}
        model, single = mlp(), mlp()
        chosen = [p for p in model.parameters() if p.dim() == 2] if kind.__name__ == "Muon" else model.parameters()
        others = [p for p in single.parameters() if p.dim() == 2] if kind.__name__ == "Muon" else single.parameters()
        optimizer = hvd.DistributedOptimizer(kind(chosen, **options))
        plain = kind(others, **options)
        train(model, optimizer, 4, mine())
        train(single, plain, 4, of_all_ranks())
        assert_close(weights(model), weights(single), 1e-3)
        assert_same_everywhere(weights(model))
        if kind.__name__ not in ("Muon", "Rprop"):
            assert_states_close(optimizer.state_dict(), plain.state_dict(), 1e-3)


@session
def test_step_hooks_run_once_and_a_loaded_state_replaces_the_old_one():
    model = mlp()
    optimizer = distributed(model)
    calls = []
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    train(model, optimizer, 2, mine())
    assert len(calls) == 2
    state = optimizer.state_dict()
    backward(model)
    if hvd.size() > 1:
        with raises(AssertionError, "race"):
            optimizer.zero_grad()
    optimizer.synchronize()
    optimizer.load_state_dict(state)
    train(model, optimizer, 2, mine())
    assert_same_everywhere(weights(model))


@session
def test_hooks_of_the_user_run_whenever_they_were_registered():
    """Covers gradients copied at once and gradients copied together, in the first step and in later ones."""

    def net():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 90), nn.Tanh(), nn.Linear(90, 90), nn.Tanh(), nn.Linear(90, 3))

    def hook(parameter):
        parameter.grad.mul_(0.5)

    def halve(model):
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(hook)

    for options in ({}, {"sharded": True}, {"backward_passes_per_step": 2}):
        passes = options.get("backward_passes_per_step", 1)
        for when in ("before", "after", "between"):
            model, single = net(), net()
            if when == "before":
                halve(model)
            optimizer, plain = distributed(model, **options), sgd(single)
            if when == "after":
                halve(model)
            if when == "between":
                train(model, optimizer, 2, mine(), accumulate=passes)
                train(single, plain, 2, of_all_ranks(), accumulate=passes)
                halve(model)
            halve(single)
            train(model, optimizer, 4, mine(), accumulate=passes)
            train(single, plain, 4, of_all_ranks(), accumulate=passes)
            assert_close(weights(model), weights(single))


@session
def test_without_zero_grad_gradients_accumulate_or_raise_an_error():
    model, single = mlp(), mlp()
    optimizer, plain = distributed(model, sgd(model, lr=0.01)), sgd(single, lr=0.01)
    for step in range(5):
        backward(model, step)
        optimizer.step()
        inputs, targets = of_all_ranks()(step)
        functional.cross_entropy(single(inputs), targets).backward()
        plain.step()
    assert_close(weights(model), weights(single))
    for passes in (1, 2):
        model = mlp()
        optimizer = distributed(model, sharded=True, backward_passes_per_step=passes)
        for _ in range(passes):
            backward(model)
        optimizer.step()
        if hvd.size() > 1:
            for _ in range(passes):
                backward(model)
            with raises(ValueError, "sharded=True", "zero_grad()", "4.bias"):
                optimizer.step()


@session
def test_a_single_rank_may_load_a_checkpoint_between_steps():
    model = mlp()
    optimizer = distributed(model)
    train(model, optimizer, 3, mine())
    early = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 3, mine())
    if hvd.rank() == 0:
        optimizer.load_state_dict(early)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert_states_close(optimizer.state_dict(), early, 0.0)
    train(model, optimizer, 3, mine())
    assert_same_everywhere(weights(model))


def test_a_state_can_be_loaded_after_shutdown():
    hvd.init()
    model = mlp()
    optimizer = distributed(model)
    train(model, optimizer, 2, mine())
    hvd.barrier()
    hvd.shutdown()
    optimizer.load_state_dict(optimizer.state_dict())


@session
def test_two_optimizers_each_in_a_thread_of_its_own():
    """The threads begin in another order on each rank."""
    for options in ({}, {"sharded": True}):
        models, singles, errors = [mlp(), mlp()], [mlp(), mlp()], list[Exception]()
        optimizers = [
            distributed(
                model, named_parameters=[(f"{number}.{name}", p) for name, p in model.named_parameters()], **options
            )
            for number, model in enumerate(models)
        ]
        first = threading.Event()

        def work(number, models=models, optimizers=optimizers, errors=errors, first=first):
            try:
                if number != hvd.rank() % 2 and not first.wait(30):
                    raise TimeoutError("the other thread has not begun")
                for step in range(8):
                    optimizers[number].zero_grad()
                    backward(models[number], step + 10 * number)
                    first.set()
                    optimizers[number].step()
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,), name=f"trains model {number}") for number in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive(), thread.name
        assert not errors, errors
        for number, single in enumerate(singles):
            data = of_all_ranks()
            train(single, sgd(single), 8, lambda step, data=data, number=number: data(step + 10 * number))
            assert_close(weights(models[number]), weights(single))


@session
def test_optimizers_with_other_names_are_an_error():
    if hvd.size() == 1:
        pytest.skip("no rank to disagree with")
    model = nn.Linear(4, 2)
    names = [(f"{'last' if hvd.rank() else 'first'}.{name}", p) for name, p in model.named_parameters()]
    optimizer = distributed(model, named_parameters=names)
    model(torch.ones(1, 4)).sum().backward()
    with raises(hvd.HorovodInternalError, "Mismatched parameters", "first.", "last."):
        optimizer.step()


@session
def test_a_mismatched_shape_names_the_parameter():
    if hvd.size() == 1:
        pytest.skip("no rank to disagree with")
    model = nn.Linear(3 if hvd.rank() else 4, 2)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(prefix="layer"))
    model(torch.ones(1, model.in_features)).sum().backward()
    with raises(hvd.HorovodInternalError, "Mismatched ALLREDUCE tensor shapes", "layer.weight"):
        optimizer.step()
    assert_runtime_works()


@session
def test_different_numbers_of_parameters_are_an_error():
    if hvd.size() == 1:
        pytest.skip("no rank to disagree with")
    model = nn.Linear(4, 2, bias=hvd.rank() > 0)
    optimizer = distributed(model)
    for _ in range(2):
        with raises(hvd.HorovodInternalError, "Mismatched parameters", "bias", "weight"):
            optimizer.step()
    assert_runtime_works()


@session
def test_a_deleted_optimizer_stops_reducing_and_is_freed():
    model = mlp()
    optimizer = distributed(model)
    train(model, optimizer, 3, mine())
    ghost = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert ghost() is None
    single = mlp()
    single.load_state_dict(model.state_dict())
    train(model, distributed(model), 3, mine())
    train(single, sgd(single), 3, of_all_ranks())
    assert_close(weights(model), weights(single))


@session
def test_buckets_follow_the_order_of_gradients():
    """Layers are used in the reverse order of their definition; after two steps the buckets follow the use."""
    if hvd.size() == 1:
        pytest.skip("no buckets")
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(600, 600, bias=False) for _ in range(6))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(layers.parameters(), lr=0.01))
    x = torch.ones(1, 600)

    def step(order):
        optimizer.zero_grad()
        value = x
        for index in order:
            value = torch.tanh(layers[index](value))
        value.sum().backward()
        optimizer.step()

    def planned():
        order = {id(p): i for i, p in enumerate(layers.parameters())}
        return [order[id(p)] for spec in optimizer._reducer.specs for p in spec.parameters]

    step([5, 4, 3, 2, 1, 0])
    assert planned() == [0, 1, 2, 3, 4, 5]
    for _ in range(20):
        step([0, 1, 2, 3, 4, 5])
    assert planned() == [5, 4, 3, 2, 1, 0]
    assert_same_everywhere(list(layers.parameters()))


@session
def test_adasum_optimizer():
    model = mlp()
    options = {"named_parameters": model.named_parameters(), "op": hvd.Adasum}
    optimizer = hvd.DistributedOptimizer(sgd(model, momentum=0.0), **options)
    if hvd.size() == 1:
        train(model, optimizer, 3, mine())
        single = mlp()
        train(single, sgd(single, momentum=0.0), 3, mine())
        assert_close(weights(model), weights(single))
        return
    # All ranks have the same batch: all changes are parallel, so Adasum returns their mean, the plain step.
    num_steps = meter.num_steps
    train(model, optimizer, 3, lambda step: batch(0, step))
    assert meter.num_steps - num_steps == 3
    single = mlp()
    train(single, sgd(single, momentum=0.0), 3, lambda step: batch(0, step))
    assert_close(weights(model), weights(single), 1e-4)
    with raises(AssertionError, "not supported"), optimizer.skip_synchronize():
        pass
    backward(model)
    with raises(AssertionError, "race"):
        optimizer.zero_grad()
    optimizer.synchronize()
    assert optimizer.step(lambda: torch.tensor(7.0)) == 7.0
    assert_same_everywhere(weights(model))
    optimizer.zero_grad()
    optimizer.step()  # without backward, gradients are zeros
    assert_same_everywhere(weights(model))


@session(sets=True)
def test_adasum_needs_the_global_set(sets):
    if hvd.size() == 1:
        pytest.skip("no other set")
    with raises(NotImplementedError, "Adasum", "non-global"):
        hvd.DistributedOptimizer(sgd(mlp()), op=hvd.Adasum, process_set=sets[-1])
