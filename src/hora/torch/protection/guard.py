"""A guard around the collectives of a group: each call that a death interrupts is made again in the next world.

The guard replaces methods of one group object, so other groups do not pay for it. Reductions and broadcasts work on a
copy, because the engine writes a tensor piece by piece: an interrupted call must leave the caller's as it was.

A gather of all members' tensors that is repeated among fewer of them leaves zeros in the places of the missing ones.
Torch's SyncBatchNorm takes a place without rows for that of a rank without input. A program that gathers for as many
members as it counted at its start, such as Accelerate, gets the tensors of some of them twice. Other calls whose
arguments depend on the number of members cannot be repeated among another number: they raise an error on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import _distributed_c10d as c10d

from hora.errors import HorovodInternalError
from hora.torch.distributed.calls import waits
from hora.torch.distributed.group import HoraProcessGroup
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import DONE, Work
from hora.torch.protection.calls import Call, ProtectedWork
from hora.torch.protection.protection import Protection

# Calls whose tensors are both their inputs and their results.
_IN_PLACE = ("allreduce", "allreduce_coalesced", "broadcast", "reduce")
_GATHERS = ("allgather", "all_gather_single", "_allgather_base")
_OTHERS = (
    *("allgather_coalesced", "all_gather_single_coalesced", "allgather_into_tensor_coalesced"),
    *("reduce_scatter", "reduce_scatter_single", "_reduce_scatter_base"),
    *("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"),
    *("gather", "scatter", "alltoall", "all_to_all_single", "alltoall_base", "barrier"),
)
# The options of calls that have one form only: tensors, and options or None.
_OPTIONS: dict[str, Callable[[], Any]] = {
    "allreduce_coalesced": c10d.AllreduceCoalescedOptions,
    **dict.fromkeys(("all_gather_single", "_allgather_base", "allgather_coalesced"), c10d.AllgatherOptions),
    **dict.fromkeys(("all_gather_single_coalesced", "allgather_into_tensor_coalesced"), c10d.AllgatherOptions),
    **dict.fromkeys(("reduce_scatter_single", "_reduce_scatter_base"), c10d.ReduceScatterOptions),
    **dict.fromkeys(("reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced"), c10d.ReduceScatterOptions),
}


class Guard:
    """The guarded calls of a group."""

    def __init__(self, group: HoraProcessGroup, protection: Protection) -> None:
        self._group, self._protection = group, protection
        self._size = group.size()  # when the present call was made
        self._inside = False  # a call that consists of others

    def put_up(self) -> None:
        for names, guarded in ((_IN_PLACE, self._in_place), (_GATHERS, self._gather), (_OTHERS, self._other)):
            for name in names:
                setattr(self._group, name, self._guarded(name, guarded))

    def take_down(self) -> None:
        for name in (*_IN_PLACE, *_GATHERS, *_OTHERS):
            self._group.__dict__.pop(name, None)

    def _guarded(self, name: str, guarded: Callable[..., Work]) -> Callable[..., Work]:
        original = getattr(self._group, name)

        def call(*given: Any, **named: Any) -> Work:
            if self._inside:
                work: Work = original(*given, **named)
                return work
            return guarded(original, _arranged(name, given, named))

        return call

    def _make(self, call: Call, tensors: Sequence[Any], options: Any) -> Work:
        self._protection.start(call)
        work = ProtectedWork(call, tensors, self._group, self._protection.finish)
        if waits(options):
            work.wait()
            return DONE
        return work

    def _original(self, original: Callable[..., Work], *arguments: Any) -> Work:
        self._inside = True
        try:
            return original(*arguments)
        finally:
            self._inside = False

    def _in_place(self, original: Callable[..., Work], arguments: Sequence[Any]) -> Work:
        tensors, options = arguments
        copies, blocking = [tensor.detach().clone() for tensor in tensors], waits(options)
        begun = False

        def begin() -> Work:
            nonlocal begun
            if begun:
                for copy, tensor in zip(copies, tensors, strict=True):
                    copy.copy_(tensor.detach())
            begun = True
            return self._original(original, copies, _asynchronous(options))

        def deliver() -> None:
            with torch.no_grad():
                for copy, tensor in zip(copies, tensors, strict=True):
                    tensor.copy_(copy)

        call = Call(begin, copies, deliver)
        return self._make(call, tensors, _Waits(blocking))

    def _gather(self, original: Callable[..., Work], arguments: Sequence[Any]) -> Work:
        outputs, inputs, options = arguments
        blocking, size, now = waits(options), self._group.size(), 0
        if isinstance(outputs, (list, tuple)):
            results, whole = list(outputs[0]), None
        else:
            places = max(outputs.numel() // max(inputs.numel(), 1), 1)
            whole = outputs.view(places, -1)
            results = list(whole.unbind())
        num_missing = len(results) - size  # of members that the caller counted once, and that have died since

        def begin() -> Work:
            nonlocal now
            now = self._group.size()
            self._check_size(len(results) if num_missing > 0 else size, now, grows=False)
            if whole is None:
                return self._original(original, [results[:now]], inputs, _asynchronous(options))
            return self._original(original, whole[:now], inputs, _asynchronous(options))

        def deliver() -> None:
            for place, missing in enumerate(results[now:], now):
                missing.detach().copy_(results[place % now]) if num_missing > 0 else missing.detach().zero_()

        return self._make(Call(begin, results, deliver), outputs, _Waits(blocking))

    def _other(self, original: Callable[..., Work], arguments: Sequence[Any]) -> Work:
        *tensors, options = arguments
        blocking, size = waits(options), self._group.size()

        def begin() -> Work:
            if tensors:
                self._check_size(size, self._group.size(), grows=True)
            return self._original(original, *tensors, _asynchronous(options))

        results = tensors[0] if tensors else []
        return self._make(Call(begin, _flat(results)), results, _Waits(blocking))

    def _check_size(self, before: int, now: int, *, grows: bool) -> None:
        if now == before or (now < before and not grows):
            return
        raise HorovodInternalError(
            f"a collective for {before} members was interrupted by a death, and cannot be repeated among {now}: its "
            "tensors have a part for each. Use all_reduce or broadcast, or make this call outside the training loop"
        )


def _arranged(name: str, given: Sequence[Any], named: dict[str, Any]) -> list[Any]:
    """Return a call's tensors, followed by its options."""
    if name not in _OPTIONS:
        return arrange("all_to_all_single" if name == "alltoall_base" else name, given, named)
    values = [*given, *(value for key, value in named.items() if key != "opts")]
    options = named.get("opts")
    if values and (values[-1] is None or hasattr(values[-1], "timeout")):
        options = values.pop()
    return [*values, _OPTIONS[name]() if options is None else options]


class _Waits:
    """Options of a call that was made asynchronous: whether its caller waits."""

    def __init__(self, blocking: bool) -> None:
        self.asyncOp = not blocking


def _asynchronous(options: Any) -> Any:
    if hasattr(options, "asyncOp"):
        options.asyncOp = True
    return options


def _flat(tensors: Any) -> list[torch.Tensor]:
    if isinstance(tensors, torch.Tensor):
        return [tensors]
    return [tensor for some in tensors for tensor in _flat(some)]
