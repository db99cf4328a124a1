"""Measure commits and recovery of FSDP2 with a ShardedState, beside checkpoints of torch to a local disk.

`python -m benchmarks.fsdp_elastic --ranks 2 --kills 3`

The model is an MLP of four layers of 2048, with AdamW.

1. Commits: ten steps with a commit at the end against ten without, in turns; and `torch.distributed.checkpoint.save` of
   the same state in the same process.
2. Recovery: the last rank is killed (SIGKILL). Reports the time until the others' function is called again, until they
   have the state, and until their next step is done; and `torch.distributed.checkpoint.load` of the same state there.

The ranks run `--worker`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
LIMIT_S = 300.0
NUM_TURNS, STEPS_A_TURN, WIDTH, NUM_LAYERS = 5, 10, 2048, 4


def timed(function: Callable[[], Any]) -> float:
    began = time.perf_counter()
    function()
    return time.perf_counter() - began


def work(folder: Path) -> None:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    import hora.elastic

    torch.set_num_threads(1)
    dist.init_process_group("hora")
    first_rank = dist.get_rank()

    @hora.elastic.run
    def train(state: Any) -> dict[str, Any]:
        called_at = time.time()
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(WIDTH, WIDTH) for _ in range(NUM_LAYERS)))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        is_new_world = state.attach(model=model, optimizer=optimizer)
        attached_at = time.time()
        inputs = torch.rand(32, WIDTH)

        def steps(number: int) -> None:
            for _ in range(number):
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()

        def tensors() -> dict[str, Any]:
            of_model, of_optimizer = get_state_dict(model, optimizer)
            return {"model": of_model, "optimizer": of_optimizer}

        if is_new_world:
            steps(1)
            done_at = time.time()
            killed_at = float((folder / "killed").read_text())
            found = {"called": called_at - killed_at, "attached": attached_at - killed_at, "step": done_at - killed_at}
            return found | {"load": timed(lambda: dcp.load(tensors(), checkpoint_id=folder / "checkpoint"))}
        steps(3)
        state.commit()
        measured: dict[str, list[float]] = {"plain": [], "commit": [], "committed": [], "save": []}
        for _ in range(NUM_TURNS):
            measured["plain"].append(timed(lambda: steps(STEPS_A_TURN)) / STEPS_A_TURN)
            whole = timed(lambda: steps(STEPS_A_TURN))
            measured["commit"].append(timed(state.commit))
            measured["committed"].append((whole + measured["commit"][-1]) / STEPS_A_TURN)
            measured["save"].append(timed(lambda: dcp.save(tensors(), checkpoint_id=folder / "checkpoint")))
        if dist.get_rank() == 0:
            (folder / "measured").write_text(json.dumps(measured))
        state.commit()
        dist.barrier()
        if first_rank == dist.get_world_size() - 1:
            (folder / "killed").write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        steps(10**6)
        raise AssertionError("the last rank was killed")

    found = train(hora.elastic.ShardedState())
    if dist.get_rank() == 0:
        (folder / "recovered").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(num_ranks: int) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Run one job; returns the times of its commits and of its recovery."""
    with tempfile.TemporaryDirectory(prefix="hora-fsdp-") as name:
        job = [str(BIN / "hora"), "run", "-np", str(num_ranks), "--min-np", str(num_ranks - 1)]
        worker = [sys.executable, "-m", "benchmarks.fsdp_elastic", "--worker", name]
        subprocess.run([*job, *worker], check=True, timeout=LIMIT_S)
        folder = Path(name)
        return json.loads((folder / "measured").read_text()), json.loads((folder / "recovered").read_text())


def described(seconds: list[float]) -> str:
    return f"{1000 * statistics.median(seconds):8.1f} ms ({1000 * min(seconds):.1f} to {1000 * max(seconds):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        work(options.worker)
        return
    measured: dict[str, list[float]] = {}
    recovered: dict[str, list[float]] = {}
    for _ in range(options.kills):
        commits, recovery = measure(options.ranks)
        for key, values in commits.items():
            measured.setdefault(key, []).extend(values)
        for key, value in recovery.items():
            recovered.setdefault(key, []).append(value)
    pairs = zip(measured["committed"], measured["plain"], strict=True)
    overheads = [100 * (with_commit / without - 1) for with_commit, without in pairs]
    share = [100 * took / (10 * step) for took, step in zip(measured["commit"], measured["plain"], strict=True)]
    print(f"FSDP2, MLP {NUM_LAYERS}x{WIDTH}, AdamW, {options.ranks} ranks; medians (and the range)")
    print(f"  a step                            {described(measured['plain'])}")
    print(f"  a commit                          {described(measured['commit'])}")
    print(
        f"  its share of ten steps            {statistics.median(share):8.1f} %  ({min(share):.1f} to {max(share):.1f})"
    )
    print(f"  ten steps with one, to ten without {statistics.median(overheads):+7.1f} %")
    print(f"  torch.distributed.checkpoint.save {described(measured['save'])}")
    print(f"after the kill of one rank, {options.kills} times")
    print(f"  the function is called again      {described(recovered['called'])}")
    print(f"  it has the state                  {described(recovered['attached'])}")
    print(f"  the next step is done             {described(recovered['step'])}")
    print(f"  torch.distributed.checkpoint.load {described(recovered['load'])}")


if __name__ == "__main__":
    main()
