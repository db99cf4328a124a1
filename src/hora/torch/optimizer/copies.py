"""Copies of optimizers: their attributes under another class, their step without the user's hooks, their values."""

from __future__ import annotations

from typing import Any

import torch


def bare_copy(optimizer: torch.optim.Optimizer, wanted: type) -> Any:
    """Return an object of class `wanted` with the attributes of `optimizer`, without calling a constructor."""
    result: Any = object.__new__(wanted)
    # An existing scheduler has patched `step` of the old object; leave it there.
    result.__dict__.update({key: value for key, value in optimizer.__dict__.items() if key != "step"})
    return result


def bare_step(optimizer: torch.optim.Optimizer, kind: type[torch.optim.Optimizer]) -> None:
    """Run the step of class `kind` without the user's step hooks, which belong to the distributed optimizer."""
    step: Any = kind.step
    (step.__wrapped__ if getattr(step, "hooked", False) else step)(optimizer)


def copied(value: Any) -> Any:
    """Return a copy of a tensor, and any other value itself."""
    return value.clone() if isinstance(value, torch.Tensor) else value
