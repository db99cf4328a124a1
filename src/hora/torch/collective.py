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

from torch import Tensor, empty_like, is_inference_mode_enabled, strided
from torch.autograd.graph import increment_version

from hora import engine
from hora.engine.queue import OperationQueue
from hora.engine.repeated import AllreducePlan
from hora.engine.request import Kind, Reduce, ReduceOp, Request, Signature
from hora.errors import HorovodInternalError
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id

__all__ = [
    "Collective",
    "Tensors",
    "forget_handles",
    "poll",
    "repeated_allreduce",
    "run",
    "submit",
    "submit_repeated_allreduce_",
    "synchronize",
]

_KEPT = 4096

Tensors = tuple[Tensor, ...]


class Collective(NamedTuple):
    """A collective as the user asked for it. (A named tuple: a frozen dataclass takes thrice the time.)"""

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


def submit_repeated_allreduce_(
    tensor: Tensor, name: str | None, op: int | None, prescale: float, postscale: float, process_set: ProcessSet
) -> int | None:
    """Start an allreduce in place like one before; None for any other. Flat, because programs start thousands."""
    runtime = engine.current_runtime()
    known = _known(runtime, tensor, name, op, prescale, postscale, process_set)
    if known is None or not tensor.is_cpu:
        return None
    request = Request(known.signature, (tensor,), (tensor,))
    request.results = [tensor]
    handle = runtime.put_in_flight(known.queue, request)
    _in_flight[handle] = known.collective
    return handle


def run(collective: Collective, tensors: Sequence[Tensor], *, in_place: bool = False) -> Tensors:
    """Carry out a collective: the calling thread drives it, which saves a change of threads."""
    handle = _hand_over(collective, tensors, in_place, background=False)
    outputs = engine.current_runtime().synchronize(handle)
    if not outputs:
        raise HorovodInternalError("Horovod has been shut down by another thread of this process")
    return _results(collective, outputs)


def repeated_allreduce(
    tensor: Tensor,
    in_place: bool,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> Tensor | None:
    """An allreduce like one before, by the fast path (`hora.engine.repeated`); None if it has to go the ordinary way.

    Flat, because this is done for every operation: what the arguments mean is found out once.
    """
    runtime = engine.current_runtime()
    known = _known(runtime, tensor, name, op, prescale, postscale, process_set)
    if known is None:
        return None
    plan = known.plan
    if plan is None:
        plan = known.plan = runtime.repeated_plan(known.queue, known.signature)
        if plan is None:
            return None
    if not in_place:
        out = empty_like(tensor)
        return out if plan.path.allreduce(plan, tensor, out) else None
    if not plan.path.allreduce(plan, tensor, tensor):
        return None
    increment_version(tensor)  # bytes were moved behind autograd's back
    return tensor


class _KnownAllreduce:
    """The common part of allreduces of one tensor like one that the engine has seen."""

    def __init__(self, queue: OperationQueue, signature: Signature, process_set: ProcessSet) -> None:
        self.queue, self.signature = queue, signature
        op, prescale, postscale, _ = signature.reduce
        self.collective = Collective(Kind.ALLREDUCE, signature.name, process_set, op, prescale, postscale)
        self.plan: AllreducePlan | None = None  # of the fast path, once there is one


def _known(
    runtime: engine.Runtime,
    tensor: Tensor,
    name: str | None,
    op: int | None,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
) -> _KnownAllreduce | None:
    """Return the common part of calls like this one; None if there has been none, or bytes may not be moved to and
    from the tensor as it is."""
    try:
        device, set_id = tensor.device, process_set.process_set_id
        key = tensor.shape, tensor.dtype, device, name, op, type(op), prescale, postscale, set_id
        known: _KnownAllreduce | None = runtime.known_allreduces.get(key)
    except (AttributeError, TypeError):  # no tensor, no process set: the ordinary way says so
        return None
    if (
        type(tensor) is not Tensor
        or tensor.layout is not strided
        or tensor.requires_grad
        or not tensor.is_contiguous()
        or tensor.is_inference()
        or is_inference_mode_enabled()
        or not (tensor.is_cpu or tensor.is_cuda)
    ):
        return None
    return known or _learn(runtime, key, tensor, process_set)


def _learn(runtime: engine.Runtime, key: Any, tensor: Tensor, process_set: ProcessSet) -> _KnownAllreduce | None:
    """Keep what calls like this one have in common, if there has been one; bad arguments never have."""
    _, _, _, name, op, _, prescale, postscale, _ = key
    if not isinstance(name, (str, NoneType)):
        return None
    wanted = int(ReduceOp.AVERAGE) if op is None else _whole_number(op, "op")
    if wanted == ReduceOp.ADASUM:
        return None
    queue = runtime.queue(registered_id(process_set))
    signature = queue.validator.known_allreduce(tensor, name, Reduce(wanted, float(prescale), float(postscale)))
    if signature is None:
        return None
    if len(runtime.known_allreduces) >= _KEPT:
        runtime.known_allreduces.clear()
    known = runtime.known_allreduces[key] = _KnownAllreduce(queue, signature, process_set)
    return known


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
    """Return whether `synchronize(handle)` would return at once. ValueError for a handle that is not in use."""
    if not engine.is_initialized():
        raise ValueError(f"handle {handle} does not exist: Horovod has not been initialized; use hvd.init().")
    return engine.current_runtime().poll(handle)


def forget_handles() -> None:
    """Forget all handles: a new runtime numbers them anew."""
    _in_flight.clear()


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
        reduce=Reduce(_whole_number(op, "op"), float(prescale), float(postscale), code),
        root_rank=_whole_number(root_rank, "root_rank"),
        splits=splits,
        process_set_id=registered_id(process_set),
        grouped=grouped,
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
