"""Autotune against a sweep by hand, on two models: `python -m benchmarks.autotune [-np 2] [--rounds 9]`

In one job and with one optimizer, so that all have the same memory: after its trials the optimizer is given one setting
after the other, in turns, the chosen one among them. Only times of the same round are compared: the medians of their
ratios say how far the chosen one is from the best by hand, and from the default.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hora.torch.optimizer.autotune import Setting

MB = 2**20
SETTLING = 3  # steps after a change that don't count
SHAPES = {"wide": (2048, 4, 32), "deep": (512, 48, 32)}  # width, layers, batch


def by_hand(num_bytes: int) -> dict[str, Setting]:
    """What a person would try: sizes below the model's, while backward goes on and after it, and one bucket of
    everything.
    """
    from hora.torch.optimizer.autotune import Setting

    sizes = [size for size in (MB, 4 * MB, 16 * MB, 64 * MB) if size < num_bytes]
    settings = [Setting(size, overlap) for size in sizes for overlap in (True, False)]
    return {str(setting): setting for setting in [*settings, Setting(num_bytes, overlap=True)]}


def training(width: int, depth: int, batch: int) -> tuple[Callable[[], float], object]:
    """A step of a new model, which returns how long it took in milliseconds, and its optimizer."""
    import torch

    import horovod.torch as hvd

    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(depth)))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-5, momentum=0.9), named_parameters=model.named_parameters()
    )
    inputs = torch.randn(batch, width)

    def step() -> float:
        began = time.perf_counter()
        optimizer.zero_grad()
        model(inputs).pow(2).mean().backward()
        optimizer.step()
        return 1e3 * (time.perf_counter() - began)

    return step, optimizer


def rank(model: str, rounds: int, steps: int) -> None:
    """What every rank runs; rank 0 prints the results."""
    import torch

    import horovod.torch as hvd

    hvd.init()
    torch.set_num_threads(1)
    step, optimizer = training(*SHAPES[model])
    order = optimizer._bucket_order
    while order._tuner is None or not order._tuner.done:
        step()
    tuner = order._tuner
    contenders = by_hand(tuner._num_bytes) | {str(tuner.setting): tuner.setting}
    chosen, times = str(tuner.setting), {name: [] for name in contenders}
    for turn in range(rounds):
        for name in list(contenders) if turn % 2 == 0 else reversed(contenders):
            tuner.setting = contenders[name]
            hvd.barrier()
            took = [step() for _ in range(steps + SETTLING)]
            times[name].append(statistics.median(took[SETTLING:]))
    if hvd.rank() == 0:
        print("RESULT " + json.dumps({"chosen": chosen, "times": times}), flush=True)


def measure(model: str, np: int, rounds: int, steps: int) -> dict:
    command = [sys.executable, "-m", "hora", "run", "-np", str(np), sys.executable, "-m", "benchmarks.autotune", "rank"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HOROVOD_AUTOTUNE": "1"}
    options = ["--model", model, "--rounds", str(rounds), "--steps", str(steps)]
    done = subprocess.run([*command, *options], env=env, stdout=subprocess.PIPE, text=True, check=True)
    line = next(line for line in done.stdout.splitlines() if "RESULT " in line)
    found = json.loads(line.partition("RESULT ")[2])
    times = found["times"]
    mine = times[found["chosen"]]
    medians = {name: statistics.median(values) for name, values in times.items()}
    best = min(medians, key=lambda name: medians[name])

    def over(name: str) -> float:
        return round(statistics.median(a / b for a, b in zip(mine, times[name], strict=True)), 3)

    return {
        "chosen": found["chosen"],
        "ms": {name: round(ms, 2) for name, ms in medians.items()},
        "best by hand": best,
        "over the best by hand": over(best),
        "over the default": over("buckets of 4 MB"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("rank",), help=argparse.SUPPRESS)
    parser.add_argument("-np", type=int, default=2)
    parser.add_argument("--model", choices=SHAPES, help="only this one")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="of a contender in a round")
    options = parser.parse_args()
    if options.what == "rank":
        rank(options.model, options.rounds, options.steps)
        return
    for model in [options.model] if options.model else SHAPES:
        print(model, json.dumps(measure(model, options.np, options.rounds, options.steps)), flush=True)


if __name__ == "__main__":
    main()
