"""Broadcast of the root's optimizer state to all ranks, independent of their own state.

The root describes its state: values, and a spec of shape, dtype and device type for each tensor. Every other rank
builds that state, reusing its own tensors where they fit; then the tensors are broadcast. So a rank may have no state
or a different one, for instance because only the root loaded a checkpoint. If the root has no state, the other ranks
get none, and training continues as without the call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import LBFGS, SGD, Optimizer, SparseAdam

from hora.torch.basics import engine_rank
from hora.torch.functions import allgather_object, broadcast_object, broadcast_parameters
from hora.torch.optimizer.parameters import no_rows, parameters_of

__all__ = ["broadcast_optimizer_state"]


@dataclass(frozen=True)
class _TensorSpec:
    """Placeholder for a tensor in the description of a state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device_type: str


def broadcast_optimizer_state(optimizer: Optimizer, root_rank: int, model: torch.nn.Module | None = None) -> None:
    """Send the root's optimizer state and options to all ranks.

    Args:
        optimizer: The optimizer; its hyper-parameters, groups and state are kept.
        root_rank: The rank whose value everyone gets.
        model: Shows which gradients of SGD are sparse.

    Raises:
        ValueError: The optimizer is LBFGS, or its groups differ between the ranks.
    """
    if isinstance(optimizer, LBFGS):
        raise ValueError("cannot broadcast torch.optim.LBFGS state; it has no fixed structure, use another optimizer")
    _check_same_groups(optimizer)
    # The state is sharded, or it is more than the parameters' state: let the optimizer load it.
    if getattr(optimizer, "is_sharded", False) or getattr(optimizer, "keeps_outer_state", False):
        state = optimizer.state_dict()
        optimizer.load_state_dict(broadcast_object(state, root_rank, "broadcast_optimizer_state"))
        return
    on_root = engine_rank() == root_rank
    if not optimizer.state:
        _fill_missing_gradients(optimizer, model)
    tensors: list[torch.Tensor] = []
    description: Any = None
    if on_root:
        number = {id(p): i for i, p in enumerate(parameters_of(optimizer))}
        groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        # By parameter number; other keys stay.
        states = {number.get(id(key), key): values for key, values in optimizer.state.items()}
        description = _describe({"groups": groups, "state": states}, tensors)
    description = broadcast_object(description, root_rank, "broadcast_optimizer_state")
    if not on_root:
        tensors = _build(optimizer, description)
    broadcast_parameters([(f"optimizer_state.{i}", tensor) for i, tensor in enumerate(tensors)], root_rank)
    if hasattr(optimizer, "after_broadcast"):
        optimizer.after_broadcast()


def _check_same_groups(optimizer: Optimizer) -> None:
    """Raise ValueError on all ranks if their parameters differ, instead of waiting for tensors that the root lacks."""
    mine = [len(group["params"]) for group in optimizer.param_groups]
    of_all = allgather_object(mine, "broadcast_optimizer_state.groups")
    for other, counts in enumerate(of_all):
        if counts != of_all[0]:
            raise ValueError(
                "the ranks' optimizers have different parameters, so no state can be sent: parameters "
                f"per group are {of_all[0]} on rank 0 and {counts} on rank {other}"
            )


def _fill_missing_gradients(optimizer: Optimizer, model: torch.nn.Module | None) -> None:
    """Set missing gradients to zero, as Horovod does."""
    sparse: set[int] = set()
    if isinstance(optimizer, SparseAdam):
        sparse = {id(p) for p in parameters_of(optimizer)}
    elif isinstance(optimizer, SGD) and model is not None:
        embeddings = (torch.nn.Embedding, torch.nn.EmbeddingBag)
        sparse = {id(m.weight) for m in model.modules() if isinstance(m, embeddings) and m.sparse}
    for p in parameters_of(optimizer):
        if p.requires_grad and p.grad is None:
            p.grad = no_rows(p) if id(p) in sparse else torch.zeros_like(p)


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    """Replace every tensor with a spec; the tensors are appended to `tensors`."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return _TensorSpec(tuple(value.shape), value.dtype, value.device.type)
    if type(value) is dict:
        return {k: _describe(v, tensors) for k, v in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_describe(v, tensors) for v in value)
    return value


def _build(optimizer: Optimizer, description: dict[str, Any]) -> list[torch.Tensor]:
    """Give this optimizer the described state and options; returns the tensors to receive, in order."""
    received: list[torch.Tensor] = []
    params = parameters_of(optimizer)
    home = params[0].device if params else torch.device("cpu")
    for group, options in zip(optimizer.param_groups, description["groups"], strict=True):
        for key, value in options.items():
            group[key] = _fill(value, group.get(key), home, received)
    mine = dict(optimizer.state)
    optimizer.state.clear()
    for key, values in description["state"].items():
        owner = params[key] if isinstance(key, int) else key
        device = params[key].device if isinstance(key, int) else home
        optimizer.state[owner] = _fill(values, mine.get(owner), device, received)
    return received


def _fill(value: Any, old: Any, device: torch.device, received: list[torch.Tensor]) -> Any:
    """Replace specs with tensors, the old one where it fits, else a new one; they are appended to `received`."""
    if isinstance(value, _TensorSpec):
        fits = isinstance(old, torch.Tensor) and tuple(old.shape) == value.shape and old.dtype == value.dtype
        where = device if value.device_type == device.type else torch.device("cpu")
        received.append(old if fits else torch.empty(value.shape, dtype=value.dtype, device=where))
        return received[-1]
    if type(value) is dict:
        old = old if isinstance(old, dict) else {}
        return {k: _fill(v, old.get(k), device, received) for k, v in value.items()}
    if type(value) in (list, tuple):
        olds = old if isinstance(old, (list, tuple)) and len(old) == len(value) else [None] * len(value)
        return type(value)(_fill(v, o, device, received) for v, o in zip(value, olds, strict=True))
    return value
