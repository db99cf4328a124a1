"""DDP trainings whose ranks die as planned, and the same trainings in one process, which knows who took part in what.

    hora run -np 4 --min-np 2 python protected_training.py PLAN FOLDER

A plan names a recipe and deaths: worker, step, and phase: in `forward`, in the backward pass when the n-th parameter's
gradient is complete (`gradient n`), between backward and step (`reduced`), after the step (`stepped`), or where the
others gather numbers before the forward pass (`gather`), alone or together with its host's agent (`host`).

A plan of `kills` has no deaths: as soon as the world has three ranks, one of them dies, in one phase after the other,
and newcomers take their places. Ranks note in the folder who came in when, and who dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

NUM_INPUTS, NUM_OUTPUTS = 24, 3
_KILL_EVERY = 5  # steps, at least
_PHASES = ("forward", "gradient 0", "gradient 4", "reduced", "stepped", "gather")


class Branches(torch.nn.Module):
    """Uses its second branch for some of the batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(NUM_INPUTS, NUM_OUTPUTS), torch.nn.Linear(NUM_INPUTS, NUM_OUTPUTS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x) + self.second(x) if x[0, 0] > 0 else self.first(x)


class Recipe:
    """How a plan trains. `passes`: backward passes in a step."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.passes = 3 if name in ("accumulation", "accumulation without no_sync") else 1
        self.options: dict[str, Any] = {"bucket_cap_mb": 0.004}
        if name == "unused parameters":
            self.options["find_unused_parameters"] = True
        if name in ("views", "accumulation"):
            self.options["gradient_as_bucket_view"] = True
        if name == "compiled":  # whose buckets begin with one of a MB
            self.options = {}
        if name == "static graph":
            self.options["static_graph"] = True

    def parts(self) -> list[list[int]]:
        """Return the passes of a step, by the reductions that they take part in."""
        every = range(self.passes)
        return [[index] for index in every] if self.name == "accumulation without no_sync" else [[*every]]

    def networks(self) -> list[torch.nn.Module]:
        torch.manual_seed(1)
        if self.name == "unused parameters":
            return [Branches()]
        norm = [torch.nn.BatchNorm1d(40)] if self.name == "plain" else []
        parts = [torch.nn.Linear(NUM_INPUTS, 40), *norm, torch.nn.Tanh(), torch.nn.Linear(40, 40), torch.nn.Tanh()]
        main = torch.nn.Sequential(*parts, torch.nn.Linear(40, NUM_OUTPUTS))
        return [main, torch.nn.Linear(NUM_OUTPUTS, 5)] if self.name == "two models" else [main]

    def optimizers(self, networks: list[torch.nn.Module]) -> list[torch.optim.Optimizer]:
        first = torch.optim.AdamW(networks[0].parameters(), 1e-2)
        return [first, *(torch.optim.SGD(net.parameters(), 0.1, momentum=0.9) for net in networks[1:])]

    def scaler(self) -> Any:
        return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=4, enabled=self.name == "scaler")

    def rows(self, worker: int, step: int, index: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(10000 * worker + 10 * step + index)
        rows = torch.randn(8, NUM_INPUTS, generator=generator)
        if self.name == "scaler" and step % 5 == 2 and worker % 2 == 0:
            rows[0, 0] = 1e38  # no finite gradient: all ranks leave the step out
        return rows

    def losses(self, networks: list[Any], rows: torch.Tensor) -> Iterator[torch.Tensor]:
        """Yield the loss of each model, one after the other's step."""
        yield networks[0](rows).square().mean()
        for other in networks[1:]:
            with torch.no_grad():
                hidden = networks[0](rows)
            yield (other(hidden) - 1).square().mean()


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def finish_step(recipe: Recipe, scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    if recipe.name == "plain":
        torch.nn.utils.clip_grad_norm_(parameters_of(optimizer), 0.05)
    scaler.step(optimizer)


def result_of(networks: list[torch.nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[str, Any]:
    return {
        "parameters": [p.detach().clone() for net in networks for p in net.parameters()],
        "optimizers": [
            value for o in optimizers for item in o.state_dict()["state"].values() for value in item.values()
        ],
    }


class Kills:
    """The deaths of a plan of kills, in files that all ranks read."""

    def __init__(self, num_kills: int, folder: Path, worker: int) -> None:
        self._num_kills, self._folder, self._worker = num_kills, folder, worker
        self._first_step = -1

    def enter(self, step: int) -> None:
        self._first_step = step
        with (self._folder / "entered").open("a") as file:
            file.write(json.dumps({"worker": self._worker, "step": step}) + "\n")

    def phase(self, step: int, rank: int, size: int) -> str:
        """Return in which phase of this step this rank dies, after it has told the others; empty if it does not."""
        deaths = notes(self._folder / "deaths")
        if len(deaths) == self._num_kills or size < 3:
            time.sleep(0.8 if len(deaths) < self._num_kills else 0.0)  # until a newcomer is there
            return ""
        last = deaths[-1]["step"] if deaths else 0
        if rank != len(deaths) % size or step < max(last, self._first_step) + _KILL_EVERY:
            return ""
        phase = _PHASES[len(deaths) % len(_PHASES)]
        with (self._folder / "deaths").open("a") as file:
            file.write(json.dumps({"worker": self._worker, "step": step, "phase": phase}) + "\n")
        return phase

    def strikes(self, step: int) -> bool:
        """Return whether a rank dies in this step, in which all ranks have come to the end of backward."""
        return any(death["step"] == step for death in notes(self._folder / "deaths"))


def notes(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def keep_groups_of_newcomers() -> None:
    """Let groups through which newcomers got their state stay on some ranks, as a cycle of references does."""
    from hora.torch.distributed.endpoint import Endpoint

    kept, among = [], Endpoint.among

    def keep(group: Any, ranks: Any) -> Any:
        made = among(group, ranks)
        if int(os.environ["HORA_WORKER"]) % 2:
            kept.append(made)
        return made

    Endpoint.among = keep  # type: ignore[method-assign]


def train(plan: dict[str, Any], folder: Path) -> None:
    """Train as a rank; saves this rank's result, and its gradients of the steps in which others die."""
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hora.elastic

    torch.set_num_threads(1)
    recipe, worker = Recipe(plan["recipe"]), int(os.environ["HORA_WORKER"])
    dist.init_process_group("hora")
    networks = recipe.networks()
    models = [DistributedDataParallel(net, **recipe.options) for net in networks]
    optimizers, scaler = recipe.optimizers(networks), recipe.scaler()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.97)
    if not plan.get("automatic"):  # HORA_ELASTIC_PER_STEP=1 protects the loop
        hora.elastic.protect(models, optimizers, scheduler=[scheduler, scaler])
    called: list[Any] = [torch.compile(model) for model in models] if recipe.name == "compiled" else models
    deaths = {int(death["step"]): death["phase"] for death in plan["deaths"] if death["worker"] == worker}
    kept: dict[str, list[Any]] = {}
    kills = Kills(plan["kills"], folder, worker) if "kills" in plan else None
    if kills is not None:
        keep_groups_of_newcomers()
    first_step = scheduler.last_epoch  # a newcomer's is that of the others
    if kills is not None:
        kills.enter(first_step)

    def die(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    for step in range(first_step, plan["steps"]):
        phase = deaths.get(step, "")
        if kills is not None:
            phase = kills.phase(step, dist.get_rank(), dist.get_world_size())
        if phase == "forward":
            next(networks[0].children()).register_forward_hook(die)
        if phase.startswith("gradient"):
            [*networks[0].parameters()][int(phase.split()[1])].register_post_accumulate_grad_hook(die)
        if phase == "host":
            os.kill(os.getppid(), signal.SIGKILL)  # its agent
        if phase in ("gather", "host"):
            die()
        if recipe.name == "views":
            gather(step)
        losses = [recipe.losses(called, recipe.rows(worker, step, index)) for index in range(recipe.passes)]
        for number, optimizer in enumerate(optimizers):
            optimizer.zero_grad()
            for index in range(recipe.passes):
                quiet = recipe.name == "accumulation" and index < recipe.passes - 1
                with models[0].no_sync() if quiet else contextlib.nullcontext():
                    scaler.scale(next(losses[index])).backward()
            if kills.strikes(step) if kills else any(death["step"] == step for death in plan["deaths"]):
                kept.setdefault(str(step), []).append(
                    [None if p.grad is None else p.grad.clone() for p in parameters_of(optimizer)]
                )
            if number == 0 and phase == "reduced":
                die()
            finish_step(recipe, scaler, optimizer)
        scaler.update()
        scheduler.step()
        if recipe.name == "plain":
            seen = torch.ones(1)
            dist.all_reduce(seen)  # as programs do for a metric
            assert seen.item() == dist.get_world_size()
        if kills is not None and kept:
            torch.save(kept.pop(str(step)), folder / f"gradients {step} {worker}.part")
            (folder / f"gradients {step} {worker}.part").rename(folder / f"gradients {step} {worker}.pt")
        if phase == "stepped":
            die()
    found = result_of(networks, optimizers) | {"grads": kept, "size": dist.get_world_size()}
    torch.save(found, folder / f"{worker}.pt")
    dist.destroy_process_group()


def gather(step: int) -> None:
    """Gather a number of every rank: the places of ranks that die meanwhile have zeros."""
    import torch.distributed as dist

    before = torch.full((dist.get_world_size(),), -1.0)
    if step % 2:
        dist.all_gather_into_tensor(before, torch.ones(1))
    else:
        dist.all_gather(list(before.view(-1, 1).unbind()), torch.ones(1))
    now = dist.get_world_size()
    assert before.tolist() == [1.0] * now + [0.0] * (len(before) - now), before


def members_of(plan: dict[str, Any], num_workers: int) -> list[tuple[list[int], list[int]]]:
    """Return the members of each step of a plan with deaths, in the order of their ranks: all, and those left."""
    first, found = [*range(num_workers)], []
    for step in range(plan["steps"]):
        members = [one for one in first if all(d["worker"] != one or d["step"] >= step for d in plan["deaths"])]
        dying = [death["worker"] for death in plan["deaths"] if death["step"] == step]
        found.append((members, [one for one in members if one not in dying]))
    return found


def noted_members(plan: dict[str, Any], folder: Path) -> list[tuple[list[int], list[int]]]:
    """Return the same of a plan of kills. Newcomers have the last ranks."""
    entered = sorted(notes(folder / "entered"), key=lambda note: (note["step"], note["worker"]))
    ends = {death["worker"]: death["step"] for death in notes(folder / "deaths")}
    found = []
    for step in range(plan["steps"]):
        there = [one["worker"] for one in entered if one["step"] <= step]
        members = [worker for worker in there if ends.get(worker, step) >= step]
        found.append((members, [worker for worker in members if ends.get(worker) != step]))
    return found


def replay(
    plan: dict[str, Any], worlds: list[tuple[list[int], list[int]]], grads: Callable[[int], Any]
) -> dict[str, Any]:
    """Return the result of one process that averages over the members of each step.

    A bucket of the step in which a member died counts it if a survivor had the bucket's mean: `grads` are those that a
    survivor used, each of which must be the mean over the members before the death, or after it.
    """
    torch.set_num_threads(1)  # as in the ranks
    recipe = Recipe(plan["recipe"])
    networks = recipe.networks()
    optimizers, scaler = recipe.optimizers(networks), recipe.scaler()
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.97)
    for step, (members, left) in enumerate(worlds):
        for number, optimizer in enumerate(optimizers):
            passes = [
                {
                    worker: gradients_of(recipe, networks, optimizers, number, scaler, worker, step, part)
                    for worker in members
                }
                for part in recipe.parts()
            ]
            for index, p in enumerate(parameters_of(optimizer)):
                options: list[torch.Tensor | None] = [None]
                for own in passes:
                    columns = [[own[worker][index] for worker in group] for group in (members, left)]
                    options = [mean_of(column, before) for before in options for column in columns]
                used = options[0] if left == members else grads(step)[number][index]
                assert any(_same(option, used) for option in options), f"step {step}: gradient {index} is no mean"
                p.grad = None if used is None else used.clone()
            finish_step(recipe, scaler, optimizer)
        scaler.update()
        scheduler.step()
    return result_of(networks, optimizers)


def _same(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return torch.equal(first.nan_to_num(1.5), second.nan_to_num(1.5))


def gradients_of(
    recipe: Recipe,
    networks: list[torch.nn.Module],
    optimizers: list[torch.optim.Optimizer],
    number: int,
    scaler: Any,
    worker: int,
    step: int,
    part: list[int],
) -> list[torch.Tensor | None]:
    """Return a worker's own gradients for an optimizer, summed over some passes of a step."""
    losses = [recipe.losses(networks, recipe.rows(worker, step, index)) for index in part]
    optimizers[number].zero_grad()
    for loss in losses:
        for _ in range(number):
            next(loss)
        scaler.scale(next(loss)).backward()
    return [None if p.grad is None else p.grad.clone() for p in parameters_of(optimizers[number])]


def mean_of(tensors: list[torch.Tensor | None], before: torch.Tensor | None) -> torch.Tensor | None:
    """Return the mean in the arithmetic of the engine: a sum in the order of ranks, which is then divided.

    Each rank adds its gradient to what it has from `before`. None: no rank has one.
    """
    like = next((tensor for tensor in (before, *tensors) if tensor is not None), None)
    if like is None:
        return None
    before = torch.zeros_like(like) if before is None else before
    first, *others = [before if tensor is None else before + tensor for tensor in tensors]
    total = first.clone()
    for tensor in others:
        total += tensor
    return total / len(tensors)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]), Path(sys.argv[2]))
