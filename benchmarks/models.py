"""The models that `training.py` trains: a tiny network, a wide one, and ResNet18 in its CIFAR shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True)
class Workload:
    """A model, the shape of one batch of inputs, the number of classes, and the number of steps per timing."""

    name: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    steps: int


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def resnet18(classes: int = 10, width: int = 64) -> nn.Module:
    """Return ResNet18 for 32x32 images: 11.2 million parameters at the usual width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    channels = width
    for stage, outputs in enumerate((width, 2 * width, 4 * width, 8 * width)):
        layers += [Block(channels, outputs, 1 if stage == 0 else 2), Block(outputs, outputs, 1)]
        channels = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes))


def tiny() -> nn.Module:
    """Return the network of the penguins example."""
    return nn.Sequential(nn.Linear(5, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, 3))


def wide() -> nn.Module:
    """Return four layers of 2048: 12.6 million parameters with little arithmetic for each."""
    hidden = [layer for _ in range(3) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(2048, 10))


WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload("tiny MLP", tiny, (20, 5), 3, 300),
        Workload("MLP 4x2048", wide, (32, 2048), 10, 8),
        Workload("ResNet18", resnet18, (8, 3, 32, 32), 10, 3),
    )
}
