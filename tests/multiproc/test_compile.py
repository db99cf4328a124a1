"""torch.compile over hvd and over a process group: the same numbers as without it, and few graph breaks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from hvd_session import needs_torch_2_7
from test_process_group import in_group
from torch.nn.parallel import DistributedDataParallel

import horovod.torch as hvd

pytestmark = [pytest.mark.ranks(2), needs_torch_2_7]


def compiled(function, **options):
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", **options)


def network():
    torch.manual_seed(7)
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))


def trained(model, rank):
    """Return the parameters after three steps on this rank's own data."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for number in range(3):
        optimizer.zero_grad()
        model(torch.arange(24.0).reshape(3, 8).cos() * (rank + number + 1)).square().sum().backward()
        optimizer.step()
    return [getattr(p, "full_tensor", p.clone)().detach() for p in model.parameters()]


MODELS = {
    "compiled DDP": lambda: compiled(DistributedDataParallel(network())),
    "compiled DDP, unused": lambda: compiled(DistributedDataParallel(network(), find_unused_parameters=True)),
    "DDP of a compiled model": lambda: DistributedDataParallel(compiled(network())),
    "compiled FSDP2": lambda: compiled(sharded(network())),
}


def sharded(model):
    from torch.distributed.fsdp import fully_shard

    return fully_shard(model)


@pytest.mark.parametrize("kind", MODELS)
def test_models_train_to_the_same_parameters(place, kind):
    @in_group
    def compare(rank, size):
        expected = trained(DistributedDataParallel(network()), rank)
        torch.testing.assert_close(trained(MODELS[kind](), rank), expected)

    compare(place)


@in_group
def test_collectives_inside_one_graph(rank, size):
    @compiled_whole
    def in_place(x):
        y = x * 2
        dist.all_reduce(y)
        return y + dist.get_world_size() + dist.get_rank()

    @compiled_whole
    def moved(x):
        gathered = functional.all_gather_tensor(x + rank, 0, dist.group.WORLD)
        parts = functional.reduce_scatter_tensor(gathered, "sum", 0, dist.group.WORLD)
        return functional.all_reduce(parts, "avg", dist.group.WORLD)

    x = torch.ones(4)
    assert in_place(x).tolist() == [2.0 * size + size + rank] * 4
    # Every rank gathers the same rows and keeps its own, times the number of ranks; then they are averaged.
    assert moved(x).tolist() == [size * (1 + (size - 1) / 2)] * 4


@in_group
def test_dtensor(rank, size):
    from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (size,))
    whole = torch.arange(16.0).reshape(4, 4)

    @compiled_whole
    def product(a, b):
        return (a @ b).redistribute(placements=[Replicate()]).to_local()

    a = DTensor.from_local(whole.chunk(size, dim=1)[rank].contiguous(), mesh, [Shard(1)])
    b = DTensor.from_local(whole.chunk(size, dim=0)[rank].contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close(product(a, b), whole @ whole)


def compiled_whole(function):
    return compiled(function, fullgraph=True)


def _blocking(x):
    return hvd.allreduce(x * 2, op=hvd.Sum) + 1


def _in_place(x):
    y = x * 2
    hvd.allreduce_(y, op=hvd.Sum)
    return y + 1


def _asynchronous(x):
    handle = hvd.allreduce_async(x * 2, op=hvd.Sum)
    return hvd.synchronize(handle) + 1


def _two(x):
    return hvd.allgather(hvd.broadcast(x * 4, 0))[:4] + 1


def _grouped(x):
    return sum(hvd.grouped_allreduce([x, x * 3], op=hvd.Sum)) / 2 + 1


@pytest.mark.parametrize(
    ("function", "most"), [(_blocking, 1), (_in_place, 1), (_asynchronous, 2), (_two, 2), (_grouped, 1)]
)
def test_a_collective_of_hvd_breaks_the_graph_once(function, most):
    hvd.init()
    x = torch.ones(4)
    expected = function(x).tolist()
    assert compiled(function)(x).tolist() == expected == [5.0] * 4
    explained = torch._dynamo.explain(function)(x)
    assert explained.graph_break_count <= most, explained.break_reasons
    hvd.shutdown()


def test_the_place_of_a_process_is_a_constant_of_the_graph():
    hvd.init()
    assert compiled_whole(lambda x: x * hvd.size() + hvd.rank())(torch.ones(2)).tolist() == [2.0 + hvd.rank()] * 2
    hvd.shutdown()


def test_gradients_flow_through_a_compiled_collective():
    hvd.init()
    x = torch.full((4,), 3.0, requires_grad=True)
    compiled(lambda x: hvd.allreduce(x * x, op=hvd.Sum).sum())(x).backward()
    assert x.grad.tolist() == [12.0] * 4  # 2 x, from each of two ranks
    hvd.shutdown()


@pytest.mark.parametrize("sharded", [False, True])
def test_a_whole_training_step_of_hvd(sharded):
    hvd.init()

    def train(wrap):
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model.named_parameters(), sharded=sharded
        )

        def step(x):
            optimizer.zero_grad()
            loss = model(x).square().sum()
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = wrap(step)
        losses = [step(torch.arange(24.0).reshape(3, 8).cos() * (hvd.rank() + n + 1)).item() for n in range(3)]
        return losses, [p.detach().clone() for p in model.parameters()]

    expected = train(lambda step: step)
    torch.testing.assert_close(train(compiled), expected)
    hvd.shutdown()


def test_sync_batch_norm():
    hvd.init()
    torch.manual_seed(hvd.rank())
    x, norm = torch.randn(5, 4), hvd.SyncBatchNorm(4)
    expected = copy.deepcopy(norm)(x)
    torch.testing.assert_close(compiled(norm)(x), expected)
    hvd.shutdown()
