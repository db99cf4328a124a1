"""`hora.elastic.ShardedState`: FSDP2 trainings whose ranks are killed go on from the last commit, to the last digit."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from job_process import BIN, JobProcess, run_command
from sharded_training import replay

import horovod
from waiting import wait_until

_SCRIPT = Path(__file__).with_name("sharded_training.py")


def death(worker: int, step: int, phase: str) -> dict[str, Any]:
    return {"worker": worker, "step": step, "phase": phase}


def run_and_replay(
    folder: Path,
    deaths: list[dict[str, Any]],
    num_proc: int,
    *options: str,
    steps: int = 16,
    kind: str = "fsdp",
    grows: bool = False,
    **environment: str,
) -> dict[int, list[int]]:
    """Run a plan and compare the result with one process's; returns the members of each step that counted."""
    plan = {"kind": kind, "steps": steps, "every": 2, "deaths": deaths, "grows": num_proc if grows else 0}
    command = [sys.executable, str(_SCRIPT), json.dumps(plan), str(folder)]
    options = ("-np", str(num_proc), "--min-np", "1", *options)
    status, output, errors = run_command("hora", "run", *options, *command, env=environment)
    assert status == 0, output + errors
    return compared(folder, kind, deaths)


def compared(folder: Path, kind: str, deaths: list[dict[str, Any]]) -> dict[int, list[int]]:
    found = torch.load(folder / "result.pt")
    members: dict[int, list[int]] = found["members"]
    expected = replay(kind, len(members), members)
    for what in ("parameters", "moments"):
        for mine, its in zip(found[what], expected[what], strict=True):
            assert torch.equal(mine, its), f"{what}: {mine} is not {its}"
    assert found["rate"] == expected["rate"]
    dying = {one["worker"] for one in deaths}
    assert dying.isdisjoint(members[max(members)]), "every planned death happened"
    return members


def test_ranks_that_die_cost_the_steps_since_the_last_commit(tmp_path: Path):
    deaths = [death(3, 3, "forward"), death(0, 6, "commit"), death(1, 11, "reduced")]
    members = run_and_replay(tmp_path, deaths, 4)
    assert members[1] == [0, 1, 2, 3]
    assert members[2] == [0, 1, 2], "step 2 was repeated: the last commit was that after step 1"
    assert members[4] == [1, 2], "a rank that dies within its commit takes it along: the one before it counts"
    assert members[10] == [2]


def test_two_at_once_and_one_while_the_shards_are_loaded(tmp_path: Path):
    deaths = [death(0, 5, "backward"), death(2, 5, "backward"), death(3, 0, "resharding 1"), death(4, 8, "written")]
    members = run_and_replay(tmp_path, deaths, 5)
    assert members[3] == [0, 1, 2, 3, 4]
    assert members[4] == [1, 4], "rank 3 died before it had loaded the commit, of which every rank has every shard"
    assert members[8] == [1], "the commit after step 7 was whole when the rank died that had written it"


@pytest.mark.parametrize("kind", ["hsdp", "zero"])
def test_replicas_and_sharded_optimizers_are_committed_too(tmp_path: Path, kind: str):
    deaths = [death(3, 3, "forward"), death(0, 7, "backward")]
    members = run_and_replay(tmp_path, deaths, 4, steps=10, kind=kind)
    assert members[2] == [0, 1, 2]
    assert members[6] == [1, 2]


def test_a_newcomer_gets_its_shards_from_the_others(tmp_path: Path):
    cooldown = ("--blacklist-cooldown-range", "1", "2")
    members = run_and_replay(tmp_path, [death(1, 5, "reduced")], 3, *cooldown, steps=8, grows=True)
    assert members[4] == [0, 2]
    assert sorted(members[max(members)]) == [0, 2, 3]


def test_without_shared_memory_every_rank_keeps_a_copy_of_another_ones_shards(tmp_path: Path):
    deaths = [death(2, 5, "forward"), death(0, 9, "commit"), death(0, 9, "backward")]
    members = run_and_replay(tmp_path, deaths, 3, steps=12, HORA_TRANSPORT="tcp")
    assert members[4] == [0, 1], "the commit after step 3 had been copied when step 5 began, or that after step 1"
    assert members[8] == [1]


_LOSS = """
import os, signal, sys
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
import hora.elastic

dist.init_process_group("hora")
worker = int(os.environ["HORA_WORKER"])
number = 0

def load_checkpoint():
    print(f"worker {worker} loads the checkpoint", flush=True)

@hora.elastic.run
def train(state):
    global number
    number += 1
    model = fully_shard(torch.nn.Linear(8, 8))
    state.attach(model=model, load_checkpoint=load_checkpoint if "checkpoint" in sys.argv else None)
    state.commit()
    state.commit()
    if number == 1 and worker < 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    return state.step

train(hora.elastic.ShardedState(step=0))
"""


@pytest.mark.parametrize("argument", ["checkpoint", "none"])
def test_a_shard_that_is_lost_with_its_copy_is_named(tmp_path: Path, argument: str):
    script = tmp_path / "loss.py"
    script.write_text(_LOSS)
    command = (sys.executable, str(script), argument)
    status, output, errors = run_command(
        "hora", "run", "-np", "3", "--min-np", "1", *command, env={"HORA_TRANSPORT": "tcp"}
    )
    assert "lacks the shards of the former rank(s) [0] on" in output + errors
    if argument == "checkpoint":
        assert status == 0, output + errors
        assert output.count("worker 2 loads the checkpoint") == 2, "at the start, and after the loss"
    else:
        assert status != 0
        assert "Start the job again from your last checkpoint" in output + errors


def test_what_cannot_be_done_is_refused_on_every_rank_with_what_to_change():
    def train() -> list[str]:
        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        import hora.elastic

        dist.init_process_group("hora")
        found: list[str] = []

        @hora.elastic.run
        def steps(state):
            net, other = fully_shard(torch.nn.Linear(4, 4)), torch.nn.Linear(2, 1)
            calls = [
                state.commit,
                lambda: state.attach(model=net, optimizer=torch.optim.SGD(other.parameters(), 0.1)),
                lambda: state.attach(model=net, epoch=3),
                lambda: state.attach(model=net) and None,
                lambda: state.attach(model=net),
            ]
            for call in calls:
                try:
                    call()
                except ValueError as error:
                    found.append(str(error))

        steps(hora.elastic.ShardedState())
        dist.destroy_process_group()
        return found

    for found in horovod.run(train, num_proc=2, min_num_proc=2):
        before, foreign, plain, twice = found
        assert "state.commit() before state.attach()" in before
        assert "parameters of no attached model" in foreign
        assert "give plain values to the state: ShardedState(epoch=…)" in plain
        assert "was called twice" in twice


def test_another_model_in_the_next_world_is_refused():
    def train() -> str:
        import os
        import signal

        import torch
        import torch.distributed as dist
        from torch.distributed.fsdp import fully_shard

        import hora.elastic

        dist.init_process_group("hora")

        @hora.elastic.run
        def steps(state):
            model = fully_shard(torch.nn.Linear(4, 2 + dist.get_world_size()))
            state.attach(model=model)
            state.commit()
            if dist.get_rank() == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()

        try:
            steps(hora.elastic.ShardedState())
        except ValueError as error:
            return str(error)
        return ""

    for message in horovod.run(train, num_proc=3, min_num_proc=2):
        assert "model/weight was [5, 4] and is [4, 4]" in message
        assert "build the same model in every world" in message


def test_another_backend_and_a_job_of_a_fixed_size_are_refused():
    def train(backend: str) -> str:
        import torch.distributed as dist

        import hora.elastic

        dist.init_process_group(backend)
        try:
            hora.elastic.run(lambda state: None)(hora.elastic.ShardedState())
        except ValueError as error:
            return str(error)
        return ""

    for message in horovod.run(train, ("gloo",), num_proc=2, min_num_proc=2):
        assert 'this process group has "gloo"' in message
        assert 'use init_process_group("hora")' in message
    for message in horovod.run(train, ("hora",), num_proc=2):
        assert "hora run -np 2 --min-np 1 python train.py" in message


_NODES = {f"hora-sh{os.getpid()}a": "10.83.0.1", f"hora-sh{os.getpid()}b": "10.83.0.2"}


@pytest.fixture
def nodes():
    """Two hosts, simulated by network namespaces that are joined by a cable."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and ip (iproute2)")
    first, second = _NODES
    commands: list[str] = []
    for name in _NODES:
        commands += [f"netns add {name}", f"-n {name} link set lo up"]
    commands.append(f"link add cable netns {first} type veth peer name cable netns {second}")
    for name, address in _NODES.items():
        commands += [f"-n {name} addr add {address}/24 dev cable", f"-n {name} link set cable up"]
    try:
        for command in commands:
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False, timeout=30)
            if done.returncode != 0:
                pytest.skip(f"cannot make network namespaces: {done.stderr.strip()}")
        yield first, second
    finally:
        for name in _NODES:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False, timeout=30)


@pytest.mark.netns
def test_a_whole_host_is_killed_and_the_other_one_has_copies_of_its_shards(nodes: tuple[str, str], tmp_path: Path):
    plan = {"kind": "fsdp", "steps": 24, "every": 2, "deaths": [], "reports": True}
    jobs = []
    for rank, node in enumerate(nodes):
        own = tmp_path / str(rank)
        own.mkdir()
        secret = own / "secret"
        secret.touch(mode=0o600)
        secret.write_text("s" * 64)
        place = ["--nnodes", "2", "--node-rank", str(rank), "--meet", "10.83.0.1:29500", "--secret-file", str(secret)]
        size = ["-np", "4", "--min-np", "2", "--slots-per-host", "2", "--start-timeout", "120"]
        command = [str(BIN / "hora"), "run", *place, *size, sys.executable, str(_SCRIPT), json.dumps(plan)]
        jobs.append(JobProcess(["ip", "netns", "exec", node, *command, str(tmp_path)], own))
    wait_until("four ranks have committed", lambda: "committed 6 of 4" in jobs[0].text(), 150)
    jobs[1].kill()
    assert jobs[0].wait(200) == 0, jobs[0].text()
    # Sums of each host are added up first, as those of a mesh's rows are.
    members = compared(tmp_path, "hsdp", [death(2, 0, "all"), death(3, 0, "all")])
    assert [len(members[step]) for step in (0, 5, 23)] == [4, 4, 2]
    found = torch.load(tmp_path / "result.pt")
    assert [len(host) for host in found["first_hosts"]] == [2, 2]
    jobs[0].wait_for_the_last(60)


@pytest.mark.slow
def test_twenty_kills_and_twenty_newcomers(tmp_path: Path):
    plan = {"kind": "fsdp", "steps": 8, "every": 2, "deaths": [], "size": 3, "kills": 20, "grows": 22}
    command = [sys.executable, str(_SCRIPT), json.dumps(plan), str(tmp_path)]
    options = ("-np", "3", "--min-np", "1", "--blacklist-cooldown-range", "1", "2")
    status, output, errors = run_command("hora", "run", *options, *command)
    assert status == 0, output + errors
    members = compared(tmp_path, "fsdp", [])
    assert max(members[max(members)]) == 22, "the twentieth newcomer has trained"
    assert (output + errors).count("killed by SIGKILL") >= 20
