"""One collective as the user requested it, its submission to the engine, and its result.

The functions of `ops` and the gradients of `autograd` build a `Collective` and pass it, with tensors, to
`submit` (returns a handle at once) or `run` (returns the results). The engine validates the arguments. This module
keeps only the shape of the result, which the engine does not need.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Sequence
from numbers import Real
from types import NoneType
from typing import Any, NamedTuple

from torch import Tensor, empty_like
from torch.autograd.graph import increment_version

from hora import engine
from hora.engine.repeated import CallPlan, KnownAllreduce
from hora.engine.request import Kind, Reduce, ReduceOp, Request
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id
from hora.torch.reduce_op import reduce_op

Tensors = tuple[Tensor, ...]


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


def submit_repeated_allreduce_(tensor: Tensor, *call: Any) -> int | None:
    """Start an in-place allreduce that repeats an earlier one; None for any other."""
    runtime = engine.current_runtime()
    known = _known(runtime, runtime.sets.known_allreduces.find(tensor, *call), tensor, call)
    if known is None or not tensor.is_cpu:
        return None
    request = Request(known.signature, [tensor], [tensor], [tensor])
    known.queue.submit(request, background=True)
    return _handle_of(request, _PLAIN)


def run(collective: Collective, tensors: Sequence[Tensor], *, in_place: bool = False) -> Tensors:
    """Run a collective on the calling thread, which saves a thread switch."""
    request = hand_over(collective, tensors, tensors if in_place else None, background=False)
    return _results(collective, request.result())


def repeat_allreduce_(tensor: Tensor, *call: Any) -> Tensor | None:
    """Repeat an earlier allreduce in place (`hora.engine.repeated`); returns None if it needs the general path.

    Args:
        tensor: As the user passed it: it is checked here.
        call: Name, op, prescale factor, postscale factor and process set.
    """
    runtime = engine.current_runtime()
    found = runtime.sets.known_allreduces.repeat(tensor, *call)
    if found is False:
        return None
    if found is not True:
        plan = _plan(runtime, found, tensor, call)
        if plan is None or not plan.path.carry_out(plan, tensor, tensor):
            return None
    increment_version(tensor)  # the engine wrote the bytes without autograd
    return tensor


def repeat_allreduce(tensor: Tensor, *call: Any) -> Tensor | None:
    """Like `repeat_allreduce_`, into a new tensor."""
    runtime = engine.current_runtime()
    plan = _plan(runtime, runtime.sets.known_allreduces.find(tensor, *call), tensor, call)
    if plan is None:
        return None
    out = empty_like(tensor)
    return out if plan.path.carry_out(plan, tensor, out) else None


def _plan(runtime: engine.Runtime, found: Any, tensor: Tensor, call: tuple[Any, ...]) -> CallPlan | None:
    """Return the plan of a call that was looked up, if there is one; it is made as soon as that is possible."""
    known = _known(runtime, found, tensor, call)
    if known is not None and known.plan is None:
        plan = known.plan = runtime.sets.repeated_plan(known.queue, known.signature)
        known.parts = None if plan is None else plan.parts
    return None if known is None else known.plan


def _known(runtime: engine.Runtime, found: Any, tensor: Tensor, call: tuple[Any, ...]) -> KnownAllreduce | None:
    """Return what is known of a call that was looked up (`KnownAllreduces`). Invalid arguments are never recorded."""
    if type(found) is not tuple:
        return found
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
    known = KnownAllreduce(queue, signature)
    runtime.sets.known_allreduces.add(found, known)
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
