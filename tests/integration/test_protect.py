"""`hora.elastic.protect`: DDP trainings whose ranks are killed complete every step, to the last digit."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from job_process import run_command
from protected_training import replay

_SCRIPT = Path(__file__).with_name("protected_training.py")


def death(worker: int, step: int, phase: str) -> dict[str, Any]:
    return {"worker": worker, "step": step, "phase": phase}


def run_and_replay(folder: Path, plan: dict[str, Any], num_proc: int) -> str:
    """Run a plan, and compare every survivor's parameters and optimizer state with one process's; return the output."""
    command = [sys.executable, str(_SCRIPT), json.dumps(plan), str(folder)]
    status, output, errors = run_command("hora", "run", "-np", str(num_proc), "--min-np", "1", *command)
    assert status == 0, output + errors
    survivors = {worker for worker in range(num_proc) if worker not in [one["worker"] for one in plan["deaths"]]}
    found = {worker: torch.load(folder / f"{worker}.pt") for worker in survivors}
    grads = found[min(survivors)]["grads"]
    expected = replay(plan, num_proc, grads)
    for worker, result in found.items():
        assert result["size"] == len(survivors)
        for what in ("parameters", "optimizers"):
            for mine, its in zip(result[what], expected[what], strict=True):
                assert torch.equal(torch.as_tensor(mine), torch.as_tensor(its)), f"{what} of worker {worker}"
    return output + errors


def test_ranks_that_die_in_every_phase_cost_no_step(tmp_path: Path):
    deaths = [death(3, 2, "forward"), death(1, 5, "gradient 4"), death(0, 8, "reduced"), death(2, 11, "stepped")]
    run_and_replay(tmp_path, {"recipe": "plain", "steps": 15, "deaths": deaths}, 5)
