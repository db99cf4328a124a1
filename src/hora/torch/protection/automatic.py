"""Protection without a line in the program: HORA_ELASTIC_PER_STEP=1 protects DDP models of any training loop.

For loops inside packages, such as Accelerate's, the Hugging Face Trainer's and Lightning's. A model is noticed when it
is wrapped, and protected before its first training pass, with the optimizers that have its parameters by then.
Newcomers cannot enter: only the program could take them to the others' place in its loop. A model of another backend
cannot be protected at all, so it is refused.
"""

from __future__ import annotations

import gc
import logging
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel

from hora import engine
from hora.config import EngineConfig
from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.elastic.state import notification_manager
from hora.torch.protection.models import is_training_pass
from hora.torch.protection.protect import begin_loop, end_loop, is_protected
from hora.version import page
from hora.world import World

log = logging.getLogger("hora")

# The models that have not begun to train, and how their hooks are removed.
_waiting: weakref.WeakKeyDictionary[DistributedDataParallel, Any] = weakref.WeakKeyDictionary()
_is_watching = False


def watch_models(world: World) -> None:
    """Notice every model that is wrapped in DDP from now on, if the job is elastic and asks for it."""
    global _is_watching
    if not _is_watching and engine.has_elastic_launcher(world) and EngineConfig.from_env().elastic_per_step:
        _is_watching = True
        register_module_module_registration_hook(_notice)


def _notice(model: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
    if isinstance(model, DistributedDataParallel) and model not in _waiting and module is not None:
        _waiting[model] = model.register_forward_pre_hook(_before_forward, with_kwargs=True)


def _before_forward(model: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> None:
    if not is_training_pass(model):
        return
    ready = [one for one in _waiting if isinstance(getattr(one, "process_group", None), HoraProcessGroup)]
    for one in (model, *ready):
        handle = _waiting.pop(one, None)  # type: ignore[call-overload]
        if handle is not None:
            handle.remove()
    if model not in ready:
        _refuse(model)
    if model not in ready or is_protected(model):
        return
    end_loop()  # of earlier models
    if notification_manager.has_listeners:  # `run` looks after the loop
        return
    if engine.is_newcomer():
        raise RuntimeError(
            "HORA_ELASTIC_PER_STEP=1 protects a loop that does not know of it, so a newcomer cannot find the place "
            "that the other ranks have reached in it. Start the job without --spares, --blacklist-cooldown-range and "
            "--host-discovery-script, or write the loop yourself and call hora.elastic.protect (see docs/elastic.md)"
        )
    try:
        begin_loop(ready, _optimizers_of(ready), at=(model, inputs, named))
    except ValueError as error:
        log.warning("HORA_ELASTIC_PER_STEP=1: the death of a rank will end the job: %s", error)


def _refuse(model: Any) -> None:
    """Raise ValueError for a model of another backend, unless `hvd` trains another one in this process."""
    backend = dist.get_backend(getattr(model, "process_group", None))
    if not engine.is_initialized():
        raise ValueError(
            f'HORA_ELASTIC_PER_STEP=1 protects models on the backend "hora", but this one is on "{backend}", where the '
            'death of a rank ends the job: use init_process_group("hora"), start the job with --replace-gloo, or leave '
            f"the variable out (see {page('elastic.md')})"
        )


def _optimizers_of(models: list[DistributedDataParallel]) -> list[torch.optim.Optimizer]:
    """Return the optimizers that have parameters of these models, without those that wrap another one."""
    parameters = {p for model in models for p in model.parameters()}
    # By type: some objects warn, or do worse, when they are asked for their class.
    found: list[Any] = [one for one in gc.get_objects() if issubclass(type(one), torch.optim.Optimizer)]
    inner = [one for one in found if not isinstance(getattr(one, "optimizer", None), torch.optim.Optimizer)]
    return [one for one in inner if not parameters.isdisjoint(p for group in one.param_groups for p in group["params"])]
