"""One collective as the user requested it, its submission to the engine, and its result.

The functions of `ops` and the gradients of `autograd` build a `Collective` and pass it, with tensors, to
`submit` (returns a handle at once) or `run` (returns the results). The engine validates the arguments. This module
keeps only the shape of the result, which the engine does not need.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, empty_like, is_inference_mode_enabled, strided
from torch.autograd.graph import increment_version

from hora import engine
from hora.engine.queue import OperationQueue
from hora.engine.repeated import CallPlan
from hora.engine.request import Kind, Reduce, ReduceOp, Request, Signature
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id
from hora.torch.reduce_op import reduce_op

_KEPT = 4096

Tensors = tuple[Tensor, ...]
# Of an allreduce: name, op, prescale factor, postscale factor, process set.
Arguments = tuple[str | None, int | None, float, float, ProcessSet]


class Collective(NamedTuple):
    """A collective as the user requested it. (A named tuple: a frozen dataclass takes three times as long.)

    Numbers may be tensors, which the user may change after the call.
    """

    kind: Kind
    name: str | None = None
    process_set: ProcessSet = global_process_set
    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root_rank: int = -1  # global rank
    splits: Tensor | Sequence[int] | None = None
    grouped: bool = False
    code: str = ""  # see `Reduce`


_PLAIN = Collective(Kind.ALLREDUCE)

# The request and the collective behind each handle of the user.
_in_flight: dict[int, tuple[Request, Collective]] = {}
_next_handle = itertools.count()


def submit(collective: Collective, tensors: Sequence[Tensor], *, in_place: bool = False) -> int:
    """Start a collective on the engine's background thread and return its handle."""
    return _handle_of(hand_over(collective, tensors, tensors if in_place else None), collective)


def _handle_of(request: Request, collective: Collective) -> int:
    handle = next(_next_handle)
    _in_flight[handle] = request, collective
    return handle


def submit_repeated_allreduce_(tensor: Tensor, call: Arguments) -> int | None:
    """Start an in-place allreduce that repeats an earlier one; None for any other. Flat for the sake of speed."""
    runtime = engine.current_runtime()
    known = _known(runtime, tensor, call)
    if known is None or not tensor.is_cpu:
        return None
    request = Request(known.signature, [tensor], [tensor], [tensor])
    known.queue.submit(request, background=True)
    return _handle_of(request, _PLAIN)


def run(collective: Collective, tensors: Sequence[Tensor], *, in_place: bool = False) -> Tensors:
    """Run a collective on the calling thread, which saves a thread switch."""
    request = hand_over(collective, tensors, tensors if in_place else None, background=False)
    return _results(collective, request.result())


def repeated_allreduce(tensor: Tensor, in_place: bool, call: Arguments) -> Tensor | None:
    """Repeat an earlier allreduce on the fast path (`hora.engine.repeated`); None if it needs the general path.

    Flat, because every operation runs through it: the arguments are interpreted once.
    """
    runtime = engine.current_runtime()
    known = _known(runtime, tensor, call)
    if known is None:
        return None
    plan = known.plan
    if plan is None:
        plan = known.plan = runtime.sets.repeated_plan(known.queue, known.signature)
        if plan is None:
            return None
    if not in_place:
        out = empty_like(tensor)
        return out if plan.path.carry_out(plan, tensor, out) else None
    if not plan.path.carry_out(plan, tensor, tensor):
        return None
    increment_version(tensor)  # the engine wrote the bytes without autograd
    return tensor


@dataclass(slots=True)
class _KnownAllreduce:
    """Shared state of the allreduces of one tensor that repeat a call the engine has validated."""

    queue: OperationQueue
    signature: Signature
    plan: CallPlan | None = None  # of the fast path, once it exists


def _known(runtime: engine.Runtime, tensor: Tensor, call: Arguments) -> _KnownAllreduce | None:
    """Return the state shared by calls like this one.

    None if there has been no such call, or if the engine cannot read and write the tensor's memory directly.
    """
    name, op, prescale, postscale, process_set = call
    try:
        device, set_id = tensor.device, process_set.process_set_id
        key = tensor.shape, tensor.dtype, device, name, op, type(op), prescale, postscale, set_id
        known: _KnownAllreduce | None = runtime.sets.known_allreduces.get(key)
    except (AttributeError, TypeError):  # no tensor or no process set: the general path reports it
        return None
    if (
        type(tensor) is not Tensor
        or tensor.layout is not strided
        or tensor.requires_grad
        or not tensor.is_contiguous()
        or tensor.is_neg()
        or tensor.is_inference()
        or is_inference_mode_enabled()
        or not (tensor.is_cpu or tensor.is_cuda)
    ):
        return None
    return known or _learn(runtime, key, tensor, call)


def _learn(runtime: engine.Runtime, key: Any, tensor: Tensor, call: Arguments) -> _KnownAllreduce | None:
    """Record what calls like this one share, if the engine has validated one; invalid arguments are never recorded."""
    name, op, prescale, postscale, process_set = call
    if not isinstance(name, (str, NoneType)):
        return None
    if not all(isinstance(number, Real) for number in (prescale, postscale, 0 if op is None else op)):
        return None  # such as a tensor: the same object may have another value in the next call
    wanted = int(ReduceOp.AVERAGE) if op is None else reduce_op(op)
    if wanted == ReduceOp.ADASUM:
        return None
    queue = runtime.sets.queue(registered_id(process_set))
    signature = queue.validator.known_allreduce(tensor, name, Reduce(wanted, float(prescale), float(postscale)))
    if signature is None:
        return None
    if len(runtime.sets.known_allreduces) >= _KEPT:
        runtime.sets.known_allreduces.clear()
    known = runtime.sets.known_allreduces[key] = _KnownAllreduce(queue, signature)
    return known


def synchronize(handle: int) -> Any:
    """Wait for an asynchronous collective and return its result; None if the handle is not in use.

    Args:
        handle: What an `_async` function returned.
    """
    engine.current_runtime()
    if handle not in _in_flight:
        return None
    request, collective = _in_flight[handle]
    try:
        results = _results(collective, request.result())
    finally:
        if request.done:
            _in_flight.pop(handle, None)
    return results if collective.grouped or len(results) > 1 else results[0]


def poll(handle: int) -> bool:
    """Return whether `synchronize(handle)` would return at once. Raises ValueError if the handle is not in use."""
    if not engine.is_initialized():
        raise ValueError(f"handle {handle} does not exist: Horovod has not been initialized; use hvd.init().")
    if handle not in _in_flight:
        raise ValueError(f"handle {handle} was not created or has been synchronized already")
    return _in_flight[handle][0].has_result


def forget_handles() -> None:
    """Forget all handles: a new runtime starts numbering again."""
    global _next_handle
    _next_handle = itertools.count()
    _in_flight.clear()


def hand_over(
    collective: Collective, tensors: Sequence[Tensor], outputs: Sequence[Tensor] | None, *, background: bool = True
) -> Request:
    """Submit a collective to the engine. `outputs`: where its results go; None for new tensors."""
    kind, name, process_set, op, prescale, postscale, root_rank, splits, grouped, code = collective
    runtime = engine.current_runtime()
    if name is not None and not isinstance(name, str):
        raise ValueError(f"the name of a collective must be a string, but it is {type(name).__name__}: {name!r}")
    return runtime.submit(
        kind,
        tensors,
        outputs=outputs,
        name=name,
        reduce=Reduce(reduce_op(op), float(prescale), float(postscale), code),
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
