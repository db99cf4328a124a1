"""All tests that need a GPU. One is enough: NCCL then runs with one member, and ranks share the GPU, through its
memory and through the host's. With two or more GPUs, NCCL also runs between two members.

    python -m pytest -m gpu
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import warnings
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from group_calls import CALLS, assert_written
from groups import make_group
from hvd_session import session
from test_compile import MODELS, network, trained
from test_process_group import in_group
from test_process_group_calls import callback, drop, future, poll, wait
from test_shm_transport import SharedSegments
from transport_checks import check_everything

import horovod
import horovod.torch as hvd
from hora.engine.request import Reduce
from hora.engine.transport import device_memory
from hora.engine.transport.base import Membership
from hora.engine.transport.cuda import CudaTransport
from hora.engine.transport.distributed import DistributedTransport
from hora.errors import DriftError
from hora.telemetry.reporter import Machine

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

# About a tenth of a second at 1.5 to 2 GHz: long enough for an unordered reader to be wrong.
SLOW_CYCLES = 200_000_000


def on_gpu(body):
    """Run the body with rank and size, on one rank and on two with their GPUs, between `init` and `shutdown`."""

    @functools.wraps(body)
    def with_place():
        torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
        body(hvd.rank(), hvd.size())

    return pytest.mark.ranks(1, 2)(session(with_place))


def membership(place) -> Membership:
    return Membership(place.rank, place.size, nothing_to_report)


def nothing_to_report() -> None:
    """Check the liveness of nothing."""


@pytest.mark.ranks(1, 2)
def test_every_operation_of_the_nccl_transport(place):
    if place.size > torch.cuda.device_count():
        pytest.skip("NCCL wants a GPU for each rank")
    torch.cuda.set_device(place.rank)
    transport = CudaTransport(place.store, membership(place), make_cpu=lambda: None)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_everything(transport, place.rank, place.size, device="cuda", same_order=place.size < 2)
    assert transport.name == "nccl", transport.name
    transport.close()


@pytest.mark.ranks(1)
def test_nccl_batches_queue_back_to_back(place):
    """Calls return before the GPU has begun, and the results are correct in the end."""
    torch.cuda.set_device(0)
    transport = CudaTransport(place.store, membership(place), make_cpu=lambda: None)
    tensors = [torch.full((1 << 20,), float(i), device="cuda") for i in range(8)]
    transport.allreduce(tensors[:1], tensors[:1], Reduce())  # connects
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20 * SLOW_CYCLES)
        for tensor in tensors:
            transport.allreduce([tensor], [tensor], Reduce(postscale=2.0))
        behind = torch.cuda.current_stream().record_event()
        assert not behind.query(), "the calls waited for the GPU"
        transport.wait_for_gpu(nothing_to_report)
        assert behind.query()
    assert [tensor.unique().tolist() for tensor in tensors] == [[2.0 * i] for i in range(8)]
    transport.close()


@pytest.mark.parametrize("through", ["cuda-ipc", "staged-tcp"])
@pytest.mark.ranks(2, 4)
def test_every_operation_of_ranks_that_share_a_gpu(place, through):
    torch.cuda.set_device(0)
    near = dist.PrefixStore("cpu", place.store)
    cpu = DistributedTransport(make_group("tcp", near, place.rank, place.size))
    share = SharedSegments(place, dist.PrefixStore("share", place.store)) if through == "cuda-ipc" else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "SMALL_BYTES", 64)
        patch.setattr(device_memory, "_FIRST_SLOT_BYTES", 4096)
        transport = CudaTransport(place.store, membership(place), make_cpu=lambda: cpu, share=share)
        with torch.cuda.stream(torch.cuda.Stream()):
            results = check_everything(transport, place.rank, place.size, device="cuda")
    assert transport.name == through, transport.name
    assert place.gather(results) == [results] * place.size
    transport.close()
    cpu.close()


@pytest.mark.ranks(2, 8)
@session
def test_many_ranks_on_one_gpu():
    """Large tensors go through the GPU's memory, in the order of the callers' streams."""
    torch.cuda.set_device(0)
    rank, size = hvd.rank(), hvd.size()
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        for number in range(3):
            value = torch.zeros(3_000_001, dtype=dtype, device="cuda")
            torch.cuda._sleep(SLOW_CYCLES // 4)
            value.add_(rank + 1)
            reduced = hvd.allreduce(value, op=hvd.Sum, name=f"sum{number}")
            value.fill_(7)  # the operation has already read it
            assert reduced.unique().tolist() == [size * (size + 1) // 2], reduced
        mine = torch.full((200_000 + 50_000 * rank,), rank, dtype=dtype, device="cuda")
        gathered = hvd.allgather(mine)
        same(gathered, torch.cat([torch.full((200_000 + 50_000 * r,), r, dtype=dtype) for r in range(size)]))
        spoken = hvd.broadcast(torch.full((500_000,), rank, dtype=dtype, device="cuda"), root_rank=size - 1)
        same(spoken, torch.full((500_000,), size - 1, dtype=dtype))
        share = hvd.reducescatter(torch.full((size * 70_001,), rank + 1, dtype=dtype, device="cuda"), op=hvd.Sum)
        same(share, torch.full((70_001,), size * (size + 1) // 2, dtype=dtype))
    large = torch.full((40_000_000,), float(rank), device="cuda")  # larger than a slot
    handles = [hvd.allreduce_async_(large, name="large", op=hvd.Sum)]
    handles += [hvd.allreduce_async(torch.ones(300_000, device="cuda"), name=f"n{i}") for i in range(5)]
    results = [hvd.synchronize(handle) for handle in handles]
    assert results[0].unique().tolist() == [size * (size - 1) / 2]
    assert all(result.unique().tolist() == [1.0] for result in results[1:])


@on_gpu
def test_operations(rank, size):
    """The public operations work on CUDA tensors."""
    total = sum(range(1, size + 1))
    for dtype in (torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        mine = torch.full((5, 3), rank + 1, dtype=dtype, device="cuda")
        same(hvd.allreduce(mine, op=hvd.Sum), torch.full((5, 3), total, dtype=dtype))
        same(hvd.allreduce(mine, op=hvd.Max), torch.full((5, 3), size, dtype=dtype))
        gathered = hvd.allgather(mine[: rank + 1])
        same(gathered, torch.cat([torch.full((r + 1, 3), r + 1, dtype=dtype) for r in range(size)]))
        same(hvd.broadcast(mine, root_rank=size - 1), torch.full((5, 3), size, dtype=dtype))
        scattered = hvd.reducescatter(torch.ones(size * 2, dtype=dtype, device="cuda"), op=hvd.Sum)
        same(scattered, torch.full((2,), size, dtype=dtype))
    sent = torch.arange(size * 2, device="cuda") + 100 * rank
    received, splits = hvd.alltoall(sent, splits=torch.full((size,), 2, dtype=torch.int32))
    same(received, torch.cat([torch.tensor([2 * rank, 2 * rank + 1]) + 100 * r for r in range(size)]))
    assert splits.tolist() == [2] * size
    large = torch.full((9_000_001,), float(rank), device="cuda")
    handles = [hvd.allreduce_async_(large, name="large", op=hvd.Sum)]
    handles += [hvd.allreduce_async(torch.full((7,), 1.0, device="cuda"), name=f"n{i}") for i in range(50)]
    results = [hvd.synchronize(handle) for handle in handles]
    same(results[0], torch.full((9_000_001,), float(sum(range(size)))))
    for result in results[1:]:
        same(result, torch.ones(7))
    first, second = hvd.grouped_allreduce([torch.ones(3, device="cuda"), torch.ones(2, 2, device="cuda")])
    same(first, torch.ones(3))
    same(second, torch.ones(2, 2))
    turned = torch.arange(6.0, device="cuda").reshape(2, 3).t()  # not contiguous
    same(hvd.allreduce(turned), torch.arange(6.0).reshape(2, 3).t())
    if size & (size - 1) == 0:
        same(hvd.allreduce(torch.full((4,), 2.0, device="cuda"), op=hvd.Adasum), torch.full((4,), 2.0))
    hvd.barrier()


@on_gpu
def test_operations_are_ordered_with_the_callers_stream(rank, size):
    """A long kernel precedes the operation and the result is used at once: the caller need not synchronise."""
    expected = float(sum(range(1, size + 1)))
    for stream in (torch.cuda.current_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            for number in range(3):
                value = torch.zeros(1 << 20, device="cuda")
                torch.cuda._sleep(SLOW_CYCLES)
                value.add_(rank + 1)
                handle = hvd.allreduce_async(value, op=hvd.Sum, name=f"v{number}")
                doubled = hvd.synchronize(handle) * 2
                in_place = torch.zeros(1000, device="cuda")
                torch.cuda._sleep(SLOW_CYCLES)
                in_place.add_(rank + 1)
                hvd.allreduce_(in_place, op=hvd.Sum)
                in_place.mul_(3)
                assert doubled.unique().tolist() == [2 * expected], doubled
                assert in_place.unique().tolist() == [3 * expected], in_place


@on_gpu
def test_training(rank, size):
    """After some steps of DistributedOptimizer, all ranks have the same weights."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1)).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2), named_parameters=model.named_parameters()
    )
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    x = torch.randn(32, 16, device="cuda")
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], losses
    same_on_all_ranks(flat(model))


def _trained(rank, *, sharded=False, compress=False, compiled=False):
    """Return the weights after ten steps of Adam on a fixed batch, and the optimizer."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 257), torch.nn.Tanh(), torch.nn.Linear(257, 3)).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-2),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.bf16 if compress else hvd.Compression.none,
        sharded=sharded,
    )
    run = torch.compile(model) if compiled else model
    x = torch.randn(32, 16, device="cuda", generator=torch.Generator("cuda").manual_seed(rank))
    for _ in range(10):
        optimizer.zero_grad()
        (run(x) - x[:, :3]).square().mean().backward()
        hvd.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return flat(model), optimizer


@on_gpu
def test_all_modes_of_training_give_the_same_weights(rank, size):
    """Sharded, compiled and compressed training match plain training; the optimizer's state is complete."""
    plain, _ = _trained(rank)
    sharded, optimizer = _trained(rank, sharded=True)
    torch.testing.assert_close(sharded, plain, rtol=1e-4, atol=1e-5)
    shapes = {index: tuple(entry["exp_avg"].shape) for index, entry in optimizer.state_dict()["state"].items()}
    assert shapes == {0: (257, 16), 1: (257,), 2: (3, 257), 3: (3,)}, shapes
    compiled, _ = _trained(rank, compiled=True)
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-4)
    compressed, _ = _trained(rank, compress=True)
    torch.testing.assert_close(compressed, plain, rtol=0.1, atol=0.05)
    for weights in (plain, sharded, compiled, compressed):
        same_on_all_ranks(weights)


@on_gpu
def test_mixed_precision(rank, size):
    """autocast and GradScaler work with and without shards, also in a step that the scaler skips."""
    for sharded in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 1).cuda()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.05), named_parameters=model.named_parameters(), sharded=sharded
        )
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
        losses = []
        for number in range(30):
            torch.manual_seed(100 * rank + number)
            x = torch.randn(64, 8, device="cuda")
            if number == 3 and rank == 0:
                x[0, 0] = float("inf")  # one rank overflows: every rank must skip this step
            optimizer.zero_grad()
            with torch.autocast("cuda", torch.float16):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            scaler.scale(loss).backward()
            optimizer.synchronize()
            scaler.unscale_(optimizer)
            with optimizer.skip_synchronize():
                scaler.step(optimizer)
            scaler.update()
            losses.append(loss.item())
        assert losses[-1] < 0.5 * losses[0], losses
        scales = hvd.allgather_object(scaler.get_scale())
        assert set(scales) == {2.0**13}, scales
        same_on_all_ranks(flat(model))


@on_gpu
def test_sync_batch_norm(rank, size):
    """The results equal those of BatchNorm over the whole batch."""
    torch.manual_seed(0)
    joined = torch.randn(4 * size, 3, 5, 5, device="cuda")
    expected_of = joined.clone().requires_grad_()
    single = torch.nn.BatchNorm2d(3).cuda()
    expected = single(expected_of)
    expected.pow(3).sum().backward()
    part = slice(4 * rank, 4 * rank + 4)
    mine = joined[part].clone().requires_grad_()
    layer = hvd.SyncBatchNorm(3).cuda()
    out = layer(mine)
    out.pow(3).sum().backward()
    torch.testing.assert_close(out, expected[part], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mine.grad, expected_of.grad[part], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(layer.running_var, single.running_var)


@on_gpu
def test_state_of_all_kinds(rank, size):
    """Covers parameters, optimizer state, objects and sparse gradients; an elastic state is committed and restored."""
    torch.manual_seed(rank)
    model = torch.nn.Sequential(
        torch.nn.Embedding(20, 4, sparse=True), torch.nn.Flatten(), torch.nn.Linear(8, 2)
    ).cuda()
    table, linear = model[0].weight, list(model[2].parameters())
    optimizers = [
        hvd.DistributedOptimizer(torch.optim.SparseAdam([table]), named_parameters=[("table", table)]),
        hvd.DistributedOptimizer(
            torch.optim.AdamW(linear, lr=0.01, fused=True), named_parameters=zip("wb", linear, strict=True)
        ),
    ]
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    for number in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model((torch.arange(6, device="cuda").reshape(3, 2) + 3 * rank + number) % 20).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for weights in (table.detach(), linear[0].detach()):
        same_on_all_ranks(weights)
    hvd.broadcast_optimizer_state(optimizers[1], root_rank=0)
    same(
        next(iter(optimizers[1].state.values()))["exp_avg"],
        hvd.broadcast(optimizers[1].state[linear[0]]["exp_avg"], 0).cpu(),
    )
    state = hvd.elastic.TorchState(model=model, optimizer=optimizers[1], epoch=3)
    state.commit()
    before = linear[0].detach().cpu().clone()
    with torch.no_grad():
        linear[0].add_(1.0)
    state.epoch = 9
    state.restore()
    same(linear[0].detach(), before)
    assert state.epoch == 3
    state.sync()
    assert hvd.join() >= 0


@on_gpu
def test_nothing_leaks(rank, size):
    """The allocated memory of the GPU does not grow over many steps."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512)).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), named_parameters=model.named_parameters()
    )
    x = torch.randn(16, 512, device="cuda")
    seen = []
    for number in range(300):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        if number in (50, 299):
            torch.cuda.synchronize()
            seen.append(torch.cuda.memory_allocated())
    assert seen[0] == seen[1], seen


@contextlib.contextmanager
def noting_waits_for_the_gpu() -> Iterator[list[str]]:
    """Yield a list that is filled at the end with the files in which this process waited for its GPU."""
    files: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield files
        finally:
            torch.cuda.set_sync_debug_mode("default")
    files += [os.path.basename(one.filename) for one in caught if "synchronizing CUDA" in str(one.message)]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.ranks(2, env={"HORA_NAN_CHECK": "1"})
def test_a_non_finite_gradient_is_named_before_its_reduction_with_one_gpu_wait_per_step(sharded):
    hvd.init()
    last = hvd.size() - 1
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(10)]).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01), named_parameters=model.named_parameters(), sharded=sharded
    )
    x = torch.randn(8, 32, device="cuda")
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        with noting_waits_for_the_gpu() as in_backward:
            loss.backward()
        with noting_waits_for_the_gpu() as in_step:
            optimizer.step()
        assert in_backward == []
        assert in_step.count("norms.py") == 1, in_step
    same_on_all_ranks(flat(model))
    before = flat(model).clone()
    optimizer.zero_grad()
    if hvd.rank() == last:
        model[7].weight.register_hook(lambda gradient: gradient.clone().fill_diagonal_(float("inf")))
    model(x).square().mean().backward()
    words = rf"the gradient of 7\.weight on rank {last} has 0 NaN and 32 infinite of 1024 values, in step \d+"
    expected = (FloatingPointError, words) if hvd.rank() == last else (hvd.HorovodInternalError, "shut down by rank 1")
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step()
    assert torch.equal(flat(model), before)
    hvd.shutdown()


@pytest.mark.ranks(2, lost=(1,))
def test_rank_1_is_killed():
    """A rank dies in mid-collective; the other one gets an error that names it."""
    tensor = torch.ones(1 << 20, device="cuda")
    hvd.init()
    hvd.allreduce_(tensor, name="t")
    if hvd.rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)

    def reduce_for_ever():
        while True:
            hvd.allreduce_(tensor, name="t")

    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        reduce_for_ever()
    hvd.shutdown()


def test_the_live_page_shows_the_gpus():
    gpus = Machine().facts()["gpus"]
    assert len(gpus) >= torch.cuda.device_count()
    for gpu in gpus:
        assert gpu["name"]
        assert 0 <= gpu["busy"] <= 1
        assert 0 < gpu["memory"] < gpu["memory_total"]


def flat(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def same_on_all_ranks(tensor: torch.Tensor) -> None:
    for other in hvd.allgather(tensor[None]):
        assert torch.equal(other, tensor)


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.is_cuda
    assert torch.equal(got.cpu(), expected), f"{got} is not {expected}"


@on_gpu
def test_repeated_small_allreduces_are_ordered_with_the_callers_stream(rank, size):
    """The fast path reads a tensor after earlier work on the stream, and writes it before later work."""
    stream = torch.cuda.Stream()
    for dtype, count in ((torch.float32, 1024), (torch.float16, 3), (torch.uint8, 4097), (torch.int64, 70_000)):
        for step in range(4):
            on = stream if step % 2 else torch.cuda.current_stream()
            with torch.cuda.stream(on):
                tensor = torch.zeros(count, dtype=dtype, device="cuda")
                torch.cuda._sleep(SLOW_CYCLES // 20)
                tensor += rank + step
                reduced = hvd.allreduce(tensor, op=hvd.Sum, name=f"fresh.{dtype}")
                hvd.allreduce_(tensor, op=hvd.Sum, name=f"in place.{dtype}")
                later = tensor.clone()
                tensor.zero_()
            on.synchronize()
            wanted = sum(member + step for member in range(size))
            assert reduced.tolist() == later.tolist() == [wanted] * count, (dtype, step)
    handle = hvd.allreduce_async_(torch.ones(1024, device="cuda"), op=hvd.Sum, name="behind")
    assert hvd.allreduce(torch.ones(8, device="cuda"), op=hvd.Sum, name="before").tolist() == [size] * 8
    assert hvd.synchronize(handle).tolist() == [size] * 1024


@pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
@session
def test_compressed_and_infrequent_exchanges_give_the_same_results_on_gpu_and_cpu():
    torch.cuda.set_device(hvd.rank() % torch.cuda.device_count())
    powersgd = hvd.Compression.powersgd(rank=2, start_step=2)
    for wrap in (
        functools.partial(hvd.DistributedOptimizer, compression=powersgd),
        functools.partial(hvd.DiLoCo, every=4, fragments=2, compression=hvd.Compression.int8),
    ):
        found = []
        for device in ("cuda", "cpu"):
            torch.manual_seed(0)
            layers = torch.nn.Linear(64, 96), torch.nn.Tanh(), torch.nn.Linear(96, 96), torch.nn.Linear(96, 8)
            model = torch.nn.Sequential(*layers).to(device)
            optimizer = wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
            for step in range(8):
                generator = torch.Generator().manual_seed(100 * step + hvd.rank())
                inputs = torch.randn(16, 64, generator=generator).to(device)
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
            if hasattr(optimizer, "exchange"):
                optimizer.exchange()
            found.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
        torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)
        told = hvd.allgather_object(found[0].tolist())
        assert told[0] == told[1]


@in_group
def on_gpu_in_group(rank, size, body):
    """Run the body in a process group; tensors it makes without a device are on the GPU."""
    torch.cuda.set_device(rank % torch.cuda.device_count())
    with torch.device("cuda"):
        body(rank, size)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("end", [wait, poll, future, callback, drop])
def test_every_collective_of_a_process_group(place, end):
    def check(rank, size):
        for count in (5, 30_001):
            for name, build in CALLS.items():
                for _ in range(3):  # the first call is negotiated, later ones may be repeated
                    call = build(dist.group.WORLD, list(range(size)), rank, count)
                    end(name, call)
                    assert_written(name, call.outputs, call.expected)

    on_gpu_in_group(place, body=check)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", MODELS)
def test_compiled_models_train_to_the_same_parameters(place, kind):
    def compare(rank, size):
        expected = trained(torch.nn.parallel.DistributedDataParallel(network()), rank)
        torch.testing.assert_close(trained(MODELS[kind](), rank), expected)

    on_gpu_in_group(place, body=compare)


@on_gpu
def test_a_parameter_that_differs_on_one_rank_is_noticed(rank, size):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3)).cuda()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), model.named_parameters(), on_drift="error"
    )
    x = torch.randn(8, 5, device="cuda")

    def train(steps):
        for _ in range(steps):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    train(140)
    if rank == 1:
        with torch.no_grad():
            model[2].weight[1, 3] += 0.5
    if size > 1:
        with pytest.raises(DriftError, match=r"2\.weight .*on rank 1"):
            train(140)


def test_a_protected_training_goes_on_in_its_cuda_contexts():
    """Four ranks share the GPU and two are killed: the others train on, and the losses are those of a calm run.

    All ranks have the same rows, so that the mean over any number of them is the same.
    """

    def train(deaths: dict[int, int]) -> tuple[int, bool, list[float]]:
        import os
        import signal

        import torch
        import torch.distributed as dist

        import hora.elastic

        dist.init_process_group("hora")
        torch.cuda.set_device(0)
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10)).cuda()
        model = torch.nn.parallel.DistributedDataParallel(net, device_ids=[0], bucket_cap_mb=0.1)
        optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
        hora.elastic.protect(model, optimizer)
        kept, losses = torch.arange(1000, device="cuda"), []
        place = kept.data_ptr()
        for step in range(12):
            rows = torch.randn(32, 256, generator=torch.Generator("cuda").manual_seed(step), device="cuda")
            optimizer.zero_grad()
            loss = model(rows).square().mean()
            if deaths.get(int(os.environ["HORA_WORKER"])) == step:
                net[0].weight.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        size, stays = dist.get_world_size(), kept.data_ptr() == place and kept.sum().item() == 499500
        dist.destroy_process_group()
        return size, stays, losses

    calm = horovod.run(train, ({},), num_proc=4, min_num_proc=2)
    disturbed = horovod.run(train, ({1: 4, 3: 7},), num_proc=4, min_num_proc=2)
    assert [size for size, _, _ in (*calm, *disturbed)] == [4, 4, 2, 2]
    assert all(stays for _, stays, _ in disturbed)
    for _, _, losses in disturbed:
        assert losses == pytest.approx(calm[0][2], rel=1e-4)
