"""The objects of a training: their tensors by name, which are sharded or the same on all ranks, and other values.

Names do not depend on the world: `model/0.weight`, `optimizer/model/0.weight/exp_avg`. The state of an optimizer is
read directly. `torch.distributed.checkpoint.state_dict` would make a step with an optimizer that has not made one.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from hora.torch.optimizer.parameters import is_zero_redundancy

_MOST_NAMED = 3  # in an error message


class Attached:
    """Models, optimizers, and objects with `state_dict` and `load_state_dict`, by name."""

    def __init__(self, objects: Mapping[str, Any]) -> None:
        self._models = {name: one for name, one in objects.items() if isinstance(one, torch.nn.Module)}
        self._optimizers = {name: one for name, one in objects.items() if isinstance(one, torch.optim.Optimizer)}
        self._others = {
            name: one for name, one in objects.items() if name not in self._models and name not in self._optimizers
        }
        for name, one in self._others.items():
            if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
                raise ValueError(
                    f"state.attach({name}=…) needs an object with state_dict and load_state_dict, but it is a "
                    f"{type(one).__name__}; give plain values to the state: ShardedState({name}=…)"
                )
        self._names: dict[torch.Tensor, str] = {
            parameter: f"{name}/{path}"
            for name, model in self._models.items()
            for path, parameter in model.named_parameters()
        }
        for name, optimizer in self._optimizers.items():
            self._check_parameters(name, optimizer)

    def _check_parameters(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        if is_zero_redundancy(optimizer) and not hasattr(optimizer, "optim"):
            raise ValueError(f"state.attach({name}=…): make the ZeroRedundancyOptimizer without overlap_with_ddp=True")
        if not all(parameter in self._names for parameter in _parameters_of(optimizer.param_groups)):
            raise ValueError(
                f"state.attach({name}=…): the {type(optimizer).__name__} has parameters of no attached model. Attach "
                "all models, and make the optimizer after fully_shard, which replaces parameters"
            )

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name: this rank's, which alias the objects' memory."""
        found: dict[str, torch.Tensor] = {}
        for name, model in self._models.items():
            items = model.state_dict().items()
            found |= {f"{name}/{path}": value for path, value in items if isinstance(value, torch.Tensor)}
        for name, optimizer in self._optimizers.items():
            state = _local(optimizer).state
            for parameter in _parameters_of(_local(optimizer).param_groups):
                for key, value in state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor):
                        found[f"{name}/{self._names[parameter]}/{key}"] = value
        return found

    def values(self) -> dict[str, Any]:
        """Return everything that is no tensor by name."""
        return {
            "models": {name: _extra_state(model) for name, model in self._models.items()},
            "optimizers": {name: self._options(optimizer) for name, optimizer in self._optimizers.items()},
            "others": {name: one.state_dict() for name, one in self._others.items()},
        }

    def _options(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        state = _local(optimizer).state
        values = {
            self._names[parameter]: {k: v for k, v in state[parameter].items() if not isinstance(v, torch.Tensor)}
            for parameter in _parameters_of(_local(optimizer).param_groups)
            if parameter in state
        }
        groups = [
            {key: value for key, value in group.items() if key != "params"}
            | {"params": [self._names[parameter] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        return {"groups": groups, "values": values}

    def targets(self, metadata: Metadata, values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the tensors to load a commit into, by name: models' own, and new ones for optimizers' state.

        Raises ValueError if the commit belongs to other objects.
        """
        stored: dict[str, TensorStorageMetadata] = dict(metadata.state_dict_metadata)  # type: ignore[arg-type]
        self._check_objects(values)
        found: dict[str, torch.Tensor] = {}
        for name, model in self._models.items():
            mine = {f"{name}/{k}": v for k, v in model.state_dict().items() if isinstance(v, torch.Tensor)}
            _check_alike(name, {path: v.shape for path, v in mine.items()}, stored)
            found |= mine
        for name, optimizer in self._optimizers.items():
            for parameter in _parameters_of(_local(optimizer).param_groups):
                prefix = f"{name}/{self._names[parameter]}/"
                keys = [key for key in stored if key.startswith(prefix) and "/" not in key.removeprefix(prefix)]
                found |= {key: _empty(stored[key], parameter) for key in keys}
        return found

    def _check_objects(self, values: Mapping[str, Any]) -> None:
        mine: dict[str, Mapping[str, Any]] = {
            "models": self._models,
            "optimizers": self._optimizers,
            "others": self._others,
        }
        for kind, objects in mine.items():
            if set(objects) != set(values[kind]):
                raise ValueError(
                    f"state.attach: the last commit has other objects: its {kind} are {sorted(values[kind])}, here "
                    f"they are {sorted(objects)}; attach the same in every world"
                )

    @torch.no_grad()
    def load(self, tensors: Mapping[str, torch.Tensor], values: Mapping[str, Any]) -> None:
        """Adopt a commit: `tensors` are the targets, filled."""
        for name, model in self._models.items():
            if values["models"][name]:
                model.load_state_dict(values["models"][name], strict=False)
        for name, optimizer in self._optimizers.items():
            self._load_optimizer(name, optimizer, tensors, values["optimizers"][name])
        for name, one in self._others.items():
            one.load_state_dict(copy.deepcopy(values["others"][name]))

    def _load_optimizer(
        self, name: str, optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor], saved: dict[str, Any]
    ) -> None:
        mine = [[self._names[parameter] for parameter in group["params"]] for group in optimizer.param_groups]
        if mine != [group["params"] for group in saved["groups"]]:
            raise ValueError(
                f"state.attach({name}=…): the last commit's optimizer has other groups of parameters; make the same "
                "optimizer in every world"
            )
        for group, its in zip(optimizer.param_groups, saved["groups"], strict=True):
            group.update({key: value for key, value in copy.deepcopy(its).items() if key != "params"})
        local = _local(optimizer)
        local.state.clear()
        for parameter in _parameters_of(local.param_groups):
            prefix = f"{name}/{self._names[parameter]}/"
            state = {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}
            state |= copy.deepcopy(saved["values"].get(self._names[parameter], {}))
            if state:
                local.state[parameter] = state


def merged(values: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the values of a commit: the first rank's, with the optimizers' values of parameters of all ranks."""
    first, *others = values
    result: dict[str, Any] = copy.deepcopy(dict(first))
    for other in others:
        for name, options in other["optimizers"].items():
            result["optimizers"][name]["values"] = options["values"] | result["optimizers"][name]["values"]
    return result


def _local(optimizer: Any) -> Any:
    """Return the optimizer that has the state: a ZeroRedundancyOptimizer's has that of its rank's parameters."""
    return optimizer.optim if is_zero_redundancy(optimizer) else optimizer


def _parameters_of(groups: Iterable[Mapping[str, Any]]) -> list[torch.Tensor]:
    return [parameter for group in groups for parameter in group["params"]]


def _extra_state(model: torch.nn.Module) -> dict[str, Any]:
    return {key: value for key, value in model.state_dict().items() if not isinstance(value, torch.Tensor)}


def _empty(stored: TensorStorageMetadata, parameter: torch.Tensor) -> torch.Tensor:
    """Return a tensor for a part of an optimizer's state: sharded as its parameter is if it has dimensions."""
    dtype = stored.properties.dtype
    if isinstance(parameter, DTensor) and len(stored.size):
        mesh, placements = parameter.device_mesh, parameter.placements
        return empty_dtensor(*stored.size, dtype=dtype, device_mesh=mesh, placements=placements)
    # Counters of steps are on the CPU, unless the optimizer is made to run in a CUDA graph.
    device = parameter.device if len(stored.size) else "cpu"
    return torch.empty(stored.size, dtype=dtype, device=device)


def _check_alike(name: str, mine: Mapping[str, torch.Size], stored: Mapping[str, TensorStorageMetadata]) -> None:
    """Raise ValueError if a model's tensors have other names or shapes than the commit's."""
    saved = {path: meta.size for path, meta in stored.items() if path.startswith(f"{name}/")}
    differing = sorted(path for path in saved.keys() | mine.keys() if saved.get(path) != mine.get(path))
    if differing:
        shown = ", ".join(
            f"{path} was {_shape(saved.get(path))} and is {_shape(mine.get(path))}" for path in differing[:_MOST_NAMED]
        )
        raise ValueError(
            f"state.attach({name}=…): the model does not fit the last commit: {len(differing)} of its tensors differ "
            f"({shown}); build the same model in every world"
        )


def _shape(size: torch.Size | None) -> str:
    return "absent" if size is None else str(list(size))
