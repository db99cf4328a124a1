"""Networks a model file can name: built from plain numbers, never from code in the file.

`build` is called by `model_file.load` and by the labs. A network of one's own is passed to `load` instead.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch

from hora.workflow.resnet import ResNet

__all__ = ["MLP", "build"]

_MAX_LAYERS = 64
_MAX_WIDTH = 1_000_000


class MLP(torch.nn.Module):
    """Fully connected layers of the given sizes (inputs first, outputs last) with ReLU between them."""

    def __init__(self, sizes: Sequence[int]) -> None:
        super().__init__()
        if not 2 <= len(sizes) <= _MAX_LAYERS or not all(
            isinstance(width, int) and 0 < width <= _MAX_WIDTH for width in sizes
        ):
            raise ValueError(f"sizes must be 2 to {_MAX_LAYERS} positive whole numbers, but they are {sizes!r}")
        self.architecture = {"kind": "mlp", "sizes": list(sizes)}
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*pair) for pair in pairwise(sizes))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            inputs = torch.relu(layer(inputs))
        return self.layers[-1](inputs)


_KINDS: Mapping[str, type[torch.nn.Module]] = {"mlp": MLP, "resnet": ResNet}


def build(architecture: Mapping[str, Any]) -> torch.nn.Module:
    """The network of a description such as {"kind": "mlp", "sizes": [5, 10, 10, 3]}."""
    options = dict(architecture)
    kind = options.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"architecture kind {kind!r} is not one of {', '.join(_KINDS)}")
    try:
        return _KINDS[kind](**options)
    except TypeError as error:
        raise ValueError(f"architecture {kind!r} does not take the options {sorted(options)}") from error
