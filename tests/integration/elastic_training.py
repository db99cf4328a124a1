"""Training script with planned faults: `elastic_job` runs it on every rank of an elastic job.

Every step gathers the samples of all ranks into the state, so the state itself records what was committed. A plan
defines which rank fails, when and how. This module runs on the workers and imports torch.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import horovod.torch as hvd
from hora import engine


def train(plan: dict[str, Any]) -> dict[str, Any]:
    """Train as planned; return the final state of this rank."""
    if "mutant" in plan:
        sys.path.append(str(Path(__file__).parents[1]))
        from mutants import MUTANTS

        MUTANTS[plan["mutant"]]().start()
    hvd.init()
    net = network(seed=hvd.rank())  # sync makes the ranks equal
    optimizer = make_optimizer(net, plan.get("sharded", False), plan.get("diloco", False))
    sampler = hvd.elastic.ElasticSampler(list(range(plan["samples"])), shuffle=True, seed=5)
    per_step = {"per_step": True, "losses": [], "worlds": []} if plan.get("per_step") else {}
    state = hvd.elastic.TorchState(
        model=net,
        optimizer=optimizer,
        sampler=sampler,
        epoch=0,
        batch=0,
        steps=0,
        seen=[],
        sizes=[],
        starts=[],
        **per_step,
    )
    if plan.get("durable"):
        state.persist(plan["durable"], keep=3)
    start = f"{os.environ['HOROVOD_HOSTNAME']}/{os.environ['HORA_WORKER']}"
    if engine.is_newcomer():
        hvd.broadcast_parameters(net.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        alone = hvd.broadcast_object(hvd.allgather_object(hvd.allreduce(torch.tensor(2.0), op=hvd.Sum).item()))
        note(plan, f"prepares rank {hvd.rank()} of {hvd.size()} device {hvd.local_rank()} alone {alone}")
        wait_for_steps(plan, plan.get("preparation_steps", 0))
    _loop(state, plan, start)
    outer = []
    if plan.get("diloco"):
        optimizer.exchange()
        kept = optimizer.state_dict()["outer"]
        tensors = [*net.parameters(), *kept["anchors"]]
        tensors += [item["momentum_buffer"] for item in kept["optimizer"]["state"].values()]
        outer = hvd.allgather_object([kept["num_steps"], *(tensor.double().sum().item() for tensor in tensors)])
    momentum = [
        value.double().sum().item() for item in optimizer.state_dict()["state"].values() for value in item.values()
    ]
    return {
        "rank": hvd.rank(),
        "size": hvd.size(),
        "worker": int(os.environ["HORA_WORKER"]),
        "pid": os.getpid(),
        "weights": torch.cat([p.detach().flatten() for p in net.parameters()]).tolist(),
        "momentum": momentum,
        "outer": outer,
        "epoch": state.epoch,
        "steps": state.steps,
        "seen": state.seen,
        "sizes": state.sizes,
        "starts": state.starts,
        **({"losses": state.losses, "worlds": state.worlds} if per_step else {}),
    }


@hvd.elastic.run
def _loop(state: Any, plan: dict[str, Any], start: str) -> None:
    world = engine.current_runtime().world.generation
    note(plan, f"enters rank {hvd.rank()} of {hvd.size()} at step {state.steps} in world {world} as {start}")
    starts = hvd.allgather_object(start)
    if state.per_step and hvd.rank() == 0:
        hosts = [its.rpartition("/")[0] for its in starts]
        keep(Path(plan["folder"]) / f"world.{world}.pt", state.model, state.optimizer, hosts)
    while state.epoch < plan["epochs"]:
        indices = iter(list(state.sampler))
        while mine := [i for _, i in zip(range(plan["batch"]), indices, strict=False)]:
            misfortune(plan, state, "step")
            step(state, mine)
            state.sampler.record_batch(state.batch, len(mine))
            state.batch += 1
            state.steps += 1
            state.sizes.append(hvd.size())
            state.starts = starts
            misfortune(plan, state, "commit")
            if commits(plan, state.steps):
                state.commit()
                if hvd.rank() == 0:
                    progress(plan, state)
            if hvd.broadcast_object((Path(plan["folder"]) / "stop").exists(), name="stop"):
                return
            if state.steps == plan.get("steps"):
                return
        state.epoch += 1
        state.batch = 0
        state.sampler.set_epoch(state.epoch)
        state.commit()
        if hvd.broadcast_object((Path(plan["folder"]) / "last_epoch").exists(), name="last epoch"):
            return


def commits(plan: dict[str, Any], step: int) -> bool:
    """Return whether this step ends with a commit: each does, or with a seed in the plan about every fourth."""
    seed = plan.get("commits")
    return seed is None or random.Random(f"{seed} {step}").random() < 0.25


def network(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))


def make_optimizer(net: torch.nn.Module, sharded: bool, diloco: bool = False) -> Any:
    inner = torch.optim.Adam(net.parameters(), lr=0.01)
    if diloco:
        return hvd.DiLoCo(inner, net.named_parameters(), every=4, fragments=2, overlap=1)
    return hvd.DistributedOptimizer(inner, net.named_parameters(), **({"sharded": True} if sharded else {}))


def loss(net: torch.nn.Module, samples: list[int]) -> torch.Tensor:
    inputs = torch.tensor(samples, dtype=torch.float32).unsqueeze(1) / 10.0
    return net(inputs.expand(-1, 3)).square().mean()


def replay(seen: list[tuple[int, list[int]]], sizes: list[int]) -> list[float]:
    """Return the weights after a single process takes the same steps undisturbed."""
    net = network(seed=0)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    for (_, samples), size in zip(seen, sizes, strict=True):
        optimizer.zero_grad()
        share = len(samples) // size
        parts = [samples[rank * share : (rank + 1) * share] for rank in range(size)]
        (sum(loss(net, part) for part in parts) / size).backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).tolist()


def step(state: Any, mine: list[int]) -> None:
    gathered = hvd.allgather(torch.tensor(mine), name="samples").tolist()
    losses = training_step(state.model, state.optimizer, mine, gather=state.per_step)
    state.seen.append((state.epoch, gathered))
    if state.per_step:
        state.losses.append(losses)
        state.worlds.append(engine.current_runtime().world.generation)


def training_step(net: torch.nn.Module, optimizer: Any, mine: list[int], *, gather: bool = True) -> list[float]:
    """Train one step with these samples; return the losses of all ranks if `gather`."""
    optimizer.zero_grad()
    value = loss(net, mine)
    losses = hvd.allgather(value.detach().reshape(1), name="losses").tolist() if gather else []
    value.backward()
    optimizer.step()
    return losses


def keep(file: Path, net: torch.nn.Module, optimizer: Any, hosts: list[str]) -> None:
    """Save the training state and the host of every rank."""
    partial = file.with_suffix(f".{os.getpid()}")
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "hosts": hosts}, partial)
    partial.replace(file)


def train_again(folder: str, worlds: dict[int, list[list[int]]], sharded: bool) -> dict[int, list[list[float]]]:
    """Replay the steps of some worlds without failures, each from its initial state; save the final state of each world
    and return the losses. Call it on as many ranks of as many hosts as these worlds had.
    """
    hvd.init()
    losses = {}
    for world, steps in worlds.items():
        net = network(seed=0)
        optimizer = make_optimizer(net, sharded)
        began = torch.load(Path(folder) / f"world.{world}.pt")
        net.load_state_dict(began["net"])
        optimizer.load_state_dict(began["optimizer"])
        losses[world] = []
        for samples in steps:
            share = len(samples) // hvd.size()
            mine = samples[hvd.rank() * share : (hvd.rank() + 1) * share]
            losses[world].append(training_step(net, optimizer, mine))
        if hvd.rank() == 0:
            keep(Path(folder) / f"again.{world}.pt", net, optimizer, began["hosts"])
    return losses


def misfortune(plan: dict[str, Any], state: Any, when: str) -> None:
    """Inject the faults that the plan has for this rank at this moment, each once."""
    for number, fault in enumerate(plan.get("faults", [])):
        if (fault["rank"], fault["step"], fault.get("when", "step")) != (hvd.rank(), state.steps, when):
            continue
        try:
            (Path(plan["folder"]) / f"fault.{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        fail(fault["how"], when)


def fail(how: str, when: str) -> None:
    if how == "raise":
        threading.Thread(target=time.sleep, args=(300,)).start()  # keeps the process alive
        raise RuntimeError("as planned")
    if how == "exit":
        os._exit(3)
    if how == "cut off":
        cut_off(5.0)
        return
    os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)


def cut_off(seconds: float) -> None:
    """Disconnect this rank from the launcher, but not from the other ranks, for this long."""
    client, until = engine.control_connection(), time.monotonic() + seconds
    assert client is not None
    reopen = client._reopen

    def in_vain(limit_s: float) -> Any:
        if time.monotonic() < until:
            raise ConnectionError("the network is unreachable")
        return reopen(limit_s)

    client._reopen = in_vain
    client._connection.shutdown()


def progress(plan: dict[str, Any], state: Any) -> None:
    """Publish the progress for the test, and pause if the plan asks for it."""
    (Path(plan["folder"]) / "progress").write_text(f"{state.steps} {hvd.size()}")
    note(plan, f"committed step {state.steps} on {hvd.size()}")
    time.sleep(plan.get("pause_s", 0.0))


def wait_for_steps(plan: dict[str, Any], number: int) -> None:
    """Wait until the other ranks have committed `number` further steps."""
    file, limit = Path(plan["folder"]) / "progress", time.monotonic() + 60.0
    wanted = number and int(file.read_text().split()[0]) + number
    while wanted and int((file.read_text() or "0").split()[0]) < wanted:
        assert time.monotonic() < limit, "the others do not train while a newcomer prepares itself"
        time.sleep(0.01)


def note(plan: dict[str, Any], text: str) -> None:
    with open(Path(plan["folder"]) / "notes", "a") as file:
        file.write(f"{time.time():.3f} {os.getpid()} {text}\n")
