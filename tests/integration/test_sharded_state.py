"""`hora.elastic.ShardedState`: FSDP2 trainings whose ranks are killed go on from the last commit, to the last digit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from job_process import run_command
from sharded_training import replay

_SCRIPT = Path(__file__).with_name("sharded_training.py")


def death(worker: int, step: int, phase: str) -> dict[str, Any]:
    return {"worker": worker, "step": step, "phase": phase}


def run_and_replay(
    folder: Path, deaths: list[dict[str, Any]], num_proc: int, *options: str, steps: int = 16, kind: str = "fsdp"
) -> dict[int, list[int]]:
    """Run a plan and compare the result with one process's; returns the members of each step that counted."""
    plan = {"kind": kind, "steps": steps, "every": 2, "deaths": deaths}
    command = [sys.executable, str(_SCRIPT), json.dumps(plan), str(folder)]
    status, output, errors = run_command("hora", "run", "-np", str(num_proc), "--min-np", "1", *options, *command)
    assert status == 0, output + errors
    found = torch.load(folder / "result.pt")
    expected = replay(steps, found["members"])
    for what in ("parameters", "moments"):
        for mine, its in zip(found[what], expected[what], strict=True):
            assert torch.equal(mine, its), f"{what}: {mine} is not {its}"
    assert found["rate"] == expected["rate"]
    dying = {one["worker"] for one in deaths}
    assert dying.isdisjoint(found["members"][steps - 1]), "every planned death happened"
    return dict(found["members"])


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
