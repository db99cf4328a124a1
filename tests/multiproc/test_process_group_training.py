"""Training under torch.distributed: equal results on Hora and gloo, up to the order of summation."""

from __future__ import annotations

import copy
import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from hvd_session import needs_torch_2_7
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from hora import torch_backend

pytestmark = [pytest.mark.ranks(2), needs_torch_2_7]


def both(place, body):
    """Return the body's results on Hora and on gloo."""
    torch_backend.register()
    results = []
    for backend in ("hora", "gloo"):
        store = dist.PrefixStore(backend, place.store)
        dist.init_process_group(backend, store=store, rank=place.rank, world_size=place.size)
        torch.manual_seed(0)
        results.append(body(place.rank, place.size))
        dist.barrier()
        dist.destroy_process_group()
    return results


def compare(place, body):
    ours, theirs = both(place, body)
    torch.testing.assert_close(ours, theirs)


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model, rank, steps=4, optimizer=None):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank + 7)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(5, 8, generator=generator)).square().mean().backward()
        optimizer.step()


def weights(model):
    return [parameter.detach().clone() for parameter in model.parameters()]


class Branches(nn.Module):
    """A layer that every rank uses, and one per rank that the others do not use."""

    def __init__(self):
        super().__init__()
        self.common, self.own = nn.Linear(8, 4), nn.ModuleList([nn.Linear(4, 3), nn.Linear(4, 3)])

    def forward(self, inputs):
        return self.own[dist.get_rank()](self.common(inputs))


class SeveralDtypes(nn.Module):
    """Parameters of three dtypes, so three kinds of buckets."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8, dtype=dtype) for dtype in (None, torch.float64, torch.bfloat16)])

    def forward(self, inputs):
        return sum(layer(inputs.to(layer.weight.dtype)).double() for layer in self.layers)


def seeded(kind):
    torch.manual_seed(1)
    return kind()


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (network, {}),
        (network, {"gradient_as_bucket_view": True}),
        (network, {"static_graph": True}),
        (Branches, {"find_unused_parameters": True}),
        (SeveralDtypes, {"gradient_as_bucket_view": True}),
    ],
    ids=["plain", "views", "static-graph", "unused-parameters", "dtypes"],
)
def test_ddp(place, kind, options):
    def body(rank, size):
        model = seeded(kind)
        train(DistributedDataParallel(model, bucket_cap_mb=0.001, **options), rank)
        return weights(model)

    compare(place, body)


def clamp_gradients(net):
    for parameter in net.parameters():
        parameter.grad.data = parameter.grad.data.clamp(-0.01, 0.01)


def clamp_parameters(net):
    for parameter in net.parameters():
        parameter.data = parameter.data.clamp(-0.2, 0.2)


def convert(net):
    net.double()
    net.float()


def send(net):
    queue = torch.multiprocessing.get_context("spawn").SimpleQueue()
    queue.put((net.state_dict(), [parameter.grad for parameter in net.parameters()]))
    queue.get()


@pytest.mark.parametrize("views", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["copies", "views"])
@pytest.mark.parametrize("habit", [clamp_gradients, clamp_parameters, convert, nn.Module.share_memory, send])
def test_ddp_of_a_model_whose_memory_is_moved(place, habit, views):
    def body(rank, size):
        net = network()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
        model, kept = DistributedDataParallel(net, gradient_as_bucket_view=views), []
        for number in range(6):
            generator = torch.Generator().manual_seed(10 * number + rank)
            optimizer.zero_grad()
            model(torch.randn(5, 8, generator=generator)).square().mean().backward()
            kept.append([parameter.grad for parameter in net.parameters()])
            if number in (2, 3):
                habit(net)
            optimizer.step()
            if number == 4:  # a notebook's cell is called again
                model = DistributedDataParallel(net, gradient_as_bucket_view=views)
        return weights(net) + [gradient for gradients in kept for gradient in gradients]

    compare(place, body)


def bf16_hook(state, bucket):
    """torch's hook under another name, because torch rejects the original on CPUs by its name."""
    return default_hooks.bf16_compress_hook(state, bucket)


@pytest.mark.parametrize("name", ["allreduce_hook", "fp16_compress_hook", "bf16_hook", "powerSGD"])
def test_ddp_with_communication_hooks(place, name):
    def body(rank, size):
        model = network()
        wrapped = DistributedDataParallel(model)
        if name == "powerSGD":
            state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        else:
            wrapped.register_comm_hook(None, getattr(default_hooks, name, bf16_hook))
        train(wrapped, rank, steps=6)
        return weights(model)

    ours, theirs = both(place, body)
    tolerance = 2e-2 if name == "bf16_hook" else 2e-3
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_ddp_without_synchronisation_and_with_uneven_inputs(place):
    def body(rank, size):
        model = network()
        wrapped = DistributedDataParallel(model)
        with wrapped.no_sync():
            wrapped(torch.ones(2, 8) * rank).sum().backward()
        wrapped(torch.ones(2, 8)).sum().backward()
        gradients = [parameter.grad.clone() for parameter in model.parameters()]
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        with wrapped.join():
            for _ in range(3 + rank):
                optimizer.zero_grad()
                wrapped(torch.ones(2, 8)).sum().backward()
                optimizer.step()
        return gradients + weights(model)

    compare(place, body)


def test_zero_redundancy_optimizer(place):
    def body(rank, size):
        model = network()
        wrapped = DistributedDataParallel(model)
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=torch.optim.Adam, lr=0.01)
        train(wrapped, rank, optimizer=optimizer)
        return weights(model)

    compare(place, body)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fsdp2_and_its_checkpoints(place, precision):
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    folder = place.gather(tempfile.mkdtemp() if place.rank == 0 else None)[0]

    def body(rank, size):
        model = network()
        policy = MixedPrecisionPolicy(param_dtype=getattr(torch, precision), reduce_dtype=torch.float32)
        mesh = init_device_mesh("cpu", (size,))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
        train(model, rank)
        path = os.path.join(folder, dist.get_backend())
        checkpoint.save({"model": model.state_dict()}, checkpoint_id=path)
        state = {"model": {name: torch.zeros_like(value) for name, value in model.state_dict().items()}}
        checkpoint.load(state, checkpoint_id=path)
        loaded = [value.full_tensor() for value in state["model"].values()]
        trained = [parameter.full_tensor() for parameter in model.parameters()]
        torch.testing.assert_close(loaded, trained)
        return [tensor.detach() for tensor in trained]

    ours, theirs = both(place, body)
    torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-2)


def test_an_asynchronous_checkpoint_can_be_loaded_by_a_single_rank(place):
    from torch.distributed.fsdp import fully_shard

    folder = place.gather(tempfile.mkdtemp() if place.rank == 0 else None)[0]

    def body(rank, size):
        model = network()
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
        train(model, rank)
        path = os.path.join(folder, dist.get_backend())
        checkpoint.async_save({"model": model.state_dict()}, checkpoint_id=path).result(timeout=120)
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    ours, theirs = both(place, body)
    torch.testing.assert_close(ours, theirs)
    for backend in ("hora", "gloo"):
        dist.init_process_group("hora", store=dist.HashStore(), rank=0, world_size=1)
        model = network()
        state = {"model": model.state_dict()}
        for value in state["model"].values():
            value.zero_()
        checkpoint.load(state, checkpoint_id=os.path.join(folder, backend))
        dist.destroy_process_group()
        torch.testing.assert_close(weights(model), ours)


def test_tensor_parallel_layers(place):
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    def body(rank, size):
        mesh = init_device_mesh("cpu", (size,))
        model = nn.ModuleDict({"up": nn.Linear(8, 16), "down": nn.Linear(16, 8), "norm": nn.LayerNorm(8)})
        torch.manual_seed(5)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        whole = copy.deepcopy(model)
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        parallelize_module(model["norm"], mesh, SequenceParallel())
        inputs = torch.linspace(-1, 1, 2 * 4 * 8).view(2, 4, 8)
        normed = model["norm"](inputs.chunk(size, dim=1)[rank]).full_tensor()
        output = model["down"](model["up"](normed).relu())
        torch.testing.assert_close(output, whole["down"](whole["up"](whole["norm"](inputs)).relu()))
        output.sum().backward()
        return [output.detach(), model["up"].weight.grad.full_tensor(), model["norm"].weight.grad.full_tensor()]

    compare(place, body)


def test_a_loss_of_sharded_logits(place):
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    def body(rank, size):
        torch.manual_seed(5)
        whole = nn.Linear(8, 12)
        model = copy.deepcopy(whole)
        plan = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
        parallelize_module(model, init_device_mesh("cpu", (size,)), plan)
        inputs, targets = torch.linspace(-1, 1, 48).view(6, 8), torch.arange(6)
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(inputs), targets)
            loss.backward()
        alone = nn.functional.cross_entropy(whole(inputs), targets)
        alone.backward()
        found = [loss.detach().full_tensor(), model.weight.grad.full_tensor()]
        torch.testing.assert_close(found, [alone.detach(), whole.weight.grad])
        return found

    compare(place, body)


def test_a_pipeline_schedule(place):
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

    def body(rank, size):
        layers = [nn.Linear(8, 8), nn.Linear(8, 8)]
        for layer in layers:
            nn.init.normal_(layer.weight, std=0.3, generator=torch.Generator().manual_seed(3))
        stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        inputs = torch.linspace(-1, 1, 64).view(8, 8)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        else:
            schedule.step(target=torch.zeros(8, 8), losses=losses)
        return [layers[rank].weight.grad, *[loss.detach() for loss in losses]]

    compare(place, body)


@pytest.mark.ranks(4, slow=(4,))
@pytest.mark.parametrize("second", ["shard", "tensor"])
def test_a_mesh_of_two_dimensions(place, second):
    """Covers HSDP, and FSDP over tensor-parallel layers."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    def body(rank, size):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", second))
        model = network()
        if second == "tensor":
            parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            mesh = mesh["data"]
        fully_shard(model, mesh=mesh)
        train(model, rank // 2 if second == "tensor" else rank)
        return [parameter.full_tensor().detach() for parameter in model.parameters()]

    compare(place, body)
