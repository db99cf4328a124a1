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
from hora.engine.process_sets import ProcessSets
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

_KEPT_PLANS = 4096

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
    try:
        key = (
            tensor.shape,
            tensor.dtype,
            tensor.layout,
            name,
            op,
            type(op),
            prescale,
            postscale,
            process_set.process_set_id,
        )
        known = runtime.process_sets.known_allreduces.get(key)
    except (AttributeError, TypeError):  # no tensor, no process set: the ordinary way says so
        return None
    if not tensor.is_cpu or not _is_plain(tensor):
        return None
    if known is None:
        found = _known(runtime.process_sets, key, tensor, process_set)
        if found is None:
            return None
        queue, signature = found
        collective = Collective(
            Kind.ALLREDUCE, name, process_set, signature.op, signature.prescale, signature.postscale
        )
        kept = runtime.process_sets.known_allreduces
        if len(kept) >= _KEPT_PLANS:
            kept.clear()
        known = kept[key] = (queue, signature, collective)
    queue, signature, collective = known
    request = Request(signature, (tensor,), (tensor,))
    request.results = [tensor]
    handle = runtime.put_in_flight(queue, request)
    _in_flight[handle] = collective
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
    sets = engine.current_runtime().process_sets
    try:
        key = (
            tensor.shape,
            tensor.dtype,
            tensor.device,
            name,
            op,
            type(op),
            prescale,
            postscale,
            process_set.process_set_id,
        )
        plan = sets.repeated_plans.get(key)
    except (AttributeError, TypeError):  # no tensor, no process set: the ordinary way says so
        return None
    if not _is_plain(tensor) or not (tensor.is_cpu or tensor.is_cuda):
        return None
    if plan is None:
        plan = _learnt(sets, key, tensor, process_set)
        if plan is None:
            return None
    if not in_place:
        out = empty_like(tensor)
        return out if plan.path.allreduce(plan, tensor, out) else None
    if not plan.path.allreduce(plan, tensor, tensor):
        return None
    increment_version(tensor)  # bytes were moved behind autograd's back
    return tensor


def _is_plain(tensor: Tensor) -> bool:
    """Return whether bytes may be moved to and from it as it is."""
    return (
        type(tensor) is Tensor
        and tensor.layout is strided
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_inference()
        and not is_inference_mode_enabled()
    )


def _learnt(sets: ProcessSets, key: Any, tensor: Tensor, process_set: ProcessSet) -> AllreducePlan | None:
    """The plan for calls like this one, kept; None while the engine has not seen one, or has no fast path for it."""
    found = _known(sets, key, tensor, process_set)
    plan = None if found is None else sets.repeated_plan(*found)
    if plan is not None:
        if len(sets.repeated_plans) >= _KEPT_PLANS:
            sets.repeated_plans.clear()
        sets.repeated_plans[key] = plan
    return plan


def _known(
    sets: ProcessSets, key: Any, tensor: Tensor, process_set: ProcessSet
) -> tuple[OperationQueue, Signature] | None:
    """The queue and the signature of calls like this one, if there has been one; bad arguments never have."""
    _, _, _, name, op, _, prescale, postscale, _ = key
    if not isinstance(name, (str, NoneType)):
        return None
    wanted = int(ReduceOp.AVERAGE) if op is None else _whole_number(op, "op")
    if wanted == ReduceOp.ADASUM:
        return None
    queue = sets.queue(registered_id(process_set))
    signature = queue.validator.known_allreduce(tensor, name, Reduce(wanted, float(prescale), float(postscale)))
    return None if signature is None else (queue, signature)


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
