"""Networks that a model file can name, built from plain numbers, never from code in the file.

`model_file.load` calls `build`; the labs and users create networks directly. Pass your own network to `load` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import nn

_MAX_LAYERS = 64
_MAX_WIDTH = 1_000_000
_BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}


class MLP(nn.Module):
    """Fully connected layers of the given sizes (inputs first, outputs last) with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        if not 2 <= len(sizes) <= _MAX_LAYERS or not all(
            isinstance(width, int) and 0 < width <= _MAX_WIDTH for width in sizes
        ):
            raise ValueError(f"sizes must be 2 to {_MAX_LAYERS} positive whole numbers, but they are {sizes!r}")
        self.architecture = {"kind": "mlp", "sizes": list(sizes)}
        self.layers = nn.ModuleList(nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            inputs = torch.relu(layer(inputs))
        return self.layers[-1](inputs)


def _convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, size, stride=stride, padding=size // 2, bias=False), nn.BatchNorm2d(outputs)
    )


class _Block(nn.Module):
    """Two 3x3 convolutions, or with `bottleneck` a 1x1, a 3x3 and a 1x1, around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            sizes: list[tuple[int, ...]] = [(inputs, width, 1), (width, width, 3, stride), (width, outputs, 1)]
        else:
            sizes = [(inputs, width, 3, stride), (width, outputs, 3)]
        parts = [_convolution(*size) for size in sizes]
        # The last normalization starts at zero: every block starts as its shortcut, which trains better.
        nn.init.zeros_(parts[-1][1].weight)  # type: ignore[arg-type]
        self.parts = nn.ModuleList(parts)
        self.shortcut = nn.Identity() if stride == 1 and inputs == outputs else _convolution(inputs, outputs, 1, stride)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = inputs
        for part in self.parts[:-1]:
            outputs = torch.relu(part(outputs))
        return torch.relu(self.parts[-1](outputs) + self.shortcut(inputs))


class ResNet(nn.Module):
    """A residual network of `depth` layers for images with `channels` colours.

    For small images (a 3x3 stem, no pooling before the blocks) or, with `stem="large"`, for photographs. `width` 64 is
    the published network; a smaller width suits a CPU.
    """

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
        if not isinstance(depth, int) or depth not in _BLOCKS:
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


_KINDS: Mapping[str, type[nn.Module]] = {"mlp": MLP, "resnet": ResNet}


def build(architecture: Mapping[str, Any]) -> nn.Module:
    """Build the network of a description such as {"kind": "mlp", "sizes": [5, 10, 10, 3]}."""
    options = dict(architecture)
    kind = options.pop("kind", None)
    if not isinstance(kind, str) or kind not in _KINDS:
        raise ValueError(f"architecture kind {kind!r} is not one of {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**options)
    except TypeError as error:
        raise ValueError(f"architecture {kind!r} does not take the options {sorted(options)}") from error
