"""ResNet-18, -34 and -50 for small images (a 3x3 stem, no pooling before the blocks) or, with
`stem="large"`, for photographs.

Only the network; data and training are elsewhere. `width` 64 is the published network; less makes it fit
for a CPU.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn

__all__ = ["ResNet"]

_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False),
        nn.BatchNorm2d(outputs),
    )


class _Block(nn.Module):
    """Two 3x3 convolutions, or with `bottleneck` a 1x1, a 3x3 and a 1x1, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            parts = [
                _convolution(inputs, width, 1),
                _convolution(width, width, 3, stride),
                _convolution(width, outputs, 1),
            ]
        else:
            parts = [_convolution(inputs, width, 3, stride), _convolution(width, outputs, 3)]
        # The last normalisation starts at zero: at first every block is its shortcut, which trains better.
        nn.init.zeros_(parts[-1][1].weight)  # type: ignore[arg-type]
        self.parts = nn.ModuleList(parts)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else _convolution(inputs, outputs, 1, stride)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs
        for part in self.parts[:-1]:
            outputs = torch.relu(part(outputs))
        return torch.relu(self.parts[-1](outputs) + self.shortcut(inputs))


class ResNet(nn.Module):
    """A residual network of `depth` layers for images with `channels` colours."""

    def __init__(
        self,
        depth: int = 18,
        *,
        num_classes: int = 10,
        channels: int = 3,
        width: int = 64,
        stem: Literal["small", "large"] = "small",
    ) -> None:
        super().__init__()
        if depth not in _BLOCKS:
            raise ValueError(f"depth must be one of {', '.join(map(str, _BLOCKS))}, but it is {depth}")
        for name, value in (("num_classes", num_classes), ("channels", channels), ("width", width)):
            if not isinstance(value, int) or not 1 <= value <= 100_000:
                raise ValueError(f"{name} must lie in 1..100000, but it is {value!r}")
        if stem not in ("small", "large"):
            raise ValueError(f"stem must be small or large, but it is {stem!r}")
        self.architecture = {
            "kind": "resnet",
            "depth": depth,
            "num_classes": num_classes,
            "channels": channels,
            "width": width,
            "stem": stem,
        }
        if stem == "small":
            self.stem = nn.Sequential(_convolution(channels, width, 3), nn.ReLU())
        else:
            self.stem = nn.Sequential(
                _convolution(channels, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1)
            )
        blocks, inputs, bottleneck = [], width, depth >= 50
        for stage, num_blocks in enumerate(_BLOCKS[depth]):
            for index in range(num_blocks):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(_Block(inputs, width << stage, stride, bottleneck))
                inputs = (width << stage) * (4 if bottleneck else 1)
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.stem(images)).mean(dim=(2, 3)))
