"""The buffers of a model that should agree between ranks.

Buffers that a state_dict does not have are caches, and the statistics of normalisation layers are each rank's own.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator
from types import GeneratorType
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

Named = Iterator[tuple[str, torch.Tensor]]


def buffers_beside(named_parameters: Any) -> Callable[[], Named]:
    """Return a function that yields the buffers of the model whose `named_parameters()` these are, if they are."""
    model = named_parameters if isinstance(named_parameters, torch.nn.Module) else None
    if isinstance(named_parameters, GeneratorType) and inspect.getgeneratorstate(named_parameters) == "GEN_CREATED":
        model = inspect.getgeneratorlocals(named_parameters).get("self")
    if not isinstance(model, torch.nn.Module):
        return lambda: iter(())
    reference = weakref.ref(model)  # an optimizer does not keep its model alive

    def find() -> Named:
        found = reference()
        return iter(()) if found is None else agreeing_buffers(found)

    return find


def agreeing_buffers(model: torch.nn.Module) -> Named:
    """Yield the persistent buffers by name, without the statistics of normalisation layers."""
    for place, module in model.named_modules():
        if isinstance(module, _NormBase):
            continue
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{place}.{name}" if place else name, buffer
