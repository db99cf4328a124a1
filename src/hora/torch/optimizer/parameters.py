"""Validation of the user's parameter names and groups; pure, and usable before `hvd.init()`."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch


def parameters_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the parameters of all groups, in order."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def no_rows(parameter: torch.Tensor) -> torch.Tensor:
    """Return an empty sparse gradient of a parameter."""
    indices = torch.empty(1, 0, dtype=torch.int64, device="cpu")
    rows = parameter.new_empty(0, *parameter.shape[1:])
    return torch.sparse_coo_tensor(indices, rows, parameter.shape, device=parameter.device, check_invariants=False)


def parameter_names(
    optimizer: torch.optim.Optimizer, named_parameters: Iterable[tuple[str, torch.Tensor]] | None
) -> dict[torch.Tensor, str]:
    """Return a unique name for every parameter of the optimizer, equal on all ranks."""
    if not hasattr(optimizer, "param_groups"):
        raise ValueError(
            f"DistributedOptimizer wraps an optimizer, but it was given {type(optimizer).__name__}: pass for example "
            "torch.optim.SGD(model.parameters(), lr=…)"
        )
    if named_parameters is None:
        return {
            parameter: unnamed(group_index, index)
            for group_index, group in enumerate(optimizer.param_groups)
            for index, parameter in enumerate(group["params"])
        }
    if isinstance(named_parameters, (torch.nn.Module, Mapping)):
        right = "model.named_parameters()" if isinstance(named_parameters, torch.nn.Module) else "its items()"
        raise ValueError(f"named_parameters was given a {type(named_parameters).__name__}: pass {right}")
    pairs: list[Any] = list(named_parameters)
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), usually produced by "
                f"model.named_parameters(), but it contains {type(pair).__name__}"
            )
    repeated = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if repeated:
        raise ValueError(f"parameter names in named_parameters must be unique; found duplicates: {', '.join(repeated)}")
    names = {parameter: name for name, parameter in reversed(pairs)}
    nameless = [p for p in parameters_of(optimizer) if p not in names]
    if nameless:
        shapes = ", ".join(str(list(p.shape)) for p in nameless[:5])
        raise ValueError(
            f"named_parameters was given, but {len(nameless)} parameters of the optimizer were not named (shapes "
            f"{shapes}); python object ids of tensors must match: pass model.named_parameters() of the same model"
        )
    return names


def unnamed(group_index: int, index: int) -> str:
    """Return the name of an unnamed parameter."""
    return f"allreduce.noname.{group_index}.{index}"


def parameter_groups(
    groups: int | Sequence[Sequence[torch.Tensor]] | None, parameters: Sequence[torch.Tensor]
) -> list[list[torch.Tensor]]:
    """Return the groups as lists of parameters; empty for None. `parameters` are the active ones, in order."""
    if groups is None:
        return []
    if isinstance(groups, int) and not isinstance(groups, bool) and groups > 0:
        parts = torch.arange(len(parameters), device="cpu").tensor_split(groups)
        return [[parameters[index] for index in part.tolist()] for part in parts if len(part)]
    if not isinstance(groups, (list, tuple)):
        raise ValueError(f"groups should be a positive integer or a list of lists of tensors, but it is {groups!r}")
    found = [list(group) if isinstance(group, (list, tuple)) else [group] for group in groups]
    listed = [tensor for group in found for tensor in group]
    for tensor in listed:
        if not isinstance(tensor, torch.Tensor):
            raise ValueError(f"groups must consist of tensors only, but contain a {type(tensor).__name__}: {tensor!r}")
    if len({id(tensor) for tensor in listed}) < len(listed):
        raise ValueError("a tensor can only appear once in groups, but at least one appears more than once")
    return found


def is_zero_redundancy(optimizer: Any) -> bool:
    """Return whether this is torch's ZeroRedundancyOptimizer. Its module, slow to import, is only looked up."""
    module = sys.modules.get("torch.distributed.optim")
    return module is not None and isinstance(optimizer, module.ZeroRedundancyOptimizer)
