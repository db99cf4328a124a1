"""A collective as the fronts describe it, its way into the engine, and what comes back.

Every front of `ops`, every gradient of `autograd` and `sparse` fill in a `Collective` and hand it, with tensors, to
`submit` (a handle, at once) or `run` (the results). The engine checks the arguments; only the shape of the result is
remembered here, which the engine need not know.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor

from hora import engine
from hora.engine.request import Kind, ReduceOp
from hora.errors import HorovodInternalError
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id

__all__ = ["Collective", "Tensors", "forget_handles", "poll", "run", "submit", "synchronize"]

Tensors = tuple[Tensor, ...]


class Collective(NamedTuple):
    """What is to be done with tensors, in the user's words. (A named tuple: a frozen dataclass takes thrice the time.)"""

    kind: Kind
    name: str | None = None
    process_set: ProcessSet = global_process_set
    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = -1  # a global one
    splits: Tensor | Sequence[int] | None = None
    grouped: bool = False
    code: str = ""  # see `Signature`


# What the user's handles stand for.
_in_flight: dict[int, Collective] = {}


def submit(collective: Collective, tensors: Sequence[Tensor], *, in_place: bool = False) -> int:
    """Start a collective, which the engine's background thread drives; returns its handle."""
    handle = _hand_over(collective, tensors, in_place, background=True)
    _in_flight[handle] = collective
    return handle


def run(collective: Collective, tensors: Sequence[Tensor], *, in_place: bool = False) -> Tensors:
    """Carry out a collective: the calling thread drives it, which saves a change of threads."""
    if collective.kind is Kind.ALLREDUCE and not collective.grouped and len(tensors) == 1:
        result = _allreduce_alone(collective, tensors[0], in_place)
        if result is not None:
            return (result,)
    handle = _hand_over(collective, tensors, in_place, background=False)
    outputs = engine.current_runtime().synchronize(handle)
    if not outputs:
        raise HorovodInternalError("Horovod has been shut down by another thread of this process")
    return _results(collective, outputs)


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result; None for a handle that is not in use."""
    try:
        outputs = engine.current_runtime().synchronize(handle)
    finally:
        collective = _in_flight.pop(handle, None)
    if not outputs or collective is None:
        return None
    results = _results(collective, outputs)
    return results if collective.grouped or len(results) > 1 else results[0]


def poll(handle: int) -> bool:
    """Whether `synchronize(handle)` would return at once. ValueError for a handle that is not in use."""
    if not engine.is_initialized():
        raise ValueError(f"handle {handle} does not exist: Horovod has not been initialized; use hvd.init().")
    return engine.current_runtime().poll(handle)


def forget_handles() -> None:
    """Forget all handles: a new runtime numbers them anew."""
    _in_flight.clear()


def _allreduce_alone(collective: Collective, tensor: Tensor, in_place: bool) -> Tensor | None:
    """The short way, for what the engine has seen before; None if it has to go the ordinary one."""
    _, name, process_set, op, prescale, postscale, *_ = collective
    if type(tensor) is not Tensor or not isinstance(name, (str, NoneType)):
        return None
    return engine.current_runtime().allreduce_alone(
        tensor,
        in_place=in_place,
        name=name,
        op=_whole_number(op, "op"),
        prescale=float(prescale),
        postscale=float(postscale),
        process_set_id=registered_id(process_set),
    )


def _hand_over(collective: Collective, tensors: Sequence[Tensor], in_place: bool, *, background: bool) -> int:
    kind, name, process_set, op, prescale, postscale, root_rank, splits, grouped, code = collective
    runtime = engine.current_runtime()
    if name is not None and not isinstance(name, str):
        raise ValueError(f"the name of a collective must be a string, but it is {type(name).__name__}: {name!r}")
    return runtime.submit(
        kind,
        tensors,
        outputs=tensors if in_place else None,
        name=name,
        op=_whole_number(op, "op"),
        prescale=float(prescale),
        postscale=float(postscale),
        root_rank=_whole_number(root_rank, "root_rank"),
        splits=splits,
        process_set_id=registered_id(process_set),
        grouped=grouped,
        code=code,
        background=background,
    )


def _whole_number(value: int, what: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise ValueError(f"{what} must be a whole number, but it is {type(value).__name__}: {value!r}") from None


def _results(collective: Collective, outputs: Sequence[Tensor]) -> Tensors:
    splits = collective.splits
    if isinstance(splits, Tensor) and not splits.is_cpu:
        output, received = outputs
        return output, received.to(splits.device)
    return tuple(outputs)
