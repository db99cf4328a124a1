"""From a front's call to an engine handle, and from a finished handle to what the user gets.

Every collective of `ops` and every backward of `autograd` goes through `start` and `synchronize`. Arguments
are checked by the engine; here only the shape of the result is remembered, which the engine need not know.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch

from hora import engine
from hora.engine.request import Kind, ReduceOp
from hora.torch.process_sets import ProcessSet, global_process_set

__all__ = ["clear", "poll", "registered_id", "run", "start", "synchronize"]

# How to make the result from the engine's outputs, for handles that need more than the one tensor.
_finish: dict[int, Callable[[list[torch.Tensor]], Any]] = {}


def start(
    kind: Kind,
    tensors: Sequence[torch.Tensor],
    *,
    in_place: bool = False,
    grouped: bool = False,
    name: str | None = None,
    op: int = ReduceOp.SUM,
    prescale: float = 1.0,
    postscale: float = 1.0,
    root_rank: int = -1,
    splits: torch.Tensor | Sequence[int] | None = None,
    process_set: ProcessSet = global_process_set,
    background: bool = True,
) -> int:
    """Submit one collective; returns its handle. Without `background` only `synchronize` drives it."""
    runtime = engine.current_runtime()
    if name is not None and not isinstance(name, str):
        raise ValueError(f"the name of a collective must be a string, but it is {type(name).__name__}: {name!r}")
    handle = runtime.submit(
        kind,
        tensors,
        outputs=tensors if in_place else None,
        name=name,
        op=_number(op, "op"),
        prescale=float(prescale),
        postscale=float(postscale),
        root_rank=_number(root_rank, "root_rank"),
        splits=splits,
        process_set_id=registered_id(process_set),
        grouped=grouped,
        background=background,
    )
    if grouped:
        _finish[handle] = tuple
    elif isinstance(splits, torch.Tensor) and not splits.is_cpu:
        device = splits.device
        _finish[handle] = lambda outputs: (outputs[0], outputs[1].to(device))
    return handle


def run(kind: Kind, tensors: Sequence[torch.Tensor], **arguments: Any) -> Any:
    """`start` and `synchronize` in one: the calling thread does the work, which saves a change of threads."""
    return synchronize(start(kind, tensors, background=False, **arguments))


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result; None for a handle that is not in use."""
    try:
        outputs = engine.current_runtime().synchronize(handle)
    finally:
        finish = _finish.pop(handle, None)
    if not outputs:
        return None
    if finish is not None:
        return finish(outputs)
    return outputs[0] if len(outputs) == 1 else tuple(outputs)


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. ValueError for a handle that is not in use."""
    if not engine.is_initialized():
        raise ValueError(f"handle {handle} does not exist: Horovod has not been initialized; use hvd.init().")
    return engine.current_runtime().poll(handle)


def _number(value: int, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be a whole number, but it is {type(value).__name__}: {value!r}") from None


def clear() -> None:
    """Forget all handles: a new engine numbers them anew."""
    _finish.clear()


def registered_id(process_set: ProcessSet) -> int:
    """The engine's id of the set; ValueError if it has none."""
    if not isinstance(process_set, ProcessSet):
        what = f"{type(process_set).__name__}: {process_set!r:.100}"
        raise ValueError(f"process_set must be a ProcessSet, but it is {what}")
    if process_set.process_set_id is None:
        raise ValueError(
            f"Process set with ranks {process_set.ranks} does not exist, or has not been registered; pass it "
            "to hvd.init(process_sets=…) or hvd.add_process_set()"
        )
    return process_set.process_set_id
