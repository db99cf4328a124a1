"""`hora.elastic.protect`: DDP trainings whose ranks are killed complete every step, to the last digit."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from job_process import CommandProcess, run_command
from protected_training import members_of, noted_members, notes, replay
from test_elastic_netns import Machines, machines  # noqa: F401 - a fixture

import horovod

_SCRIPT = Path(__file__).with_name("protected_training.py")


def death(worker: int, step: int, phase: str) -> dict[str, Any]:
    return {"worker": worker, "step": step, "phase": phase}


def run_and_replay(
    folder: Path,
    plan: dict[str, Any],
    num_proc: int,
    *options: str,
    env: Mapping[str, str] | None = None,
    prefix: tuple[str, ...] = (),
) -> str:
    """Run a plan, and compare every survivor's parameters and optimizer state with one process's; return the output."""
    command = [sys.executable, str(_SCRIPT), json.dumps(plan), str(folder)]
    size = ["-np", str(num_proc), "--min-np", "1"]
    status, output, errors = run_command("hora", "run", *size, *options, *command, env=env, prefix=prefix)
    assert status == 0, output + errors
    survivors = {worker for worker in range(num_proc) if worker not in [one["worker"] for one in plan["deaths"]]}
    found = {worker: torch.load(folder / f"{worker}.pt") for worker in survivors}
    grads = found[min(survivors)]["grads"]
    expected = replay(plan, members_of(plan, num_proc), lambda step: grads[str(step)])
    for worker, result in found.items():
        assert result["size"] == len(survivors)
        assert_equal(worker, result, expected)
    return output + errors


def assert_equal(worker: int, result: dict[str, Any], expected: dict[str, Any]) -> None:
    for what in ("parameters", "optimizers"):
        for mine, its in zip(result[what], expected[what], strict=True):
            assert torch.equal(torch.as_tensor(mine), torch.as_tensor(its)), f"{what} of worker {worker}"


def test_ranks_that_die_in_every_phase_cost_no_step(tmp_path: Path):
    deaths = [death(3, 2, "forward"), death(1, 5, "gradient 4"), death(0, 8, "reduced"), death(2, 11, "stepped")]
    run_and_replay(tmp_path, {"recipe": "plain", "steps": 15, "deaths": deaths}, 5)


_TWO_DEATHS = [death(1, 3, "gradient 0"), death(0, 5, "reduced")]


@pytest.mark.parametrize(
    "recipe",
    [
        "scaler",
        "two models",
        pytest.param("accumulation", marks=pytest.mark.slow),
        pytest.param("accumulation without no_sync", marks=pytest.mark.slow),
        pytest.param("unused parameters", marks=pytest.mark.slow),
        pytest.param("static graph", marks=pytest.mark.slow),
        pytest.param("views", marks=pytest.mark.slow),
        pytest.param("compiled", marks=pytest.mark.slow),
    ],
)
def test_trainings_of_every_kind_lose_no_step(tmp_path: Path, recipe: str):
    run_and_replay(tmp_path, {"recipe": recipe, "steps": 8, "deaths": _TWO_DEATHS}, 4)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("recipe", ["plain", "accumulation", "scaler", "two models"])
def test_fifty_kills_in_a_thousand_steps_with_newcomers_lose_no_step(tmp_path: Path, recipe: str):
    num_kills = 50
    plan = {"recipe": recipe, "steps": 20 * num_kills, "deaths": [], "kills": num_kills}
    command = [sys.executable, str(_SCRIPT), json.dumps(plan), str(tmp_path)]
    options = ("-np", "4", "--min-np", "1", "--spares", "2", "--blacklist-cooldown-range", "1", "1")
    with CommandProcess("hora", "run", *options, *command) as job:
        status, output, errors = job.finish(1500)
    assert status == 0, output + errors
    worlds = noted_members(plan, tmp_path)
    assert len(notes(tmp_path / "deaths")) == num_kills

    def gradients(step: int) -> Any:
        return torch.load(next(tmp_path.glob(f"gradients {step} *.pt")))

    expected = replay(plan, worlds, gradients)
    members = worlds[-1][1]
    assert len(members) > 1
    for worker in members:
        assert_equal(worker, torch.load(tmp_path / f"{worker}.pt"), expected)


def test_two_ranks_that_die_at_once_and_one_that_is_left_alone(tmp_path: Path):
    deaths = [death(0, 4, "gradient 2"), death(2, 4, "gather"), death(1, 7, "gather")]
    run_and_replay(tmp_path, {"recipe": "views", "steps": 9, "deaths": deaths}, 4)


@pytest.mark.slow
@pytest.mark.netns
@pytest.mark.parametrize("phase", ["gradient 1", "reduced", "host"])
def test_a_rank_or_all_of_a_host_dies_on_another_host(
    machines: Machines,  # noqa: F811
    tmp_path: Path,
    phase: str,
):
    plan = {"recipe": "views", "steps": 9, "deaths": [death(2, 4, phase)]}
    options = ["-H", "10.78.0.1:2,there:1", "--network-interfaces", "cable", "--start-timeout", "60"]
    prefix = ("ip", "netns", "exec", machines.here)
    run_and_replay(tmp_path, plan, 3, *options, env={"HORA_SSH": machines.server.command}, prefix=prefix)


def test_a_variable_protects_a_loop_that_is_not_changed(tmp_path: Path):
    plan = {"recipe": "two models", "steps": 8, "deaths": _TWO_DEATHS, "automatic": True}
    run_and_replay(tmp_path, plan, 4, env={"HORA_ELASTIC_PER_STEP": "1"})


UNCHANGED = """
import os, signal, sys, time
import torch
import torch.distributed as dist
dist.init_process_group("hora")
worker, told = int(os.environ["HORA_WORKER"]), sys.argv[1]
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for step in range(10**6):
    optimizer.zero_grad()
    try:
        model(torch.ones(1, 2)).sum().backward()
    except RuntimeError as error:
        with open(told + ".part", "w") as file:
            file.write(str(error))
        os.replace(told + ".part", told)
        raise
    optimizer.step()
    if worker == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    over = torch.tensor(os.path.exists(told))
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    if over:
        break
"""


def test_a_newcomer_cannot_find_its_place_in_a_loop_that_is_not_changed(tmp_path: Path):
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(UNCHANGED)
    command = ["-np", "3", "--min-np", "2", "--spares", "1", sys.executable, str(script), str(told)]
    status, output, errors = run_command("hora", "run", *command, env={"HORA_ELASTIC_PER_STEP": "1"})
    assert status == 0, output + errors
    assert "a newcomer cannot find the place that the other ranks have reached" in told.read_text()


OF_GLOO = """
import sys
import torch
import torch.distributed as dist
import hora.elastic
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    if sys.argv[1] == "protect":
        hora.elastic.protect(model, optimizer)
    model(torch.ones(1, 2)).sum().backward()
except ValueError as error:
    print(f"rank {dist.get_rank()}: {error}")
dist.destroy_process_group()
"""


@pytest.mark.parametrize("how", ["protect", "HORA_ELASTIC_PER_STEP"])
def test_a_model_of_another_backend_is_refused_on_every_rank(tmp_path: Path, how: str):
    script = tmp_path / "train.py"
    script.write_text(OF_GLOO)
    env = {} if how == "protect" else {how: "1"}
    command = ["-np", "2", "--min-np", "1", sys.executable, str(script), how]
    status, output, errors = run_command("hora", "run", *command, env=env)
    assert status == 0, output + errors
    for rank in (0, 1):
        (line,) = [line for line in output.splitlines() if f"rank {rank}: " in line]
        assert how in line
        assert 'use init_process_group("hora")' in line


OTHER_NEWCOMER = """
import os, signal, sys
from pathlib import Path
import torch
import torch.distributed as dist
import hora.elastic
dist.init_process_group("hora")
worker, told = int(os.environ["HORA_WORKER"]), Path(sys.argv[1])
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1 if worker < 3 else 5))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
try:
    hora.elastic.protect(model, optimizer)
except ValueError as error:
    told.with_suffix(".part").write_text(str(error))
    told.with_suffix(".part").rename(told)
    raise
for step in range(10**6):
    optimizer.zero_grad()
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    if worker == 1 and step == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    over = torch.tensor(told.exists())
    dist.all_reduce(over, op=dist.ReduceOp.MAX)
    if over:
        break
dist.destroy_process_group()
"""


def test_a_newcomer_with_another_model_is_refused_and_the_others_go_on(tmp_path: Path):
    script, told = tmp_path / "train.py", tmp_path / "told"
    script.write_text(OTHER_NEWCOMER)
    command = ["-np", "3", "--min-np", "2", "--spares", "1", sys.executable, str(script), str(told)]
    status, output, errors = run_command("hora", "run", *command)
    assert status == 0, output + errors
    for text in (told.read_text(), output + errors):
        assert "rank(s) [2] have other models or optimizers than rank 0" in text
        assert "tensors with 15 numbers" in text
        assert "tensors with 3 numbers" in text
        assert "Build the same model on every rank" in text


def test_without_an_elastic_launcher_nothing_happens():
    import hora.elastic

    hora.elastic.protect(torch.nn.Linear(2, 1))


def test_a_job_of_a_fixed_size_is_told_how_to_start():
    def train() -> str:
        import torch
        import torch.distributed as dist

        import hora.elastic

        dist.init_process_group("hora")
        try:
            hora.elastic.protect(torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1)))
        except ValueError as error:
            return str(error)
        return ""

    for message in horovod.run(train, num_proc=2):
        assert "start it with --min-np, such as: hora run -np 2 --min-np 1 python train.py" in message


def test_what_cannot_be_protected_is_refused_on_every_rank():
    def train() -> list[str]:
        import torch
        import torch.distributed as dist
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
        from torch.distributed.optim import ZeroRedundancyOptimizer
        from torch.nn.parallel import DistributedDataParallel

        import hora.elastic

        dist.init_process_group("hora")
        net, other = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
        model, plain = DistributedDataParallel(net), torch.optim.SGD(net.parameters(), 0.1)
        compressed, sparse = (
            DistributedDataParallel(torch.nn.Linear(2, 1)),
            DistributedDataParallel(torch.nn.Embedding(4, 2, sparse=True)),
        )
        compressed.register_comm_hook(None, fp16_compress_hook)
        part = dist.new_group([0])
        calls = [
            (model, None),
            (net, plain),
            (model, ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)),
            (model, torch.optim.SGD(other.parameters(), 0.1)),
            (compressed, torch.optim.SGD(compressed.parameters(), 0.1)),
            (sparse, torch.optim.SGD(sparse.parameters(), 0.1)),
        ]
        if dist.get_rank() == 0:
            small = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=part)
            calls.append((small, torch.optim.SGD(small.parameters(), 0.1)))
        found = []
        for one, optimizer in calls:
            try:
                hora.elastic.protect(one, optimizer)
            except ValueError as error:
                found.append(str(error))
        try:
            hora.elastic.protect(model, plain, sampler=torch.utils.data.SequentialSampler([1]))
        except ValueError as error:
            found.insert(0, str(error))
        rate = torch.optim.Adam if dist.get_rank() == 1 else torch.optim.SGD
        try:
            hora.elastic.protect(model, rate(net.parameters(), 0.1))
        except ValueError as error:
            found.insert(0, str(error))
        dist.barrier()  # a rank that leaves at once would end the others' world
        dist.destroy_process_group()
        return found

    results = horovod.run(train, num_proc=2, min_num_proc=2)
    for found in results:
        differs, sampler, missing, bare, sharded, foreign_parameters, hook, sparse, *part = found
        assert "rank(s) [1] have other models or optimizers than rank 0" in differs
        assert "hora.elastic.ElasticSampler" in sampler
        assert "needs the optimizer, too" in missing
        assert "DistributedDataParallel, but this one is a Linear: wrap it" in bare
        assert "use a plain optimizer" in sharded
        assert "has no parameter of the given models" in foreign_parameters
        assert "leave register_comm_hook out" in hook
        assert "use Embedding(sparse=False)" in sparse
        assert all("give it the default group" in text for text in part)
    assert [len(found) for found in results] == [9, 8]


@pytest.mark.parametrize("returns", [["--blacklist-cooldown-range", "1", "2"], ["--spares", "1"]])
def test_a_newcomer_takes_the_place_of_a_dead_rank_between_two_steps(tmp_path: Path, returns: list[str]):
    command = [sys.executable, str(_SCRIPT.with_name("growing_training.py")), str(tmp_path)]
    status, output, errors = run_command("hora", "run", "-np", "3", "--min-np", "2", *returns, *command)
    assert status == 0, output + errors
    first, second, newcomer = (torch.load(tmp_path / f"{worker}.pt") for worker in (0, 2, 3))
    assert first["steps"] == second["steps"]
    assert newcomer["steps"] == first["steps"][-len(newcomer["steps"]) :], "it came in between two steps of the others"
    assert {size for _, size in first["steps"]} == {2, 3}
    assert {size for _, size in newcomer["steps"]} == {3}
    for other in (second, newcomer):
        assert other["rate"] == first["rate"]
        for what in ("parameters", "optimizer"):
            assert all(map(torch.equal, other[what], first[what])), what
    rows = [row for one in (first, second, newcomer) for row in one["seen"]]
    assert set(rows) == {*map(float, range(94))}, "the last epoch was divided among all three"
    assert len(rows) == 96, "with as few repetitions as equal numbers need"


def test_a_function_over_ddp_is_called_again_in_the_new_world(tmp_path: Path):
    command = [sys.executable, str(_SCRIPT.with_name("run_with_ddp.py")), str(tmp_path)]
    status, output, errors = run_command("hora", "run", "-np", "3", "--min-np", "2", "--spares", "1", *command)
    assert status == 0, output + errors
    first, *others = (torch.load(tmp_path / f"{worker}.pt") for worker in (0, 2, 3))
    assert [step for step, _ in first["steps"]] == [*range(1, len(first["steps"]) + 1)], "the killed step was repeated"
    assert {size for _, size in first["steps"]} == {2, 3}
    for other in others:
        assert other["steps"][-3:] == first["steps"][-3:]
        assert all(map(torch.equal, other["values"], first["values"]))
