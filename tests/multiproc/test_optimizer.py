"""DistributedOptimizer: what Horovod promises about arguments, hooks, synchronize, step and zero_grad."""

from __future__ import annotations

import copy
import gc
import inspect
import warnings
import weakref

import pytest
import torch
from hvd_session import assert_equal, assert_runtime_works, assert_same_everywhere, raises, session
from torch import nn
from torch.nn import functional
from training import assert_close, assert_states_close, batch, everybodys, mine, mlp, train, weights

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 4)


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def distributed(model, optimizer=None, **options):
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(optimizer or sgd(model), **options)


def reference(steps=5, **options):
    model = mlp()
    train(model, sgd(model, **options), steps, everybodys())
    return weights(model)


def backward(model, step=0, scale=1.0):
    inputs, targets = batch(hvd.rank(), step)
    (functional.cross_entropy(model(inputs), targets) * scale).backward()


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
def test_the_state_of_the_wrapped_optimizer_is_carried_over():
    model = mlp()
    plain = sgd(model)
    train(model, plain, 3, everybodys())
    optimizer = distributed(model, plain)
    train(model, optimizer, 3, lambda step: batch(hvd.rank(), step + 3))
    model2 = mlp()
    train(model2, sgd(model2), 6, everybodys())
    assert_close(weights(model), weights(model2))


@session
def test_bad_arguments_are_refused_with_the_reason():
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
def test_training_equals_one_process_on_the_joined_batch():
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
def test_a_number_of_groups_means_the_same_groups_whatever_each_ranks_order():
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
def test_parameters_match_by_name_whatever_each_ranks_order():
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
def test_min_reduces_element_by_element():
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
def test_compression_is_close_and_equal_on_all_ranks():
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
    """A user's compressor: sends float64."""

    @staticmethod
    def compress(tensor):
        return tensor.double(), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


@session
def test_error_feedback_loses_nothing_in_the_long_run():
    """A gradient far below the others' last bit: bf16 drops it every time, feedback sends it when it has added up."""
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
    train(single, sgd(single), 4, everybodys(), accumulate=3)
    assert_close(weights(model), weights(single))
    optimizer.set_backward_passes_per_step(1)
    other = sgd(single)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, 2, mine())
    train(single, other, 2, everybodys())
    assert_close(weights(model), weights(single))


@session
def test_a_backward_too_many_is_an_error():
    if hvd.size() == 1:
        pytest.skip("no hooks")
    for steps in (0, 3):  # before and after the buckets are agreed on
        model = mlp()
        optimizer = distributed(model)
        train(model, optimizer, steps, mine())
        optimizer.zero_grad()
        backward(model)
        with raises(AssertionError, "backward_passes_per_step"):
            backward(model)
        optimizer.step()
        # The second backward has added to a gradient that was being reduced, so the ranks may differ now.
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        train(model, optimizer, 1, mine())
        assert_same_everywhere(weights(model))
        optimizer.zero_grad()
        inputs, targets = batch(hvd.rank(), 0)
        with raises(AssertionError, "create_graph"):
            functional.cross_entropy(model(inputs), targets).backward(create_graph=True)
        optimizer.zero_grad() if not optimizer._backward_seen else optimizer.step()


@session
def test_zero_grad_is_guarded():
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
def test_zeroing_in_place_and_not_at_all_work_too():
    for steps in (1, 4):
        model, single = mlp(), mlp()
        optimizer, plain = distributed(model), sgd(single)
        for step in range(steps):
            for net, opt, data in ((model, optimizer, mine()), (single, plain, everybodys())):
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
        inputs, targets = everybodys()(step)
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
        everybodys(),
        lambda net: wanted.append(torch.nn.utils.clip_grad_norm_(net.parameters(), 0.05)),
    )
    assert_close(norms, wanted)
    assert_close(weights(model), weights(single))
    optimizer.zero_grad()
    backward(model, scale=float("nan"))
    with raises(RuntimeError, "non-finite"):
        hvd.clip_grad_norm_(optimizer, 1.0, error_if_nonfinite=True)


@session
def test_missing_gradients_are_zeros_and_every_rank_ends_alike():
    """Each rank uses another branch; what it does not use counts as zero."""
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
        plain.step(closure(single, plain, everybodys()(step)))
    assert_close(weights(model), weights(single))

    model, single = mlp(), mlp()
    options = {"lr": 0.5, "max_iter": 6, "line_search_fn": "strong_wolfe"}
    optimizer = distributed(model, torch.optim.LBFGS(model.parameters(), **options))
    plain = torch.optim.LBFGS(single.parameters(), **options)
    for step in range(2):
        optimizer.step(closure(model, optimizer, mine()(step)))
        plain.step(closure(single, plain, everybodys()(step)))
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


def test_ranks_outside_the_process_set_step_alone():
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
    """Rank r has r more batches than rank 0; a joined rank adds zeros, and nobody waits for it."""
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
        train(single, plain, warm, everybodys())
        for step in range(hvd.size() - 1):
            plain.zero_grad()
            losses = []
            for rank in range(step + 1, hvd.size()):
                inputs, targets = batch(rank, 10 + step)
                losses.append(functional.cross_entropy(single(inputs), targets))
            (sum(losses) / hvd.size()).backward()
            plain.step()
        train(single, plain, 3, everybodys())
        assert_close(weights(model), weights(single), 1e-4)


@session
def test_parameters_frozen_and_thawed_and_added_later():
    model, single = mlp(), mlp()
    for net in (model, single):
        net[0].requires_grad_(False)
    extra, extra2 = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    optimizer, plain = distributed(model), sgd(single)
    train(model, optimizer, 3, mine())
    train(single, plain, 3, everybodys())
    for net in (model, single):
        net[0].requires_grad_(True)
    train(model, optimizer, 3, mine())
    train(single, plain, 3, everybodys())
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
def test_requires_grad_toggled_between_two_optimizers():
    """A GAN: the discriminator is frozen while the generator learns, and the other way round."""

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
    for wrap, data in ((lambda o: hvd.DistributedOptimizer(o), mine()), (lambda o: o, everybodys())):
        generator, critic = nets()
        adversarial(generator, critic, wrap(sgd(generator)), wrap(sgd(critic)), data)
        results.append(weights(generator) + weights(critic))
    assert_close(*results)
    assert_same_everywhere(results[0])


@session
def test_every_torch_optimizer():
    for kind in torch.optim.Optimizer.__subclasses__():
        if kind.__module__.split(".")[0] != "torch" or kind.__name__ in ("LBFGS", "SparseAdam", "NewOpt"):
            continue
        accepted = inspect.signature(kind).parameters
        options = {key: value for key, value in {"lr": 0.01, "momentum": 0.5}.items() if key in accepted}
        model, single = mlp(), mlp()
        chosen = [p for p in model.parameters() if p.dim() == 2] if kind.__name__ == "Muon" else model.parameters()
        others = [p for p in single.parameters() if p.dim() == 2] if kind.__name__ == "Muon" else single.parameters()
        optimizer = hvd.DistributedOptimizer(kind(chosen, **options))
        plain = kind(others, **options)
        train(model, optimizer, 4, mine())
        train(single, plain, 4, everybodys())
        assert_close(weights(model), weights(single), 1e-3)
        assert_same_everywhere(weights(model))
        if kind.__name__ not in ("Muon", "Rprop"):
            assert_states_close(optimizer.state_dict(), plain.state_dict(), 1e-3)


@session
def test_step_hooks_run_once_and_loading_state_resets():
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
def test_one_rank_alone_may_load_a_checkpoint_between_steps():
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


def test_a_state_can_be_loaded_after_the_shutdown():
    hvd.init()
    model = mlp()
    optimizer = distributed(model)
    train(model, optimizer, 2, mine())
    hvd.barrier()
    hvd.shutdown()
    optimizer.load_state_dict(optimizer.state_dict())


@session
def test_ranks_that_disagree_on_a_shape_are_told_which_parameter():
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    model = nn.Linear(3 if hvd.rank() else 4, 2)
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters(prefix="layer"))
    model(torch.ones(1, model.in_features)).sum().backward()
    with raises(hvd.HorovodInternalError, "Mismatched ALLREDUCE tensor shapes", "layer.weight"):
        optimizer.step()
    assert_runtime_works()


@session
def test_ranks_that_disagree_on_the_number_of_parameters_are_told():
    if hvd.size() == 1:
        pytest.skip("nobody to disagree with")
    model = nn.Linear(4, 2, bias=hvd.rank() > 0)
    optimizer = distributed(model)
    for _ in range(2):
        with raises(hvd.HorovodInternalError, "Mismatched", "[2]", "[3]", "number of parameters"):
            optimizer.step()
    assert_runtime_works()


@session
def test_a_dropped_optimizer_reduces_no_more_and_is_freed():
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
    train(single, sgd(single), 3, everybodys())
    assert_close(weights(model), weights(single))


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
def test_buckets_follow_the_order_of_arrival():
    """Layers used in the reverse order of their definition: after two steps the buckets know."""
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
    # Everybody on the same batch: all changes are parallel, so Adasum gives their mean, the plain step.
    train(model, optimizer, 3, lambda step: batch(0, step))
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
    optimizer.step()  # no backward at all: zeros
    assert_same_everywhere(weights(model))


@session(sets=True)
def test_adasum_needs_the_global_set(sets):
    if hvd.size() == 1:
        pytest.skip("no other set")
    with raises(NotImplementedError, "Adasum", "non-global"):
        hvd.DistributedOptimizer(sgd(mlp()), op=hvd.Adasum, process_set=sets[-1])


@session
def test_gradients_stay_usable_after_the_step():
    model = mlp()
    optimizer = distributed(model)
    train(model, optimizer, 4, mine())
    kept = [p.grad.clone() for p in model.parameters()]
    assert_same_everywhere(kept)
    for p in model.parameters():
        p.grad.mul_(2)
    assert_equal(next(model.parameters()).grad, kept[0] * 2)
    hvd.barrier()
    assert_equal(next(model.parameters()).grad, kept[0] * 2)  # the others' doubling did not reach mine
