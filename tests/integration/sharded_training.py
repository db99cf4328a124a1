"""FSDP2 trainings whose ranks die as planned, and the same trainings in one process, which knows who took part in what.

    hora run -np 4 --min-np 1 python sharded_training.py PLAN FOLDER

A plan has a kind (`fsdp`, `hsdp` or `zero`), a number of steps, how many of them there are between two commits, and
deaths: worker, step, and phase: in `forward`, in `backward`, between backward and step (`reduced`), after the step
(`stepped`), in the middle of its part of the commit (`commit`), when it has written its part (`written`), or while the
shards are loaded in the n-th world of the process (`resharding n`). With `grows` it goes on until a newcomer has
trained, too; with `reports` it prints its commits. With `kills` each world of the full size loses a rank, always
another way, until so many have died and newcomers have taken their places.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
import weakref
from pathlib import Path
from typing import Any

import torch
from torch import nn

NUM_INPUTS = 12
RATE = 1e-2
PHASES = ("forward", "backward", "reduced", "stepped", "commit", "written")


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(NUM_INPUTS, 19), nn.Tanh(), nn.Linear(19, 7), nn.Tanh(), nn.Linear(7, 1))


def rows(worker: int, step: int) -> torch.Tensor:
    return torch.randn(8, NUM_INPUTS, generator=torch.Generator().manual_seed(10000 * worker + step))


class Position:
    """Stands for a data loader with a state."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def build(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    model, size = network(), dist.get_world_size()
    if kind == "zero":
        wrapped = DistributedDataParallel(model)
        return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), torch.optim.AdamW, lr=RATE)
    if kind == "hsdp" and size % 2 == 0:
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (size,))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), RATE)


class Deaths:
    """This worker's, by phase and step."""

    def __init__(self, plan: dict[str, Any], worker: int) -> None:
        self._planned = {(one["phase"], one["step"]) for one in plan["deaths"] if one["worker"] == worker}
        self._num_loads = 0
        self.position = Position()

    def choose(self, worker: int, workers: list[int], begin: int, num_kills: int) -> None:
        """Plan the death of a rank of this world, if so many have not died yet. A commit is made every other step."""
        newest = max(workers)
        chosen = random.Random(newest)
        phase, victim = chosen.choice(PHASES), chosen.choice(workers)
        step = begin + chosen.choice((2, 4) if phase in ("commit", "written") else (1, 2, 3, 4))
        is_last = newest >= len(workers) - 1 + num_kills
        self._planned = set() if is_last or victim != worker else {(phase, step)}

    def at(self, phase: str, step: int) -> bool:
        return (phase, step) in self._planned

    def set_up(self) -> None:
        """Place those within the commit and the resharding."""
        from hora.torch.shards import attached, vault

        write, load = vault.CommitSlot.write, attached.Attached.load

        def write_or_die(slot: Any, number: int, tensors: Any, values: bytes) -> None:
            if self.at("commit", self.position.step):
                slot.number = 0
                slot.piece(0).fill_(float("nan"))
                die()
            write(slot, number, tensors, values)
            if self.at("written", self.position.step):
                die()

        def load_or_die(one: Any, tensors: Any, values: Any) -> None:
            self._num_loads += 1
            if self.at(f"resharding {self._num_loads}", 0):
                die()
            load(one, tensors, values)

        vault.CommitSlot.write, attached.Attached.load = write_or_die, load_or_die  # type: ignore[method-assign]


def train(plan: dict[str, Any], folder: Path) -> None:
    """Train as a rank; rank 0 saves the result, and who took part in each step."""
    import torch.distributed as dist

    import hora.elastic
    from hora import engine
    from hora.torch.distributed import live

    torch.set_num_threads(1)
    worker = int(os.environ["HORA_WORKER"])
    dist.init_process_group("hora")
    state = hora.elastic.ShardedState(members={})

    @hora.elastic.run
    def steps(state: Any) -> dict[str, Any]:
        position = deaths.position = Position()
        model, optimizer = build(plan["kind"])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
        state.attach(model=model, optimizer=optimizer, scheduler=scheduler, position=position)
        watch(model)
        workers: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(workers, worker)
        begin, is_complete = position.step, not plan.get("grows") or max(workers) >= plan["grows"]
        if plan.get("kills") and len(workers) == plan["size"]:
            deaths.choose(worker, workers, begin, plan["kills"])
        while position.step < plan["steps"] or not is_complete or position.step < begin + 4:
            if position.step >= plan["steps"]:
                time.sleep(0.05)  # a newcomer is on its way
            step = position.step
            optimizer.zero_grad()
            if deaths.at("forward", step):
                next(model.modules()).register_forward_hook(die)
            loss = model(rows(worker, step)).square().mean()
            if deaths.at("backward", step):
                loss.register_hook(die)
            loss.backward()
            if deaths.at("reduced", step):
                die()
            optimizer.step()
            scheduler.step()
            state.members[step] = workers
            position.step += 1
            if deaths.at("stepped", step):
                die()
            if position.step % plan["every"] == 0:
                state.commit()
                if plan.get("reports"):
                    print(f"committed {position.step} of {len(workers)}", flush=True)
                    time.sleep(0.2)
        return result_of(model, optimizer) | {"members": dict(state.members), "rate": scheduler.get_last_lr()}

    deaths = Deaths(plan, worker)
    deaths.set_up()
    first_hosts = engine.current_runtime().hosts
    alive: list[weakref.ref[nn.Module]] = []

    def watch(model: nn.Module) -> None:
        """Look whether the models of earlier worlds and their groups are gone."""
        assert not [one for one in alive if one() is not None], "the last world's model is still in memory"
        alive[:] = [weakref.ref(model)]
        assert len(live.live_groups()) <= 1 + 2 + 1, live.live_groups()  # the default group, a mesh's, and for copies

    found = steps(state)
    if dist.get_rank() == 0:
        torch.save(found | {"first_hosts": first_hosts}, folder / "result.pt")
    dist.destroy_process_group()


def result_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    from torch.distributed.tensor import DTensor

    def whole(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach()
        return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor.clone()

    moments: list[Any] = []
    if hasattr(optimizer, "consolidate_state_dict"):
        optimizer.consolidate_state_dict(to=0)
        if torch.distributed.get_rank() == 0:
            states = optimizer.state_dict()["state"]
            moments = [states[index][key] for index in sorted(states) for key in ("exp_avg", "exp_avg_sq", "step")]
    else:
        moments = [optimizer.state[p][key] for p in model.parameters() for key in ("exp_avg", "exp_avg_sq", "step")]
    return {"parameters": [whole(p) for p in model.parameters()], "moments": [whole(moment) for moment in moments]}


def mean(kind: str, grads: list[torch.Tensor]) -> torch.Tensor:
    """Return the mean, added up as the ranks of this kind do: rounding depends on the order."""
    if kind == "zero":  # DDP divides first
        return sum_of([grad * (1 / len(grads)) for grad in grads])
    if kind == "hsdp" and len(grads) % 2 == 0:
        half = len(grads) // 2
        return mean("fsdp", [mean("fsdp", grads[:half]), mean("fsdp", grads[half:])])
    return sum_of(grads) / len(grads)


def sum_of(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0]
    for tensor in tensors[1:]:
        total = total + tensor
    return total


def replay(kind: str, steps: int, members: dict[int, list[int]]) -> dict[str, Any]:
    """Return the result of one process that averages over the members of each step."""
    torch.set_num_threads(1)
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), RATE)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.97)
    for step in range(steps):
        of_all = []
        for worker in members[step]:
            optimizer.zero_grad()
            model(rows(worker, step)).square().mean().backward()
            of_all.append([p.grad.clone() for p in model.parameters()])
        for parameter, grads in zip(model.parameters(), zip(*of_all, strict=True), strict=True):
            parameter.grad = mean(kind, [*grads])
        optimizer.step()
        scheduler.step()
    return result_of(model, optimizer) | {"rate": scheduler.get_last_lr()}


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
