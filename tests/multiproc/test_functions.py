"""State functions: parameters, state of every torch optimizer, objects."""

from __future__ import annotations

import collections
import inspect
import sys

import cloudpickle
import pytest
import torch
from hvd_session import (
    assert_equal,
    assert_runtime_works,
    assert_same_everywhere,
    even_and_odd,
    raises,
    session,
)

import horovod.torch as hvd
from hora.torch import functions

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def model(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))


@session
def test_broadcast_parameters_takes_dicts_lists_and_iterables():
    root = hvd.size() - 1
    for form in (
        lambda m: m.state_dict(),
        lambda m: dict(m.state_dict()),
        lambda m: list(m.state_dict().items()),
        lambda m: list(m.state_dict().values()),
        lambda m: (pair for pair in m.state_dict().items()),
        lambda m: collections.UserDict(m.state_dict()),
        lambda m: dict(enumerate(m.state_dict().values())),
    ):
        net = model(hvd.rank())
        net[1].num_batches_tracked.fill_(hvd.rank() + 7)
        assert hvd.broadcast_parameters(form(net), root_rank=root) is None
        want = model(root)
        want[1].num_batches_tracked.fill_(root + 7)
        for name, tensor in want.state_dict().items():
            assert_equal(net.state_dict()[name], tensor)
    net = model(hvd.rank())
    hvd.broadcast_parameters(net.named_parameters(), 0)
    hvd.broadcast_parameters(net.parameters(), 0)
    assert_same_everywhere(list(net.parameters()))
    hvd.broadcast_parameters({}, 0)
    hvd.broadcast_parameters([], 0)


@session
def test_broadcast_parameters_in_different_orders():
    """The order of a dict may differ between ranks: tensors are matched by name."""
    items = [(f"p{i}", torch.full((i + 1,), float(hvd.rank()))) for i in range(6)]
    hvd.broadcast_parameters(dict(items if hvd.rank() % 2 else reversed(items)), 0)
    assert all(tensor.sum() == 0 for _, tensor in items)


@session
def test_broadcast_parameters_rejects_invalid_arguments():
    for params in (None, 3, torch.ones(2), [1], [("a", 1)], {"a": None}, [("a", torch.ones(1), 2)]):
        with raises(ValueError, "invalid params"):
            hvd.broadcast_parameters(params, 0)
    with raises(ValueError, "invalid params", "'a'", "unique"):
        hvd.broadcast_parameters([("a", torch.ones(1)), ("a", torch.ones(1))], 0)
    with raises(ValueError, "invalid root rank", str(hvd.size())):
        hvd.broadcast_parameters([torch.ones(1)], hvd.size())
    assert_runtime_works()


@session
def test_broadcast_parameters_within_a_set():
    if hvd.size() == 1:
        return
    hvd.shutdown()
    halves = even_and_odd()
    hvd.init(process_sets=halves)
    mine = next(half for half in halves if half.included())
    tensor = torch.tensor([float(hvd.rank())])
    hvd.broadcast_parameters([tensor], mine.ranks[0], process_set=mine)
    assert tensor.item() == mine.ranks[0]


def optimizers():
    """Yield every optimizer class of torch, with the variants whose state differs."""
    variants = {
        "SGD": [{}, {"momentum": 0.9, "nesterov": True}],
        "Adam": [{}, {"amsgrad": True, "betas": (0.8, 0.9)}],
    }
    for cls in sorted(torch.optim.Optimizer.__subclasses__(), key=lambda c: c.__name__):
        if cls.__module__.startswith("torch.optim") and cls.__name__ != "LBFGS":
            for options in variants.get(cls.__name__, [{}]):
                yield cls, options


def build(cls, options, seed, lr):
    torch.manual_seed(seed)
    if cls is torch.optim.SparseAdam:
        net = torch.nn.Embedding(6, 3, sparse=True)
    else:
        net = torch.nn.Sequential(torch.nn.Linear(4, 3, bias=False), torch.nn.Linear(3, 2, bias=False))
    accepted = inspect.signature(cls.__init__).parameters
    more = {"weight_decay": 0.1} if "weight_decay" in accepted else {}
    return net, cls(net.parameters(), lr=lr, **more, **options)


def train(net, optimizer, num_steps):
    for step in range(num_steps):
        optimizer.zero_grad()
        inputs = torch.tensor([step % 6, 2]) if isinstance(net, torch.nn.Embedding) else torch.full((2, 4), step + 1.0)
        net(inputs).square().sum().backward()
        optimizer.step()


def leaves(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in leaves(value[key])]
    return [leaf for item in value for leaf in leaves(item)] if isinstance(value, list | tuple) else [value]


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    return type(a) is type(b) and a == b


def check_same_state(optimizer, reference):
    state, want = leaves(optimizer.state_dict()), leaves(reference.state_dict())
    assert len(state) == len(want), (optimizer.state_dict(), reference.state_dict())
    assert all(same(a, b) for a, b in zip(state, want, strict=True)), (
        optimizer.state_dict(),
        reference.state_dict(),
    )


@session
def test_optimizer_state_from_a_root_that_has_trained():
    """Either only the root has loaded a checkpoint, or every rank has trained differently."""
    for cls, options in optimizers():
        reference_net, reference = build(cls, options, 0, 0.25)
        train(reference_net, reference, 3)
        for others_train in (False, True):
            net, optimizer = build(cls, options, hvd.rank(), 0.25 if hvd.rank() == 0 else 0.5)
            if hvd.rank() == 0 or others_train:
                train(net, optimizer, 3 if hvd.rank() == 0 else 1)
            before = [p.detach().clone() for p in net.parameters()]
            hvd.broadcast_optimizer_state(optimizer, root_rank=0)
            for p, old in zip(net.parameters(), before, strict=True):
                assert_equal(p.detach(), old)
            check_same_state(optimizer, reference)
            hvd.broadcast_parameters(net.state_dict(), root_rank=0)
            train(net, optimizer, 1)
            assert_same_everywhere(list(net.parameters()))


@session
def test_optimizer_state_before_any_step():
    """Weights are unchanged, gradients become zeros, and all ranks have the root's options and no additional state."""
    for cls, options in optimizers():
        net, optimizer = build(cls, options, hvd.rank(), 0.125 * (hvd.rank() + 1))
        frozen = torch.nn.Parameter(torch.arange(3), requires_grad=False)
        if cls.__name__ not in ("SparseAdam", "Muon", "Adagrad"):
            optimizer.add_param_group({"params": [frozen]})
        had_state = bool(optimizer.state)
        before = [p.detach().clone() for p in net.parameters()]
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for p, old in zip(net.parameters(), before, strict=True):
            assert_equal(p.detach(), old)
            assert had_state or not p.grad.to_dense().any()
        assert frozen.grad is None
        assert [type(g["lr"]) for g in optimizer.param_groups] == [float] * len(optimizer.param_groups)
        assert all(g["lr"] == 0.125 for g in optimizer.param_groups)
        tensors = [leaf for leaf in leaves(optimizer.state_dict()["state"]) if isinstance(leaf, torch.Tensor)]
        assert_same_everywhere(tensors)
        assert bool(optimizer.state_dict()["state"]) == had_state


def every_training():
    """Yield every optimizer with options that affect its first steps: (class, options, sharded)."""
    more = {
        "SGD": [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.5}],
        "RMSprop": [{"momentum": 0.5, "centered": True}],
        "Adagrad": [{"initial_accumulator_value": 0.1}],
        "ASGD": [{"t0": 2}],
    }
    for cls, options in optimizers():
        for chosen in [options, *more.get(cls.__name__, [])]:
            yield cls, chosen, False
            if cls.__name__ not in ("Adafactor", "Muon", "SparseAdam"):
                yield cls, chosen, True


@pytest.mark.ranks(1, 2, slow=(1,))
@session
def test_broadcasting_fresh_state_does_not_change_the_training():
    """The results are bit-identical whether it is called once, repeatedly, or by an elastic state."""

    def broadcast(net, optimizer):
        hvd.broadcast_optimizer_state(optimizer, root_rank=hvd.size() - 1)

    def broadcast_twice(net, optimizer):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0, model=net)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    def synchronize(net, optimizer):
        state = hvd.elastic.TorchState(model=net, optimizer=optimizer)
        state.sync()
        state.restore()

    for cls, options, sharded in every_training():
        found = []
        for prepare in (None, broadcast, broadcast_twice, synchronize):
            net, plain = build(cls, options, 0, 0.01)
            optimizer = hvd.DistributedOptimizer(plain, sharded=sharded)
            if prepare is not None:
                prepare(net, optimizer)
            train(net, optimizer, 4)
            found.append(([p.detach().clone() for p in net.parameters()], leaves(optimizer.state_dict())))
            del optimizer
        for after, (got, state) in zip(("broadcast", "twice", "sync"), found[1:], strict=True):
            words = (cls.__name__, options, sharded, after)
            assert all(torch.equal(a, b) for a, b in zip(got, found[0][0], strict=True)), words
            assert all(same(a, b) for a, b in zip(state, found[0][1], strict=True)), words


@pytest.mark.ranks(1, 2)
@session
def test_existing_gradients_are_kept():
    net, optimizer = build(torch.optim.Adam, {}, 0, 0.01)
    net(torch.ones(2, 4)).sum().backward()
    before = [p.grad.clone() for p in net.parameters()]
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    for parameter, gradient in zip(net.parameters(), before, strict=True):
        assert_equal(parameter.grad, gradient)


@pytest.mark.ranks(2)
@session
def test_a_root_without_state_clears_the_others():
    net, optimizer = build(torch.optim.Adam, {}, 0, 0.01)
    if hvd.rank() == 1:
        train(net, optimizer, 2)
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)
    assert not optimizer.state_dict()["state"]


@session
def test_optimizer_option_types_survive():
    net = model(0)
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3 * (hvd.rank() + 1), betas=(0.5, 0.6), amsgrad=False)
    optimizer.param_groups[0].update(note="x", flag=hvd.rank() == 0, nothing=None, pair=(1, [2.0, "z"]), lr_tensor=None)
    with_tensor = torch.optim.Adam(net.parameters(), lr=torch.tensor(0.5 + hvd.rank()))
    hvd.broadcast_optimizer_state(optimizer, 0)
    hvd.broadcast_optimizer_state(with_tensor, 0)
    group = optimizer.param_groups[0]
    assert group["lr"] == 1e-3
    assert type(group["lr"]) is float
    assert group["betas"] == (0.5, 0.6)
    assert type(group["betas"]) is tuple
    assert group["flag"] is True
    assert group["nothing"] is None
    assert group["pair"] == (1, [2.0, "z"])
    assert with_tensor.param_groups[0]["lr"].item() == 0.5


@session
def test_sgd_with_sparse_embedding_of_a_model():
    net = torch.nn.Sequential(torch.nn.Embedding(5, 2, sparse=True), torch.nn.Linear(2, 1))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    hvd.broadcast_optimizer_state(optimizer, 0, model=net)
    assert net[0].weight.grad.is_sparse
    assert not net[1].weight.grad.is_sparse


@session
def test_optimizer_states_that_cannot_be_broadcast():
    net = model(0)
    with raises(ValueError, "cannot broadcast torch.optim.LBFGS state"):
        hvd.broadcast_optimizer_state(torch.optim.LBFGS(net.parameters()), 0)
    if hvd.size() > 1:
        optimizer = torch.optim.SGD(list(net.parameters())[: 2 + (hvd.rank() == 0)], lr=0.1)
        with raises(ValueError, "different parameters", "[3]", "[2]"):
            hvd.broadcast_optimizer_state(optimizer, 0)
    assert_runtime_works()


class Unpicklable:
    def __reduce__(self):
        raise TypeError("this one does not travel")


@session(sets=True)
def test_broadcast_object(sets):
    for process_set in sets:
        for root in process_set.ranks:
            for make in (
                lambda r: {"rank": r},
                lambda r: None if r else [1, "x"],
                lambda r: bytes(r * 10**6 + 1),
            ):
                obj = make(hvd.rank())
                got = hvd.broadcast_object(obj, root, process_set=process_set)
                assert got == make(root)
                assert (got is obj) or hvd.rank() != root
    double = hvd.broadcast_object((lambda x: 2 * x) if hvd.rank() == 0 else None, name="f")
    assert double(4) == 8


@session(sets=True)
def test_allgather_object(sets):
    for process_set in sets:
        got = hvd.allgather_object({"rank": hvd.rank(), "pad": "x" * 1000 * hvd.rank()}, process_set=process_set)
        assert got == [{"rank": r, "pad": "x" * 1000 * r} for r in process_set.ranks]
    assert hvd.allgather_object("a" if hvd.rank() == 0 else 1.5, "named") == ["a"] + [1.5] * (hvd.size() - 1)


@session
def test_unpicklable_objects_fail_on_every_rank():
    obj = Unpicklable() if hvd.rank() == 0 else None
    kind = TypeError if hvd.rank() == 0 else hvd.HorovodInternalError
    with raises(kind, "does not travel", *(["rank 0"] if hvd.rank() else [])):
        hvd.broadcast_object(obj, 0)
    with raises(kind, "does not travel"):
        hvd.allgather_object(obj)
    assert_runtime_works()


class Exploit:
    """Records that it was unpickled."""

    def __reduce__(self):
        return exec, ("import sys; sys.exploited = True",)


@pytest.mark.ranks(2, 3)
@pytest.mark.over_network
@session
def test_a_forged_object_is_not_unpickled():
    """An attacker on a rank's NCCL connection replaces the bytes without knowing the key."""
    forged = cloudpickle.dumps(Exploit())
    real = functions.broadcast_

    def tampered(tensor, root_rank, name, process_set):
        real(tensor, root_rank, name, process_set)
        if name.endswith(".data") and hvd.rank() == 1:
            tensor[-len(forged) :] = torch.frombuffer(bytearray(forged), dtype=torch.uint8)

    functions.broadcast_ = tampered
    try:
        if hvd.rank() == 1:
            with pytest.raises(hvd.HorovodInternalError, match="from rank 0 failed authentication"):
                hvd.broadcast_object(None, root_rank=0)
        else:
            assert hvd.broadcast_object("x" * 500, root_rank=0) == "x" * 500
    finally:
        functions.broadcast_ = real
    assert not hasattr(sys, "exploited")
    assert hvd.broadcast_object({"still": "works"}, root_rank=0) == {"still": "works"}
    assert hvd.allgather_object(hvd.rank()) == list(range(hvd.size()))
