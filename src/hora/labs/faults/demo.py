"""`hora demo faults`: a DDP training on this machine that continues while you kill its ranks on the live page.

It separates two spirals, and completes every step. The last rank reads slowly for a while, so that the page shows a
straggler and its line.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from hora.spelling import Parser

if TYPE_CHECKING:
    import torch

_BATCH, _NUM_POINTS = 128, 8192
_SLOW_FROM_S, _SLOW_UNTIL_S, _SLOW_READ_S = 15.0, 45.0, 0.02


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    given = make_parser().parse_args(argv)
    if given.np < 2 or given.steps < 1:
        make_parser().error(f"-np must be at least 2 and --steps at least 1, but they are {given.np} and {given.steps}")
    from hora.launch.environment import variables
    from hora.launch.job import Watching
    from hora.launch.options import Options
    from hora.launch.pickling import pickle_call
    from hora.launch.start import start

    watching = Watching(page=True, browser=not given.no_browser, record=given.record, demo=True)
    # Without grace a removed rank gets SIGKILL at once, which is the point of the demo.
    adjust = partial(replace, title="hora demo faults", watching=watching, grace_s=0.0)
    print("Kill ranks on the page; the training goes on. Ctrl-C ends it.", flush=True)
    environ = variables()
    options = Options.filled(environ, num_proc=given.np, min_num_proc=1, max_num_proc=given.np)
    start(options, environ, function=pickle_call(train, (given.steps,)), adjust=adjust)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hora demo faults",
        description="Train on this machine and kill ranks on the live page, while the training goes on.",
    )
    parser.add_argument("-np", "--np", type=int, default=4, metavar="N", help="number of ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=20_000, help="number of steps (default: 20000)")
    parser.add_argument("--no-browser", action="store_true", help="only print the page's address")
    parser.add_argument("--record", metavar="FILE", help="record the run for `hora view FILE`")
    return parser


def train(num_steps: int) -> None:
    """Train a classifier of two spirals on any number of ranks."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    import hora.elastic
    from hora.telemetry import meter
    from hora.telemetry.report import report

    dist.init_process_group("hora")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    inputs, labels = spirals()
    net = torch.nn.Sequential(
        *(torch.nn.Linear(2, 512), torch.nn.ReLU(), torch.nn.Linear(512, 512), torch.nn.ReLU()),
        torch.nn.Linear(512, 2),
    )
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    hora.elastic.protect(model, optimizer)
    report(total_steps=num_steps)
    began = time.monotonic()
    for step in range(num_steps):
        rank, size = dist.get_rank(), dist.get_world_size()
        chosen = torch.randint(len(labels), (_BATCH,), generator=torch.Generator().manual_seed(step * size + rank))
        meter.num_samples += _BATCH
        if rank == size - 1 > 0 and _SLOW_FROM_S < time.monotonic() - began < _SLOW_UNTIL_S:
            read_slowly()
        optimizer.zero_grad()
        scores = model(inputs[chosen])
        loss = torch.nn.functional.cross_entropy(scores, labels[chosen])
        loss.backward()
        optimizer.step()
        report(loss=loss, accuracy=(scores.argmax(1) == labels[chosen]).float().mean())
        if (step + 1) % 500 == 0 and dist.get_rank() == 0:
            print(f"step {step + 1}: loss {loss.item():.3f} on {dist.get_world_size()} ranks", flush=True)
    dist.destroy_process_group()


def spirals() -> tuple[torch.Tensor, torch.Tensor]:
    """Return points of two spirals, and which of them each point belongs to."""
    import torch

    generator = torch.Generator().manual_seed(0)
    angle = 3.5 * torch.pi * torch.rand(_NUM_POINTS, generator=generator).sqrt()
    labels = torch.arange(_NUM_POINTS) % 2
    turned = angle + torch.pi * labels
    inputs = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 11.0
    return inputs + 0.02 * torch.randn(_NUM_POINTS, 2, generator=generator), labels


def read_slowly() -> None:
    """Simulate a disk that is slower than those of the other ranks."""
    time.sleep(_SLOW_READ_S)
