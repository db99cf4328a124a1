"""The training of `hora demo faults`: two spirals, recovered step by step, on a changing number of ranks.

The last rank reads slowly for a while, so that the page shows a straggler and its line.
"""

from __future__ import annotations

import time
from typing import Any

import torch

import hora.torch as hvd
from hora.telemetry import meter, report
from hora.torch import elastic

_BATCH = 128
_SLOW_FROM_S, _SLOW_UNTIL_S, _SLOW_READ_S = 15.0, 45.0, 0.02


def train(num_steps: int) -> None:
    """Train a classifier of two spirals on any number of ranks."""
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
    """Simulate a disk that is slower than those of the other ranks."""
    time.sleep(_SLOW_READ_S)


def _spirals(num_points: int = 8192) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    angle = 3.5 * torch.pi * torch.rand(num_points, generator=generator).sqrt()
    labels = torch.arange(num_points) % 2
    turned = angle + torch.pi * labels
    points = torch.stack([angle * turned.cos(), angle * turned.sin()], dim=1) / 11.0
    return points + 0.02 * torch.randn(num_points, 2, generator=generator), labels
