"""`protect`: a DDP training loop that loses no step to a death, under an elastic launcher."""

from __future__ import annotations

import atexit
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from hora import engine
from hora.platforms.detect import detect_world
from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.elastic.handlers import ElasticSampler
from hora.torch.elastic.state import notification_manager
from hora.torch.optimizer.parameters import is_zero_redundancy
from hora.torch.protection.calls import Call
from hora.torch.protection.guard import Guard
from hora.torch.protection.models import ProtectedModel, digest_of
from hora.torch.protection.newcomers import Belongings
from hora.torch.protection.protection import Protection
from hora.torch.untraced import leave_untraced
from hora.version import page

_active: list[_ProtectedLoop] = []


def protect(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    scheduler: Any = None,
    sampler: Any = None,
) -> None:
    """Protect a DDP training: when ranks die, the others complete the same step, and newcomers join between two steps.

    Call it once on every rank, before the loop. Without an elastic launcher (`hora run --min-np`) it does nothing.

    Args:
        model: A `DistributedDataParallel` on the backend "hora", or a list of them.
        optimizer: The optimizer of its parameters, or a list.
        scheduler: What newcomers get besides: anything with `state_dict` and `load_state_dict`, or a list.
        sampler: A `hora.elastic.ElasticSampler`, or a list: newcomers get its epoch and position, and each epoch is
            divided among the ranks that are there when it begins.

    Raises:
        ValueError: If the loop cannot be protected, on every rank alike, with what to change.
    """
    world = engine.current_runtime().world if engine.is_initialized() else detect_world()
    if not engine.has_elastic_launcher(world):
        if world.launcher == "hora" and world.size > 1:
            raise ValueError(
                "hora.elastic.protect: this job has a fixed size, in which a death ends all ranks; start it with "
                f"--min-np, such as: hora run -np {world.size} --min-np {max(world.size // 2, 1)} python train.py"
            )
        return
    begin_loop(_listed(model), _listed(optimizer), scheduler, sampler)


def begin_loop(
    models: Sequence[Any],
    optimizers: Sequence[Any],
    scheduler: Any = None,
    sampler: Any = None,
    *,
    at: tuple[torch.nn.Module, Any, dict[str, Any]] | None = None,
) -> None:
    """Protect these models. `at`: the training pass that begins just now, of a model with its inputs."""
    models, optimizers = _checked_models(models), _checked_optimizers(optimizers)
    _check_parameters(models, optimizers)
    if _active:
        raise ValueError(
            "hora.elastic.protect was called twice in this process: call it once, with lists of all models and "
            "optimizers: protect([first, second], [optimizer_1, optimizer_2])"
        )
    belongings = Belongings(models, optimizers, _with_state(scheduler), _checked_samplers(sampler))
    loop = _ProtectedLoop(models, optimizers, belongings)
    loop.begin()
    _active.append(loop)
    if at is not None:
        loop.begin_pass(*at)


def end_loop() -> None:
    """End the protection of this process's loop, if there is one (collective)."""
    for loop in list(_active):
        loop.end()


def is_protected(model: torch.nn.Module) -> bool:
    """Return whether this model belongs to a protected loop."""
    return any(model is one.model for loop in _active for one in loop.models)


class _ProtectedLoop:
    """The training loop of this process."""

    def __init__(
        self,
        models: Sequence[DistributedDataParallel],
        optimizers: Sequence[torch.optim.Optimizer],
        belongings: Belongings,
    ) -> None:
        group: Any = models[0].process_group
        self._group: HoraProcessGroup = group
        digest = digest_of(models, optimizers)
        self._protection = Protection(self._group, digest, self._teach, self._learn, belongings.samplers)
        self._guard = Guard(self._group, self._protection)
        self.models = [ProtectedModel(model, self._protection, self._begin_pass) for model in models]
        self.models[0].on_rows = belongings.use
        self._optimizers, self._belongings = optimizers, belongings
        self._waiting_for = set[torch.optim.Optimizer]()  # optimizers that step before this step is over

    def begin(self) -> None:
        self._protection.enter()
        engine.admit_later()
        self._handles = [optimizer.register_step_post_hook(self._stepped) for optimizer in self._optimizers]
        notification_manager.init()
        notification_manager.register_listener(self._protection)  # type: ignore[arg-type]
        leave = self._group.shutdown

        def shutdown() -> None:
            self.end()
            leave()

        group: Any = self._group
        group.shutdown = shutdown
        self._group.comparisons.models.clear()  # they count the group's calls, of which a newcomer has made fewer
        leave_untraced()  # the hooks of a compiled model are no part of its graph
        for model in self.models:
            model.hook()
        self._guard.put_up()
        atexit.register(self._end_at_exit)

    def begin_pass(self, model: torch.nn.Module, inputs: Any, named: dict[str, Any]) -> None:
        """Begin a training pass of a model for which its hook was attached too late."""
        next(one for one in self.models if one.model is model).before_forward(model, inputs, named)

    def _begin_pass(self) -> None:
        """Called before each training pass: the first one after all optimizers have stepped begins a step."""
        if not self._waiting_for:
            self._waiting_for = set(self._optimizers)
            self._protection.pass_boundary(admits=all(model.has_final_buckets for model in self.models))

    def _stepped(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._waiting_for.discard(optimizer)

    def _teach(self, among: HoraProcessGroup) -> None:
        self._belongings.exchange(among, self.models, root=0)

    def _learn(self, among: HoraProcessGroup) -> None:
        self._protection.consumed = self._belongings.exchange(among, self.models, root=0)
        self._waiting_for = set()

    def end(self) -> None:
        """Wait until every rank has completed its training: a rank may need results of this one until then."""
        if self not in _active:
            return
        _active.remove(self)
        call = Call(lambda: type(self._group).barrier(self._group), [])
        self._protection.start(call)
        self._protection.finish(call)
        self._guard.take_down()
        for handle in self._handles:
            handle.remove()
        self._group.__dict__.pop("shutdown", None)
        notification_manager.remove_listener(self._protection)  # type: ignore[arg-type]

    def _end_at_exit(self) -> None:
        failed = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        if failed is None and engine.is_initialized():
            self.end()


def _listed(value: Any) -> list[Any]:
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _with_state(scheduler: Any) -> list[Any]:
    for one in _listed(scheduler):
        if not hasattr(one, "state_dict") or not hasattr(one, "load_state_dict"):
            raise ValueError(
                "hora.elastic.protect: the scheduler must have state_dict and load_state_dict, by which newcomers get "
                f"its state, but it is a {type(one).__name__}"
            )
    return _listed(scheduler)


def _checked_samplers(sampler: Any) -> list[ElasticSampler]:
    for one in _listed(sampler):
        if not isinstance(one, ElasticSampler):
            raise ValueError(
                "hora.elastic.protect: the sampler must be a hora.elastic.ElasticSampler, which newcomers can enter "
                f"in the middle of an epoch, but it is a {type(one).__name__}: use ElasticSampler(dataset)"
            )
    return _listed(sampler)


def _checked_models(models: Sequence[Any]) -> list[DistributedDataParallel]:
    found = [getattr(model, "_orig_mod", model) for model in models]  # of a compiled one
    for model in found:
        if not isinstance(model, DistributedDataParallel):
            raise ValueError(
                f"hora.elastic.protect takes models in torch.nn.parallel.DistributedDataParallel, but this one is a "
                f"{type(model).__name__}: wrap it before the call; for fully_shard and others use @hora.elastic.run "
                f"(see {page('elastic.md')})"
            )
    if not found:
        raise ValueError("hora.elastic.protect needs a model: protect(model, optimizer)")
    for model in found:
        _check_model(model, found[0])
    return found


def _check_model(model: DistributedDataParallel, first: DistributedDataParallel) -> None:
    group: Any = model.process_group
    refused = {
        'has a process group of another backend: use init_process_group("hora")': not isinstance(
            group, HoraProcessGroup
        ),
        "has another process group than the first: give all models the default group": group is not first.process_group,
        "has a group of only some ranks: give it the default group": isinstance(group, HoraProcessGroup)
        and group.size() != len(group.runtime.workers),
        "has a hook for its communication, which compresses or delays gradients: leave register_comm_hook out": bool(
            getattr(model, "_comm_hooks", ())
        ),
        "was made with mixed_precision=…: use torch.autocast": getattr(model, "mixed_precision", None) is not None,
        "was made with delay_all_reduce_named_params=…: leave it out": bool(
            getattr(model, "_delay_all_reduce_params", ())
        )
        or getattr(model, "_delay_all_reduce_all_params", False),
        'is compiled with torch._dynamo.config.optimize_ddp = "python_reducer": leave that out': getattr(
            model, "_use_python_reducer", False
        ),
        "has sparse gradients: use Embedding(sparse=False)": any(
            getattr(module, "sparse", False) is True for module in model.modules()
        ),
    }
    for what, applies in refused.items():
        if applies:
            raise ValueError(f"hora.elastic.protect: a model {what} (see {page('elastic.md')})")


def _checked_optimizers(optimizers: Sequence[Any]) -> list[torch.optim.Optimizer]:
    if not optimizers:
        raise ValueError(
            "hora.elastic.protect needs the optimizer, too: its steps say where newcomers can join, and they get its "
            "state: protect(model, optimizer)"
        )
    for optimizer in optimizers:
        if is_zero_redundancy(optimizer):
            raise ValueError(
                "hora.elastic.protect: the shards of a ZeroRedundancyOptimizer die with their ranks; use a plain "
                f"optimizer, or @hora.elastic.run (see {page('elastic.md')})"
            )
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ValueError(
                f"hora.elastic.protect needs a torch.optim.Optimizer, but this one is a {type(optimizer).__name__}"
            )
    return list(optimizers)


def _check_parameters(models: Sequence[DistributedDataParallel], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    of_models = {p for model in models for p in model.parameters()}
    for optimizer in optimizers:
        its = {p for group in optimizer.param_groups for p in group["params"]}
        if its.isdisjoint(of_models):
            raise ValueError(
                f"hora.elastic.protect: the {type(optimizer).__name__} has no parameter of the given models; "
                "give it model.parameters()"
            )
