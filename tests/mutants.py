"""Mutants of elastic states: defects by name, of which each must be noticed by the tests that run it.

A mutant replaces one function in this process. `MUTANTS` says what it forgets; `mutated` puts it into effect.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock


def _nothing(*_: Any) -> None:
    pass


def _handlers() -> Any:
    from hora.torch.elastic import handlers

    return handlers


def _forgets(kind: str, what: str) -> Callable[[], Any]:
    return lambda: mock.patch.object(getattr(_handlers(), kind), what, _nothing)


def _values_forget(what: str) -> Callable[[], Any]:
    def patch() -> Any:
        from hora.torch.elastic.state import ObjectState

        return mock.patch.object(ObjectState, what, _nothing)

    return patch


def _loads_snapshots() -> Any:
    def restore(handler: Any) -> None:
        handler.value.load_state_dict(handler._saved)

    return mock.patch.object(_handlers().OptimizerStateHandler, "restore", restore)


def _keeps_references() -> Any:
    return mock.patch.object(_handlers(), "snapshot", lambda value, into: value)


def _oldest_step_wins() -> Any:
    from hora.torch.elastic.torch_state import TorchState

    inner = TorchState._sync_steps

    def sync(state: Any, last: Any, numbers: list[int]) -> None:
        inner(state, last, [min(numbers)] * len(numbers))

    return mock.patch.object(TorchState, "_sync_steps", sync)


def _every_rank_is_up_to_date() -> Any:
    from hora.torch.elastic.torch_state import TorchState

    inner = TorchState._sync_steps

    def sync(state: Any, last: Any, numbers: list[int]) -> None:
        inner(state, last, [max(numbers)] * len(numbers))

    return mock.patch.object(TorchState, "_sync_steps", sync)


def _last_step_forgets(what: str) -> Callable[[], Any]:
    def patch() -> Any:
        from hora.torch.elastic import last_step

        if what == "buffers":
            return mock.patch.object(last_step._Buffer, "roll_back", _nothing)
        return mock.patch.object(last_step.LastStep, "roll_back_generators", _nothing)

    return patch


def _optimizer_keeps_gradients() -> Any:
    from hora.torch.optimizer.hooks import _DistributedOptimizer
    from hora.torch.optimizer.step_state import StepState

    def discard_step(optimizer: Any) -> None:
        optimizer._step = StepState()

    return mock.patch.object(_DistributedOptimizer, "discard_step", discard_step)


def _passes_are_forgotten() -> Any:
    from hora.torch.optimizer.hooks import _DistributedOptimizer

    return mock.patch.object(_DistributedOptimizer, "resume_step", _nothing)


def _slices_are_not_copied() -> Any:
    from hora.torch.sharded.optimizer import SliceCopies

    def before_step(copies: Any) -> None:
        if copies._begun:
            copies._kinds = copies._state.kinds()
        copies._begun += 1
        copies._all_begun[copies.shards.member] = copies._begun

    return mock.patch.object(SliceCopies, "before_step", before_step)


# Noticed by trainings that go back to a commit.
OF_COMMITS: dict[str, Callable[[], Any]] = {
    "restore forgets the model": _forgets("ModelStateHandler", "restore"),
    "restore forgets the optimizer": _forgets("OptimizerStateHandler", "restore"),
    "restore forgets the sampler and the scheduler": _forgets("SamplerStateHandler", "restore"),
    "restore forgets the scaler": _forgets("ScalerStateHandler", "restore"),
    "restore forgets the values": _values_forget("restore"),
    "restore forgets the generators": _forgets("GeneratorStateHandler", "restore"),
    "restore keeps the failed step's gradients": _optimizer_keeps_gradients,
    "restore forgets the passes before the commit": _passes_are_forgotten,
    "restore loads the snapshot, not a copy": _loads_snapshots,
    "save keeps references": _keeps_references,
    "sync forgets the model": _forgets("ModelStateHandler", "broadcast"),
    "sync forgets the optimizer": _forgets("OptimizerStateHandler", "broadcast"),
    "sync forgets the sampler and the scheduler": _forgets("SamplerStateHandler", "broadcast"),
    "sync forgets the scaler": _forgets("ScalerStateHandler", "broadcast"),
    "sync forgets the values": _values_forget("sync"),
    "sync forgets the generators": _forgets("GeneratorStateHandler", "broadcast"),
}
# Noticed by trainings that go back to the last step.
OF_STEPS: dict[str, Callable[[], Any]] = {
    "vote: the oldest step wins": _oldest_step_wins,
    "vote: every rank counts as up to date": _every_rank_is_up_to_date,
    "copy forgets the model": _forgets("ModelStateHandler", "broadcast"),
    "copy forgets the optimizer": _forgets("OptimizerStateHandler", "broadcast"),
    "rollback forgets buffers": _last_step_forgets("buffers"),
    "rollback forgets generators": _last_step_forgets("generators"),
    "rollback forgets the values": _values_forget("restore"),
    "rollback forgets the sampler and the scheduler": _forgets("SamplerStateHandler", "restore"),
    "rollback keeps gradients": _optimizer_keeps_gradients,
}
# Noticed by those with a sharded optimizer.
OF_SLICES: dict[str, Callable[[], Any]] = {"copy of the slices is left out": _slices_are_not_copied}
MUTANTS = {**OF_COMMITS, **OF_STEPS, **OF_SLICES}


@contextlib.contextmanager
def mutated(name: str) -> Iterator[None]:
    """Put a mutant into effect."""
    with MUTANTS[name]():
        yield
