"""`hora demo faults`: a training on this machine that goes on while you kill its ranks on the live page.

The last rank reads slowly for a while, so that the page has a straggler to name, with its line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

import hora.torch as hvd
from hora.telemetry import meter, report
from hora.torch import elastic

__all__ = ["main", "train"]

_BATCH = 128
_SLOW_FROM_S, _SLOW_UNTIL_S, _SLOW_READ_S = 15.0, 45.0, 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="hora demo faults", description=__doc__)
    parser.add_argument("-np", "--np", type=int, default=4, metavar="N", help="ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=20_000, help="steps of the training (default: 20000)")
    parser.add_argument("--no-browser", action="store_true", help="only print the page's address")
    parser.add_argument("--record", metavar="FILE", help="record the run for `hora view FILE`")
    options = parser.parse_args(argv)
    if options.np < 2 or options.steps < 1:
        parser.error(f"-np must be at least 2 and --steps at least 1, but they are {options.np} and {options.steps}")
    return _run(options.np, options.steps, browser=not options.no_browser, record=options.record)


def _run(num_ranks: int, steps: int, *, browser: bool, record: str | None) -> int:
    from hora.launch.environment import variables
    from hora.launch.job import Job
    from hora.launch.options import Options
    from hora.launch.pickling import pickle_call
    from hora.launch.start import start
    from hora.launch.watching import Watching

    watching = Watching(page=True, browser=browser, record=record, demo=True)

    def for_the_demo(job: Job) -> Job:
        """A rank that is removed gets SIGKILL at once: that is the demo."""
        return replace(job, title="hora demo faults", watching=watching, grace_s=0.0)

    print("Kill ranks on the page; the training goes on. Ctrl-C ends it.", flush=True)
    environ = variables()
    options = Options.filled(environ, num_proc=num_ranks, min_num_proc=1, max_num_proc=num_ranks)
    start(options, environ, function=pickle_call(train, (steps,)), adjust=for_the_demo)
    return 0


def train(num_steps: int) -> None:
    """Learn to tell two spirals apart: on every rank, whatever their number."""
    hvd.init()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs, labels = _spirals()
    model = torch.nn.Sequential(
        *(torch.nn.Linear(2, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()),
        torch.nn.Linear(512, 2),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    state = elastic.TorchState(model=model, optimizer=optimizer, step=0, began=time.time(), per_step=True)

    @elastic.run
    def loop(state: Any) -> None:
        report(total_steps=num_steps)
        while state.step < num_steps:
            read = torch.Generator().manual_seed(state.step * hvd.size() + hvd.rank())
            chosen = torch.randint(len(labels), (_BATCH,), generator=read)
            meter.num_samples += _BATCH
            is_slow = hvd.rank() == hvd.size() - 1 > 0
            if is_slow and _SLOW_FROM_S < time.time() - state.began < _SLOW_UNTIL_S:
                read_slowly()
            optimizer.zero_grad()
            scores = model(inputs[chosen])
            loss = torch.nn.functional.cross_entropy(scores, labels[chosen])
            loss.backward()
            optimizer.step()
            report(loss=loss, accuracy=(scores.argmax(1) == labels[chosen]).float().mean())
            state.step += 1
            state.commit()
            if state.step % 500 == 0 and hvd.rank() == 0:
                print(f"step {state.step}: loss {loss.item():.3f} on {hvd.size()} ranks", flush=True)

    loop(state)


def read_slowly() -> None:
    """Stand in for a disk that is slower than those of the other ranks."""
    time.sleep(_SLOW_READ_S)


def _spirals(num_points: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    angle = 3.5 * torch.pi * torch.rand(num_points, generator=generator).sqrt()
    labels = torch.arange(num_points) % 2
    turned = angle + torch.pi * labels
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 11.0
    return points + 0.02 * torch.randn(num_points, 2, generator=generator), labels
