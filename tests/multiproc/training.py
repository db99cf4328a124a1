"""Shared parts of the optimizer tests: models, data that every rank can predict, a training loop, and its reference.

The reference is plain torch on the combined batches of all ranks, computed by every rank on its own.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd

ROWS = 4


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.Tanh(), nn.Linear(10, 3))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 6, num_layers=2, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Transformer(nn.Module):
    """A transformer whose input and output embeddings share one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, 8)
        self.body = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 3, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(x.abs().mul(2).long() % 3))[:, -1])


class Embedded(nn.Module):
    """A model with sparse gradients: each rank uses few rows, different from the others'."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.EmbeddingBag(50, 5, sparse=True, mode="sum")
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding((x.abs() * 10).long() % 50))


class SmallResNet(nn.Module):
    """ResNet18's shape at a sixteenth of its width; its normalization keeps no batch statistics, which would differ."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        widths = [width, width, width, 2 * width, 2 * width, 4 * width, 4 * width, 8 * width, 8 * width]
        self.blocks = nn.ModuleList(nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(widths))
        self.shortcuts = nn.ModuleList(nn.Conv2d(a, b, 1) for a, b in pairwise(widths))
        self.norms = nn.ModuleList(nn.GroupNorm(2, b) for b in widths[1:])
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block, shortcut, norm in zip(self.blocks, self.shortcuts, self.norms, strict=True):
            x = torch.relu(norm(block(x)) + shortcut(x))
        return self.head(x.mean((2, 3)))


def seeded(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def made() -> nn.Module:
        torch.manual_seed(0)
        return build()

    return made


MODELS = {
    "mlp": (mlp, (5,)),
    "resnet": (seeded(SmallResNet), (3, 8, 8)),
    "lstm": (seeded(Recurrent), (4, 5)),
    "transformer": (seeded(Transformer), (4,)),
}


def batch(rank: int, step: int, shape: tuple[int, ...] = (5,)) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(ROWS, *shape, generator=generator), torch.randint(0, 3, (ROWS,), generator=generator)


def joined(step: int, size: int, shape: tuple[int, ...] = (5,)) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = zip(*[batch(rank, step, shape) for rank in range(size)], strict=True)
    return torch.cat(inputs), torch.cat(targets)


def train(model, optimizer, steps, data, before_step=None, accumulate=1):
    """Train on the batches of `data(step)`; return the losses."""
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(accumulate):
            inputs, targets = data(step * accumulate + part)
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
        if before_step is not None:
            before_step(model)
        optimizer.step()
        losses.append(loss.item())
    return losses


def mine(shape=(5,)):
    return lambda step: batch(hvd.rank(), step, shape)


def of_all_ranks(shape=(5,), size=None):
    return lambda step: joined(step, size or hvd.size(), shape)


def weights(model) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def assert_close(got, wanted, tolerance=1e-5) -> None:
    for index, (a, b) in enumerate(zip(got, wanted, strict=True)):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=lambda m, i=index: f"tensor {i}: {m}")


def assert_states_close(got: dict, wanted: dict, tolerance=1e-5) -> None:
    """Check that two `state_dict()`s of optimizers are equal."""
    assert got["state"].keys() == wanted["state"].keys()
    for number, entries in wanted["state"].items():
        assert got["state"][number].keys() == entries.keys(), number
        for key, value in entries.items():
            mine = got["state"][number][key]
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance)
            else:
                assert mine == value, key
    for a, b in zip(got["param_groups"], wanted["param_groups"], strict=True):
        assert a == b


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), **{"lr": 0.1, "momentum": 0.9, **options})


def distributed(model, optimizer=None, **options):
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(optimizer or sgd(model), **options)


def reference(steps=5, **options):
    model = mlp()
    train(model, sgd(model, **options), steps, of_all_ranks())
    return weights(model)


def backward(model, step=0, scale=1.0):
    inputs, targets = batch(hvd.rank(), step)
    (functional.cross_entropy(model(inputs), targets) * scale).backward()
