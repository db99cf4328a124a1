"""Aggregation of the gradients of a Keras 3 optimizer on the torch backend, with the hooks of `horovod.torch`.

From the second step on, gradients are reduced during backward, like those of a torch optimizer.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch

import hora.torch as hvd
from hora.keras.drift import StartCheck
from hora.keras.hyperparameters import compared_numbers, read_number
from hora.torch.elastic.passes import BegunStep
from hora.torch.process_sets import ProcessSet


class TorchAggregation(BegunStep):
    """Accumulates gradients over `passes` calls, then reduces them over the ranks and updates."""

    def __init__(self, options: dict[str, Any], passes: int, average: bool, scale_local: bool, on_drift: str) -> None:
        if passes <= 0:
            raise ValueError(f"backward_passes_per_step must be > 0, but it is {passes}")
        super().__init__()
        self._options = options | {"on_drift": on_drift}
        self._passes, self._average, self._scale_local = passes, average, scale_local
        self._hooked: Any = None
        self._parameters: list[torch.Tensor] = []
        self._sums: dict[int, torch.Tensor] = {}  # by the variable's id
        self._num_calls = 0
        self.local: dict[int, Any] = {}
        self.process_set: ProcessSet = options["process_set"]
        self._check = StartCheck(self.process_set, on_drift)
        if passes > 1:
            self.remember()

    def begun(self, read: Any) -> tuple[int, dict[int, Any]]:
        return self._num_calls % self._passes, {key: total.clone() for key, total in self._sums.items()}

    def resume(self, num_begun: int, sums: Mapping[int, Any], assign: Any) -> None:
        self._num_calls = num_begun
        self._sums = {key: total.clone() for key, total in sums.items()}

    def summed(self) -> Collection[int]:
        return self._sums.keys()

    def __call__(self, optimizer: Any, gradients: list[Any], variables: list[Any], update: Any) -> Any:
        """Take the gradients of one call; calls `update(gradients, variables)` once the step is complete."""
        self._num_calls += 1
        if self._passes > 1:
            self._add(gradients, variables)
            if self._num_calls % self._passes:
                optimizer._iterations.assign_add(1)
                return None
            gradients, self._sums = [self._sums.get(id(variable)) for variable in variables], {}
        with torch.no_grad():
            reduced = self._reduced(gradients, variables)
            return update(reduced, variables)

    def _add(self, gradients: list[Any], variables: list[Any]) -> None:
        scale = 1.0 / self._passes if self._average else 1.0
        for gradient, variable in zip(gradients, variables, strict=True):
            if id(variable) in self._sums and gradient is not None:
                self._sums[id(variable)].add_(gradient, alpha=scale)
            elif gradient is not None:
                self._sums[id(variable)] = gradient.detach() * scale

    def _reduced(self, gradients: list[Any], variables: list[Any]) -> list[Any]:
        members = self.process_set.size() or 1
        shared = []
        for i, (gradient, variable) in enumerate(zip(gradients, variables, strict=True)):
            if gradient is None:
                continue
            if id(variable) not in self.local:
                shared.append(i)
            elif self._scale_local:
                gradients[i] = gradient / members
        parameters = [variables[i].value for i in shared]
        if [id(parameter) for parameter in parameters] != [id(parameter) for parameter in self._parameters]:
            # Code that changes gradients before applying them, such as loss scaling, must get them before the
            # reduction.
            plain = all(parameter.grad is gradients[i] for parameter, i in zip(parameters, shared, strict=True))
            self._hook([variables[i] for i in shared], parameters, during_backward=plain and self._passes == 1)
        compare = self._check(parameters)
        if compare is not None:
            compare()
        if any(parameter.grad is not gradients[i] for parameter, i in zip(parameters, shared, strict=True)):
            # Not the gradients that backward left in the parameters: sums of several passes, or the first step.
            for parameter, i in zip(parameters, shared, strict=True):
                parameter.grad = gradients[i]
        if self._owner() is not None:  # for the comparison of ranks that may drift apart
            self._hooked.param_groups[0]["learning_rate"] = read_number(self._owner(), "learning_rate")
        self._hooked.synchronize()
        with self._hooked.skip_synchronize():
            self._hooked.step()  # changes nothing; the live page counts it
        for parameter, i in zip(parameters, shared, strict=True):
            gradients[i] = parameter.grad
        return gradients

    def _hook(self, variables: list[Any], parameters: list[torch.Tensor], *, during_backward: bool) -> None:
        """Create the torch optimizer whose hooks reduce; Keras makes the update itself."""
        if self._hooked is not None:
            self._hooked.remove_hooks()
        names = [(variable.path, parameter) for variable, parameter in zip(variables, parameters, strict=True)]
        options = dict(self._options)
        if isinstance(options["groups"], (list, tuple)):
            options["groups"] = [[variable.value for variable in group] for group in options["groups"]]
        self._parameters = parameters
        self._hooked = hvd.DistributedOptimizer(_NoUpdate(parameters), named_parameters=names, **options)
        self._hooked.param_groups[0].update(compared_numbers(self._owner()))
        if not during_backward:
            self._hooked.remove_hooks()


class _NoUpdate(torch.optim.Optimizer):
    """An optimizer that changes nothing."""

    def __init__(self, parameters: list[torch.Tensor]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        return None
