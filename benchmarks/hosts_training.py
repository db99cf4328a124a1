"""Train on several hosts against DistributedDataParallel over gloo: the rank that `benchmarks.hosts --train` starts.

All contenders share the processes and take turns; `training` and `models` define them. Rank 0 reports medians over
rounds of the slowest rank's step time and of its ratio to DDP's, and the mean loss after `num_steps` steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

import horovod.torch as hvd
from benchmarks.collectives import both_joined
from benchmarks.models import WORKLOADS
from benchmarks.training import in_turns, make_step

CONTENDERS = ("DDP", "overlap", "bf16", "int8")
NUM_STEPS = 2  # steps per turn: over a slow cable a step takes half a second


def measured(model: str, rounds: int, num_steps: int) -> dict:
    """Return the milliseconds of each contender's step, per round, and its loss after `num_steps` (0: no loss)."""
    workload = WORKLOADS[model]
    steps = {name: make_step(name, workload, "sgd", hvd.rank()) for name in CONTENDERS}
    for step in steps.values():
        for _ in range(3):  # ranks agree on buckets after the first step
            step()
    times = in_turns(steps, rounds, NUM_STEPS)
    losses = {}
    for name, step in steps.items():
        loss = torch.zeros(())
        for _ in range(num_steps - 3 - rounds * (1 + NUM_STEPS)):
            loss = step()
        losses[name] = hvd.allreduce(loss, name="loss").item()
    return {"task": model, "ranks": hvd.size(), "ms": times, "steps": num_steps, "losses": losses}


def report(result: dict) -> str:
    times = result["ms"]
    parts = [f"{result['task']:11s} np={result['ranks']}"]
    parts += [f"{name} {statistics.median(values):.0f} ms" for name, values in times.items()]
    for name in CONTENDERS[1:]:
        ratios = [theirs / ours for theirs, ours in zip(times["DDP"], times[name], strict=True)]
        parts.append(f"DDP/{name} {statistics.median(ratios):.2f} ({min(ratios):.2f}..{max(ratios):.2f})")
    if result["steps"]:
        parts.append(f"losses after {result['steps']} steps:")
        parts += [f"{name} {loss:.4f}" for name, loss in result["losses"].items()]
    return "  ".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--json", type=Path, required=True)
    arguments = parser.parse_args()
    results = []
    with both_joined():
        for model in arguments.models.split(","):
            results.append(measured(model, arguments.rounds, arguments.steps))
            if hvd.rank() == 0:
                print(report(results[-1]), flush=True)
        if hvd.rank() == 0:
            arguments.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
