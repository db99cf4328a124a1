"""Compare `init_process_group("hora")` with gloo: two groups of the same processes take turns.

    python -m benchmarks.process_group                    all cases, about ten minutes on two cores
    python -m benchmarks.process_group --quick            fewer rounds and sizes
    python -m benchmarks.process_group --cases all_reduce,messages --sizes 4K,1M
    python -m benchmarks.offices --ranks 2 -- python -m benchmarks.process_group --cases all_reduce,DDP

The last command uses two hosts of two ranks, as root: HORA_ENCRYPT=always encrypts Hora's streams, gloo's are plain.

One thread per rank, float32. Bytes are a rank's input: its part of a gather or scatter, its input of a reduce-scatter
divided by the ranks. "times" is gloo's time divided by ours, the median over the rounds, with the smallest and largest
round in brackets. "torch" is the same call on a group that does nothing: what torch's own functions take.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functions
import torch.testing._internal.distributed.fake_pg  # registers a group that does nothing
from torch import nn

from benchmarks.collectives import Contenders, measured, num_bytes, ratios_of
from benchmarks.models import WORKLOADS
from benchmarks.names import some_of

SIZES = "4K,64K,1M,16M,64M"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "messages")
LISTS = ("gather_list", "scatter_list", "gather", "scatter", "reduce", "coalesced", "objects")
FUNCTIONAL = ("functional_gather", "functional_scatter", "operator_gather", "operator_scatter")
STEPS = ("DDP", "FSDP2", "tensor_parallel")
WIDTH, HEADS, TOKENS = 512, 8, 16  # of the transformer block

Group = Any
Call = Callable[[], object]


def collective(case: str, size: int, group: Group) -> Call:
    """Return a function that calls a collective once."""
    ranks, rank, count = dist.get_world_size(), dist.get_rank(), size // 4
    mine, whole = torch.zeros(count), torch.zeros(count * ranks)
    if case == "all_reduce":
        return lambda: dist.all_reduce(mine, group=group)
    if case == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # the new name does not warn
        return lambda: gather(whole, mine, group=group)
    if case == "reduce_scatter":
        reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return lambda: reduce_scatter(mine, whole, group=group)
    if case == "broadcast":
        return lambda: dist.broadcast(mine, 0, group=group)
    if case == "all_to_all":
        other = torch.zeros_like(whole)
        return lambda: dist.all_to_all_single(other, whole, group=group)

    def there_and_back() -> None:
        if rank == 0:
            dist.send(mine, 1, group=group)
            dist.recv(mine, 1, group=group)
        elif rank == 1:
            dist.recv(mine, 0, group=group)
            dist.send(mine, 0, group=group)

    return there_and_back


def of_lists(case: str, size: int, group: Group) -> Call:
    """Return a function that calls a collective of lists, of objects, or of which one rank has the result."""
    ranks, rank, count = dist.get_world_size(), dist.get_rank(), size // 4
    mine, parts = torch.zeros(count), [torch.zeros(count) for _ in range(ranks)]
    at_root = parts if rank == 0 else None
    if case == "gather_list":
        return lambda: dist.all_gather(parts, mine, group=group)
    if case == "scatter_list":
        return lambda: dist.reduce_scatter(mine, parts, group=group)
    if case == "gather":
        return lambda: dist.gather(mine, at_root, 0, group=group)
    if case == "scatter":
        return lambda: dist.scatter(mine, at_root, 0, group=group)
    if case == "reduce":
        return lambda: dist.reduce(mine, 0, group=group)
    if case == "coalesced":
        several = [torch.zeros(count // 2) for _ in range(2)]
        return lambda: dist.all_reduce_coalesced(several, group=group)
    mine_as_bytes = bytes(size)
    return lambda: dist.all_gather_object([None] * ranks, mine_as_bytes, group=group)


def functional(case: str, size: int, group: Group) -> Call:
    """Return a function that calls a functional collective, or the operator behind it."""
    ranks, count, operators = dist.get_world_size(), size // 4, torch.ops._c10d_functional
    mine, whole = torch.zeros(count), torch.zeros(count * ranks)
    if case == "functional_gather":
        return lambda: functions.wait_tensor(functions.all_gather_tensor(mine, 0, group))
    if case == "functional_scatter":
        return lambda: functions.wait_tensor(functions.reduce_scatter_tensor(whole, "sum", 0, group))
    if case == "operator_gather":
        return lambda: operators.wait_tensor(operators.all_gather_into_tensor(mine, ranks, group.group_name))
    return lambda: operators.wait_tensor(operators.reduce_scatter_tensor(whole, "sum", ranks, group.group_name))


class Block(nn.Module):
    """A transformer block whose linear layers tensor parallelism divides."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.before, self.between = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        q, k, v = (
            layer(y).view(len(x), TOKENS, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).reshape(len(x), TOKENS, -1))
        return x + self.down(torch.relu(self.up(self.between(x))))


def tensor_parallel(group: Group) -> Call:
    """Return a forward pass of the block, batch 1."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    block = Block(HEADS // dist.get_world_size())
    divided = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    plan = {**divided, "out": RowwiseParallel(), "down": RowwiseParallel()}
    block = parallelize_module(block, DeviceMesh.from_group(group, "cpu"), plan)
    x = torch.rand(1, TOKENS, WIDTH)

    def forward() -> None:
        with torch.no_grad():
            block(x)

    return forward


def step(model: nn.Module, optimizer: Any, workload: Any) -> Call:
    """Return a function that does one training step on fixed data."""
    x, y = torch.rand(workload.shape), torch.randint(0, workload.classes, workload.shape[:1])

    def train() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return train


def training(case: str, name: str, group: Group) -> Call:
    """Return a training step of DDP or FSDP2 on a group, or of hvd without one."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    workload = WORKLOADS[name]
    model = workload.build()
    if group is None:
        import horovod.torch as hvd

        hvd.init()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        return step(model, hvd.DistributedOptimizer(optimizer, model.named_parameters()), workload)
    if case == "FSDP2":
        mesh = DeviceMesh.from_group(group, "cpu")
        for layer in [one for one in model.modules() if isinstance(one, nn.Linear)]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    else:
        model = nn.parallel.DistributedDataParallel(model, process_group=group)
    return step(model, torch.optim.SGD(model.parameters(), lr=0.01), workload)


MAKERS = {COLLECTIVES: collective, LISTS: of_lists, FUNCTIONAL: functional}


def cases_of(arguments: argparse.Namespace, groups: dict[str, Group]) -> list[tuple[str, Contenders]]:
    """Return the cases: a label and its contenders."""
    found: list[tuple[str, Contenders]] = []
    for case in arguments.cases:
        make = next((make for cases, make in MAKERS.items() if case in cases), None)
        if make is not None:
            torch_alone = {} if case in COLLECTIVES else {"torch": dist.new_group(backend="fake")}
            for size in arguments.sizes.split(","):
                contenders = (groups | torch_alone).items()
                calls = {name: make(case, num_bytes(size), group) for name, group in contenders}
                found.append((f"{case} {size}", calls))
        elif case == "tensor_parallel":
            found.append((case, {name: tensor_parallel(group) for name, group in groups.items()}))
        else:
            for model in WORKLOADS if case == "DDP" else ["MLP 4x2048"]:
                calls = {name: training(case, model, group) for name, group in groups.items()}
                if case == "DDP":
                    calls["hvd"] = training(case, model, None)
                found.append((f"{case} {model}", calls))
    return found


def work(arguments: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("hora")
    groups = {"hora": dist.group.WORLD, "gloo": dist.new_group(backend="gloo")}

    def agreed(seconds: float) -> float:
        took = torch.tensor(seconds)
        dist.broadcast(took, 0, group=groups["gloo"])
        return took.item()

    for label, contenders in cases_of(arguments, groups):
        rows = measured(contenders, lambda: None, arguments.rounds, lambda: dist.barrier(groups["gloo"]), agreed)
        if dist.get_rank() == 0:
            us = {name: 1e6 * statistics.median([t for one in rounds for t in one]) for name, rounds in rows.items()}
            ratios = ratios_of(rows["gloo"], rows["hora"])
            times = f"{statistics.median(ratios):6.2f} [{min(ratios):.2f}-{max(ratios):.2f}]"
            text = "  ".join(f"{name} {value:10.1f} us" for name, value in us.items())
            print(f"{label:24s} {text}  times {times}", flush=True)
    dist.barrier(groups["gloo"])
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-np", type=int, default=2, dest="num_ranks", help="ranks (default: 2)")
    parser.add_argument("--sizes", help=f"bytes, with K or M (default: {SIZES}; with --quick 4K,1M,16M)")
    parser.add_argument(
        "--cases", type=some_of(COLLECTIVES + LISTS + FUNCTIONAL + STEPS), default="all", help="or all (the default)"
    )
    parser.add_argument("--rounds", type=int, help="rounds of each contender (default: 9; with --quick 3)")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    arguments.sizes = arguments.sizes or ("4K,1M,16M" if arguments.quick else SIZES)
    arguments.rounds = arguments.rounds or (3 if arguments.quick else 9)
    if "RANK" in os.environ:
        work(arguments)
        return
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.num_ranks)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, *launcher, "-m", "benchmarks.process_group", *sys.argv[1:]]
    sys.exit(subprocess.run(command, env=environment, check=False).returncode)


if __name__ == "__main__":
    main()
