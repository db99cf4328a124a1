"""Ranks that train with torch's DistributedDataParallel on a group of Hora's compare, too, whether they stay equal.

The members of a group make the same calls in the same order, so its allreduces are the steps of its watches: each
model's is created with the model, which all members do together. Parameters are compared while gradients are reduced.
An optimizer of all the model's parameters adds its hyperparameters and steps. What it finds is raised, under
HORA_STRICT=1, by the next step of that optimizer on every rank.

Members that differ by intent abstain: torch's `Join`, `no_sync`, models that average parameters now and then
(`post_localSGD_hook`), parameters that DDP ignores. Buffers are left out: DDP sends rank 0's before every forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook

from hora.engine.request import Request
from hora.errors import DriftError
from hora.torch.drift.watch import DriftSettings, DriftWatch

_models: weakref.WeakKeyDictionary[DistributedDataParallel, _Model] = weakref.WeakKeyDictionary()
_watched: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Model | None] = weakref.WeakKeyDictionary()
_hooks: list[Any] = []


class _Model:
    """A model, its watch and, once it has stepped, its optimizer."""

    def __init__(self, model: DistributedDataParallel, watch: DriftWatch) -> None:
        self.model, self.watch = weakref.ref(model), watch
        self.optimizer: weakref.ref[torch.optim.Optimizer] | None = None
        self.error: DriftError | None = None

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parameters whose gradients DDP reduces; none once the model is gone."""
        model = self.model()
        if model is None:
            return []
        ignored = getattr(model, "parameters_to_ignore", ())
        return [(name, p) for name, p in model.module.named_parameters() if p.requires_grad and name not in ignored]

    def groups(self) -> Sequence[Mapping[str, Any]]:
        optimizer = None if self.optimizer is None else self.optimizer()
        return () if optimizer is None else optimizer.param_groups

    def differs_by_intent(self) -> bool:
        model = self.model()
        if model is None:
            return True
        joins = getattr(getattr(model, "_join_config", None), "enable", False)
        states = [type(state).__name__ for _, state in getattr(model, "_comm_hooks", ())]
        return bool(joins) or not model.require_backward_grad_sync or "PostLocalSGDState" in states


class Comparisons:
    """The watches of one process group. `finish` waits for a request within the group's timeout."""

    def __init__(self, process_set_id: int, finish: Callable[[Request], None]) -> None:
        self._process_set_id, self._finish = process_set_id, finish
        self.models: list[_Model] = []  # also those that are gone: they go at another time on every rank
        if not _hooks:
            _hooks.append(torch.nn.modules.module.register_module_module_registration_hook(_module_registered))
            _hooks.append(register_optimizer_step_post_hook(_optimizer_stepped))

    def add(self, model: DistributedDataParallel) -> None:
        """Watch a model (on all members, before its first reduction)."""
        watch = DriftWatch(
            f"ddp.{len(self.models)}", DriftSettings(), process_set_id=self._process_set_id, finish=self._finish
        )
        _models[model] = _Model(model, watch)
        self.models.append(_models[model])

    def reduces(self) -> None:
        """Count an allreduce of the group, and compare when it is time (collective then)."""
        for one in self.models:
            one.watch.abstains = one.differs_by_intent()
            try:
                one.watch.reduced(one.groups(), one.parameters())
            except DriftError as error:  # raised in the midst of backward, it would end the process
                one.error = error


def _module_registered(parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if name == "module" and isinstance(parent, DistributedDataParallel) and parent not in _models:
        comparisons = _comparisons_of(getattr(parent, "process_group", None))
        if comparisons is not None:
            comparisons.add(parent)


def _comparisons_of(group: Any) -> Comparisons | None:
    """Return those of a group of Hora's, whether torch wraps it or not."""
    if group is not None and not hasattr(group, "comparisons"):
        try:
            group = group._get_backend(torch.device("cpu"))
        except RuntimeError:  # it has no backend for the CPU
            return None
    found: Comparisons | None = getattr(group, "comparisons", None)
    return found


def _model_of(optimizer: torch.optim.Optimizer) -> _Model | None:
    """Return the model of the current world all of whose parameters this optimizer has."""
    its = {p for group in optimizer.param_groups for p in group["params"]}
    for one in list(_models.values()):
        parameters = {parameter for _, parameter in one.parameters()}
        if parameters and parameters <= its and one.watch.is_current:
            one.optimizer = weakref.ref(optimizer)
            return one
    return None


def _optimizer_stepped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    model = _watched.get(optimizer, ...)
    if model is ...:
        model = _watched[optimizer] = _model_of(optimizer)
    if isinstance(model, _Model):
        model.watch.applied(optimizer.param_groups)
        if model.error is not None:
            error, model.error = model.error, None
            raise error
