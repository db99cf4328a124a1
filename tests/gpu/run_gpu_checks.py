"""Everything that needs a GPU, as a plain script: python tests/gpu/run_gpu_checks.py

Needs torch with CUDA and numpy, nothing else. One GPU is enough: NCCL is checked with one member, two ranks
share the GPU through host memory. With two GPUs or more, NCCL is checked between two members too. Prints
one line per check.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests" / "multiproc")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from transport_checks import check_everything  # noqa: E402

LIMIT_S = 120.0
# About a tenth of a second at 1.5 to 2 GHz: long enough for an unordered reader to be wrong.
SLOW_CYCLES = 200_000_000


def nobody_is_dead() -> None:
    """A guard with nothing to report."""


# Each check runs as rank `rank` of `size`, in a process of its own.


def nccl_transport(rank: int, size: int, store: dist.Store) -> None:
    from hora.engine.transport.cuda import CudaTransport

    torch.cuda.set_device(rank % torch.cuda.device_count())
    transport = CudaTransport(store, rank, size, nobody_is_dead, LIMIT_S, make_cpu=lambda: None)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_everything(transport, rank, size, device="cuda", same_order=size < 2)
    assert transport.name == "nccl", transport.name
    transport.close()


def shared_gpu_transport(rank: int, size: int, store: dist.Store) -> None:
    from hora.engine.transport.cuda import CudaTransport
    from hora.engine.transport.distributed import DistributedTransport

    torch.cuda.set_device(0)
    cpu = DistributedTransport(dist.PrefixStore("cpu", store), rank, size, nobody_is_dead, LIMIT_S, address="127.0.0.1")
    transport = CudaTransport(store, rank, size, nobody_is_dead, LIMIT_S, make_cpu=lambda: cpu)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_everything(transport, rank, size, device="cuda")
    assert transport.name == "staged-gloo", transport.name
    transport.close()
    cpu.close()


def operations(rank: int, size: int, store: dist.Store) -> None:
    """The public operations on CUDA tensors."""
    import horovod.torch as hvd

    torch.cuda.set_device(rank % torch.cuda.device_count())
    hvd.init()
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
    hvd.shutdown()


def stream_order(rank: int, size: int, store: dist.Store) -> None:
    """A long kernel before the operation, and the result used at once: nobody synchronises by hand."""
    import horovod.torch as hvd

    torch.cuda.set_device(rank % torch.cuda.device_count())
    hvd.init()
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
    hvd.shutdown()


def training(rank: int, size: int, store: dist.Store) -> None:
    """A few steps of DistributedOptimizer: all ranks end with the same weights."""
    import horovod.torch as hvd

    torch.cuda.set_device(rank % torch.cuda.device_count())
    hvd.init()
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
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    for other in hvd.allgather(weights[None]):
        assert torch.equal(other, weights)
    hvd.shutdown()


def killed_peer(rank: int, size: int, store: dist.Store) -> None:
    """The last rank is killed in the middle; the others get an error that names it, soon."""
    import horovod.torch as hvd

    torch.cuda.set_device(rank % torch.cuda.device_count())
    hvd.init()
    tensor = torch.ones(1 << 20, device="cuda")
    hvd.allreduce_(tensor, name="t")
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start, text = time.monotonic(), ""
    while not text:
        try:
            hvd.allreduce_(tensor, name="t")
        except hvd.HorovodInternalError as error:
            text = str(error)
    assert f"rank {size - 1}" in text, text
    assert time.monotonic() - start < 5
    hvd.shutdown()


def same(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert got.is_cuda
    assert torch.equal(got.cpu(), expected), f"{got} is not {expected}"


def _rank(check: Callable, rank: int, size: int, ports: tuple[int, int], answer: object) -> None:
    os.environ |= {
        "HOROVOD_RANK": str(rank),
        "HOROVOD_SIZE": str(size),
        "HOROVOD_LOCAL_RANK": str(rank),
        "HOROVOD_LOCAL_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(ports[0]),
    }
    try:
        check(rank, size, dist.TCPStore("127.0.0.1", ports[1], is_master=False))
        answer.send("")
    except BaseException:
        answer.send(traceback.format_exc())


def run(check: Callable, size: int, *, lost: tuple[int, ...] = ()) -> bool:
    """Run a check on `size` ranks and say how it went."""
    context = multiprocessing.get_context("spawn")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        free = sock.getsockname()[1]
    start, started = time.monotonic(), []
    for rank in range(size):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(check, rank, size, (free, server.port), there))
        process.start()
        there.close()
        started.append((process, here))
    failures = []
    for rank, (process, answer) in enumerate(started):
        try:
            text = answer.recv() if answer.poll(LIMIT_S) else f"no answer within {LIMIT_S:g} s"
        except EOFError:
            text = "" if rank in lost else "it died"
        if text:
            failures.append(f"rank {rank}: {text}")
        process.join(10 if not text else 1)
        process.kill()
    verdict = "failed" if failures else "ok"
    print(f"{verdict:6} {check.__name__} np={size} ({time.monotonic() - start:.1f} s)", flush=True)
    print("\n".join(failures), end="", flush=True)
    return not failures


def main() -> int:
    if not torch.cuda.is_available():
        print("no CUDA device here")
        return 1
    print(f"torch {torch.__version__}, {torch.cuda.device_count()} x {torch.cuda.get_device_name()}", flush=True)
    good = [run(nccl_transport, 1), run(shared_gpu_transport, 2)]
    if torch.cuda.device_count() > 1:
        good.append(run(nccl_transport, 2))
    for size in (1, 2):
        good += [run(check, size) for check in (operations, stream_order, training)]
    good.append(run(killed_peer, 2, lost=(1,)))
    print(f"{sum(good)} of {len(good)} checks passed")
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
