"""`Observed`: calls of a group that somebody watches: a profiler, a dispatch mode such as `CommDebugMode`, or hooks.

Without a watcher, nothing happens here but three questions. With one, torch's dispatcher is to see the call, under
torch's own names for it. From 2.14 on the call goes through the dispatcher to the group's backend, with torch's hooks,
flight recorder and checks around it. Before, torch has no backend of ours to which its dispatcher could come: modes see
the call on a group that does nothing, and then it is carried out.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d

from hora.torch.distributed.endpoint import Endpoint
from hora.torch.distributed.signatures import arrange

_BASE: Any = dist.ProcessGroup
_profiling = torch._C._autograd._profiler_enabled
_num_modes = torch._C._len_torch_dispatch_stack
# torch.compile wants to know of works that become inputs of a graph.
_are_inputs_of_graphs = c10d._allow_inflight_collective_as_graph_input

# The operation's name in profiles, after the backend's and a colon, as gloo has it.
TITLES = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "reduce": "reduce",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recvAnySource",
    "barrier": "barrier",
}
_WITH_OUTPUTS = {name for name in TITLES if "gather" in name or "scatter" in name or "all_to" in name} | {"alltoall"}
# Older names of the methods, which torch's own code calls as well.
_OLDER = {
    "all_gather_single": "_allgather_base",
    "reduce_scatter_single": "_reduce_scatter_base",
    "all_gather_single_coalesced": "allgather_into_tensor_coalesced",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "all_to_all_single": "alltoall_base",
}


class Observed(Endpoint):
    """The collectives, each with the way through torch's dispatcher for a call that somebody watches."""

    backend: Any = None  # from 2.14 on: to which the dispatcher brings a call

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.watchers: set[object] = set()  # of all calls: hooks, checks
        self._silent: Any = None

    def register_pre_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        _BASE.register_pre_hook(self, hook_id, hook)
        self.watchers.add(("before", hook_id))

    def unregister_pre_hook(self, hook_id: int) -> None:
        _BASE.unregister_pre_hook(self, hook_id)
        self.watchers.discard(("before", hook_id))

    def register_post_hook(self, hook_id: int, hook: Callable[[Any], None]) -> None:
        _BASE.register_post_hook(self, hook_id, hook)
        self.watchers.add(("after", hook_id))

    def unregister_post_hook(self, hook_id: int) -> None:
        _BASE.unregister_post_hook(self, hook_id)
        self.watchers.discard(("after", hook_id))

    def show(self, name: str, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Show a call to dispatch modes, before 2.14. It must still be carried out."""
        if _num_modes() > 0:
            if self._silent is None:
                self._silent = _silent_group(self.getRank(), self.getSize())
            with contextlib.suppress(Exception):  # a form that torch's group does not know is an error of ours later
                getattr(self._silent, name)(*given, **named)


def _silent_group(rank: int, size: int) -> Any:
    """Return a group of torch whose operations do nothing."""
    fake: Any = c10d.FakeProcessGroup
    create = getattr(fake, "_create_internal", fake)
    group = _BASE(c10d.HashStore(), rank, size)
    group._set_default_backend(_BASE.BackendType.CUSTOM)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), _BASE.BackendType.CUSTOM, create(rank, size))
    return group


def record_call(
    name: str, call: Callable[..., Any], endpoint: Endpoint, given: Sequence[Any], named: Mapping[str, Any]
) -> Any:
    """Call a method of an endpoint, as an entry of the profile if there is a profiler: the whole call if the caller
    waits for the result, else its submission.
    """
    if not _profiling():
        return call(endpoint, *given, **named)
    inputs = given[1 if name in _WITH_OUTPUTS else 0 :][:1]
    with torch._C._profiler._RecordFunctionFast(f"{endpoint.profile_name}:{TITLES[name]}", list(_tensors(inputs))):
        return call(endpoint, *given, **named)


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _observable(name: str) -> Callable[..., Any]:
    """Return the method of this name. Its code must have the name, too: thereby C++ tells a call of an override from
    one by it, which is to go to the dispatcher.
    """
    call = getattr(Endpoint, name)
    name_there = name if hasattr(_BASE, name) else _OLDER[name]
    dispatch = _OPERATORS.get(name) or getattr(_BASE, name_there)

    def method(self: Observed, *given: Any, **named: Any) -> Any:
        if not (self.watchers or _num_modes() or _profiling() or _are_inputs_of_graphs()):
            return call(self, *given, **named)
        if self.backend is None:
            self.show(name_there, given, named)
            return record_call(name, call, self, given, named)
        last = self.backend.last
        last.work = None
        work = dispatch(self, *given, **named)
        return last.work or work

    code = method.__code__.replace(co_name=name)
    return FunctionType(code, globals(), name, None, method.__closure__)


def _all_to_all_single(group: Any, *given: Any, **named: Any) -> Any:
    output, input_, receive, send, opts = arrange("all_to_all_single", given, named)
    operator = torch.ops.c10d.alltoall_base_
    return operator(output, input_, group.boxed(), list(receive), list(send), opts.asyncOp, _in_ms(opts.timeout))


def _all_gather_single_coalesced(
    group: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
) -> Any:
    operator = torch.ops.c10d.allgather_into_tensor_coalesced_
    return operator(outputs, inputs, group.boxed(), opts is None or opts.asyncOp)


def _reduce_scatter_single_coalesced(
    group: Any, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
) -> Any:
    opts = c10d.ReduceScatterOptions() if opts is None else opts
    operator = torch.ops.c10d.reduce_scatter_tensor_coalesced_
    return operator(outputs, inputs, group.boxed(), opts.reduceOp.boxed(), opts.asyncOp, _in_ms(opts.timeout))


def _in_ms(timeout: timedelta) -> int:
    return round(timeout.total_seconds() * 1000)


# torch's own methods of these names look for an override under the older name next, and so would call ours again.
_OPERATORS = {
    "all_to_all_single": _all_to_all_single,
    "all_gather_single_coalesced": _all_gather_single_coalesced,
    "reduce_scatter_single_coalesced": _reduce_scatter_single_coalesced,
}
for _name in TITLES:
    setattr(Observed, _name, _observable(_name))
for _name, _older in _OLDER.items():
    setattr(Observed, _older, getattr(Observed, _name))
