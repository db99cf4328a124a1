"""`HoraProcessGroup`: the engine as a backend of torch.distributed.

A front end: every method of a `ProcessGroup` becomes requests of the engine (`hora.engine.request`) in the process set
of the group's members, and a `Work` that waits for them. Collectives of a group are numbered in call order, as torch
requires. Operations that the engine lacks are composed: a gather is an alltoall in which one member receives, and
bitwise reductions fold a gathered result.

The table at the end of the class maps the method names of different torch versions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C import _distributed_c10d as c10d
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BarrierOptions,
    BroadcastOptions,
    GatherOptions,
    ReduceOptions,
    ReduceScatterOptions,
    ScatterOptions,
)
from torch.autograd.graph import increment_version

from hora.engine import Runtime
from hora.engine.point_to_point import ANY_SOURCE, Message, Messages
from hora.engine.queue import OperationQueue
from hora.engine.request import DTYPES, CollectiveCall, Kind, Reduce, Request, Signature
from hora.errors import HorovodInternalError
from hora.torch.distributed.reductions import Reduction, fold, moved, reduction_of
from hora.torch.distributed.signatures import Options, arrange
from hora.torch.distributed.work import DONE, Work
from hora.torch.drift.data_parallel import Comparisons

_ZERO, _NO_TIMEOUT = timedelta(0), timedelta(milliseconds=-1)
_KEPT = 4096
_SUM = Reduce()
_SMALL_BYTES = 4 * 2**20  # so much is gathered or sent by all for one member, which takes one step
_Last = Callable[[Request], object]  # the last step of a request (`Completion`)
# With `BackendBase`, torch has a backend for each device of a group; before, a Python group is a whole group.
_BASE: Any = getattr(dist, "BackendBase", dist.ProcessGroup)


class _Until:
    """A request with its deadline."""

    def __init__(self, request: Request, deadline: float) -> None:
        self._request, self._deadline = request, deadline
        self.name, self.key = request.name, request.key

    @property
    def done(self) -> bool:
        return self._request.done or time.monotonic() > self._deadline


class HoraProcessGroup(_BASE):
    """This rank's end of a process group."""

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        runtime: Runtime,
        queue: OperationQueue,
        timeout: timedelta,
        on_shutdown: Callable[[], None] | None,
        make: Callable[..., HoraProcessGroup],
    ) -> None:
        super().__init__(rank, size)
        self._store = store
        self._rank, self._size = rank, size
        self._runtime, self._queue = runtime, queue
        self._ranks = queue.ranks
        self._own_rank = self._ranks[rank]  # in the job
        self._limit_s = timeout.total_seconds()
        self._on_shutdown, self._make = on_shutdown, make
        self._name = self._description = ""
        self._known: dict[object, Any] = {}
        self._token = torch.zeros(1, dtype=torch.uint8, device="cpu")  # what a barrier reduces, or sends
        self._num_calls = 0
        self._labels: dict[str, str] = {}
        self._messages: Messages = runtime.start_messages()
        self.comparisons = Comparisons(queue.process_set_id, self._finish_in_time)
        self._watched = self.comparisons.models

    # Properties that torch reads.

    def getBackendName(self) -> str:
        return "hora"

    def getRank(self) -> int:
        return self._rank

    def getSize(self) -> int:
        return self._size

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    def getGroupDesc(self) -> str:
        return self._description

    group_name = property(getGroupName)
    group_desc = property(getGroupDesc)
    _has_timed_out = False
    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False

    @property
    def options(self) -> Options:
        """The group's options, as torch reads a backend's."""
        found = Options(self.getBackendName(), self._timeout)
        found.global_ranks_in_group = list(self._ranks)
        return found

    def get_error(self) -> Any:
        """Return why the group cannot be used any more, as torch's `ErrorType`."""
        if self._runtime.status.broken:
            return c10d.ErrorType.COMM_ERROR
        return c10d.ErrorType.TIMEOUT if self._has_timed_out else c10d.ErrorType.SUCCESS

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        """Return whether torch may ask for memory here: it may not."""
        return False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> HoraProcessGroup:
        return self

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self._limit_s = timeout.total_seconds()

    set_timeout = _set_default_timeout

    @property
    def _timeout(self) -> timedelta:
        return timedelta(seconds=self._limit_s)

    def _set_sequence_number_for_group(self) -> None:
        pass

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def get_group_store(self) -> Any:
        return self._store

    # Subgroups.

    def split_group(
        self,
        ranks: Sequence[int],
        timeout: timedelta | None = None,
        opts: Any = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Any = None,
    ) -> HoraProcessGroup | None:
        """Return a group of these members (collective among them); None on a rank that is not one of them."""
        outside = [member for member in ranks if not 0 <= member < self._size]
        if outside or len(set(ranks)) != len(ranks):
            raise ValueError(
                f"split_group on rank {self._own_rank}: the ranks must be different members, 0 to "
                f"{self._size - 1}, but they are {list(ranks)}"
            )
        if self._rank not in ranks:
            return None
        name = group_name or f"{self._name}/split{list(ranks)}"
        store = dist.distributed_c10d.PrefixStore(f"{name}/", self._store)
        global_ranks = [self._ranks[member] for member in ranks]
        member, limit = list(ranks).index(self._rank), timeout or self._timeout
        part = self._make(name, store, member, len(ranks), limit, global_ranks)
        part.setGroupName(name)
        part.setGroupDesc(group_desc or "")
        return part

    def eager_connect_single_device(self, device: torch.device) -> None:
        """Do nothing: members are connected from the start."""

    def perform_nocolor_split(self, device: torch.device) -> None:
        """Do nothing: ranks outside a subgroup take no part in its creation."""

    # Shutdown.

    def shutdown(self) -> None:
        """Leave the group. The default group of a process that has not called `hvd.init()` ends the engine."""
        if self._runtime.is_current:
            self._runtime.sets.remove_group(self._queue.process_set_id)
            if self._on_shutdown is not None:
                self._on_shutdown()

    def abort(self) -> None:
        """Fail all operations in flight in this group, on this rank."""
        self._queue.give_up(f"{self._label('process group')} was aborted by rank {self._own_rank}")
        self.shutdown()

    # Waiting.

    def finish(self, part: Any, deadline: float, limit_s: float, *, ends_group: bool = True) -> None:
        """Wait for a request or a message of this group until the deadline; raises its error."""
        if isinstance(part, Message):
            if not part.done and not self._messages.wait(part, deadline):
                self._messages.cancel(part, self._late_message(part, limit_s))
            part.raise_error()
            if part.device_event is not None:
                part.device_event.wait()
            return
        queue = self._queue
        if not part.done:
            until = _Until(part, deadline)
            if not until.done:
                queue.wait(until)
            if not part.done:
                self._time_out(part, limit_s, ends_group=ends_group)
        queue.result(part)

    def _finish_in_time(self, request: Request) -> None:
        self.finish(request, time.monotonic() + self._limit_s, self._limit_s)

    def _time_out(self, request: Request, limit_s: float, *, ends_group: bool) -> None:
        """End a request and the group on this rank, or only this wait, with an error that names the missing ranks."""
        if ends_group:
            self._queue.waited_for = request.key  # before the other ranks ask, which have waited as long
        others = [rank for rank in self._ranks if rank != self._own_rank]
        absent = self._runtime.lines_of(others, self._queue.process_set_id, request.key)
        if request.done:
            return
        text = (
            f"rank {self._own_rank} waited {limit_s:g} s until the timeout in {request.name} for rank(s) "
            f"{list(absent)}: {_listed(absent) or 'all ranks are in it'}. "
        )
        if not ends_group:
            raise HorovodInternalError(f"{text}You may wait for it again")
        text += "This process group cannot be used any more"
        self._has_timed_out = True
        self._queue.give_up(text)

    def go_on_now(self) -> None:
        """Advance calls in flight as far as possible without waiting."""
        self._queue.go_on_now()

    def go_on_in_background(self) -> None:
        """Let a background thread drive calls in flight that no thread waits for."""
        if self._queue.in_flight:
            self._queue.wake_background()

    # Submitting.

    def _label(self, operation: str) -> str:
        """Return the operation's name with the group's, for the live page, timelines and messages."""
        found = self._labels.get(operation)
        if found is None:
            known = self._description not in ("", "undefined")
            found = f"{self._description if known else self._name or 'group'}/{operation}"
            if self._name:
                self._labels[operation] = found
        return found

    def _submit(
        self,
        operation: str,
        kind: Kind,
        tensors: Sequence[Tensor],
        outputs: Sequence[Tensor] | None = None,
        *,
        wait: bool,
        reduce: Reduce = _SUM,
        root: int = -1,
        splits: Sequence[int] | None = None,
        grouped: bool = False,
        last: _Last | None = None,
        targets: Sequence[Tensor] = (),
    ) -> Request:
        """Submit a request. `wait`: this thread will drive it at once; `last` writes `targets` (`Completion`)."""
        self._check_here()
        queue = self._queue
        request = queue.validator.request(CollectiveCall(kind, None, reduce, root, splits, grouped), tensors, outputs)
        request.signature = request.signature._replace(operation=self._label(operation))
        request.last, request.targets = last, targets
        queue.submit(request, background=not wait)
        return request

    def _check_here(self) -> None:
        self._num_calls += 1
        if not self._runtime.is_current:
            raise HorovodInternalError(
                f"the process group {self._name!r} of rank {self._own_rank} cannot be used here: it was "
                "destroyed, or this process was forked from the one that made it"
            )

    def _work(self, requests: Sequence[Request], tensors: Sequence[Any], opts: Any) -> Work:
        timeout = getattr(opts, "timeout", _NO_TIMEOUT)
        limit_s = timeout.total_seconds() if timeout > _ZERO else self._limit_s
        work = Work(tensors, requests, self, limit_s)
        if _waits(opts):
            work.wait()
            return DONE
        return work

    # Repeated calls.

    def _again(
        self,
        key: object,
        source: Tensor,
        target: Tensor,
        opts: Any,
        shift: int = 0,
        targets: Sequence[Tensor] | None = None,
    ) -> Work | None:
        """Repeat an earlier call on the fast path; returns None if that is impossible. `shift`: bytes by which the
        target may begin after the source, if they share memory. `targets`: what the plan's last step writes from it.
        """
        plan = self._known.get(key)
        if plan is None or opts is None or not self._runtime.is_current or opts.timeout > _ZERO:
            return None
        if not _is_plain(target) or torch.is_inference_mode_enabled():
            return None
        if source is not target:
            distance = target.data_ptr() - source.data_ptr()
            if not _is_plain(source) or (-target.nbytes < distance < source.nbytes and distance != shift):
                return None
        if not _waits(opts):
            request = plan.path.start(plan, source, target, targets)
            if request is None:
                return None
            self._num_calls += 1
            return Work([target] if targets is None else targets, [request], self, self._limit_s)
        if not plan.path.carry_out(plan, source, target, self._finish_in_time, targets):
            return None
        self._num_calls += 1
        _tell_autograd(target)
        return DONE

    def _remember(self, key: object, request: Request, *tensors: Tensor, last: _Last | None = None) -> None:
        """Keep the engine's plan for later calls like this one, if it has a plan. `last`: what ends them, too."""
        as_given = all(
            one.is_cpu and one.dtype == sent.dtype for one, sent in zip(tensors, request.tensors, strict=True)
        )
        if key not in self._known and as_given:
            if len(self._known) >= _KEPT:
                self._known.clear()
            plan = self._runtime.sets.repeated_plan(self._queue, request.signature)
            if plan is not None:
                plan.last = last
                self._known[key] = plan

    # Reductions.

    def allreduce(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not AllreduceOptions:
            given = (*arrange("allreduce", given, named),)
        tensors, opts = given
        if self._watched:
            self.comparisons.reduces()
        return self._allreduce_one(tensors, opts) if len(tensors) == 1 else self._allreduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = c10d.AllreduceCoalescedOptions() if opts is None else opts
        if len(tensors) == 1:
            return self._allreduce_one(tensors, opts)
        return self._allreduce("all_reduce_coalesced", tensors, opts)

    def _allreduce_one(self, tensors: Sequence[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        key = "all_reduce", tensor.shape, tensor.dtype, hash(opts.reduceOp)
        return self._again(key, tensor, tensor, opts) or self._allreduce("all_reduce", tensors, opts, key)

    def _allreduce(self, operation: str, tensors: Sequence[Tensor], opts: Any, key: object = None) -> Work:
        if any(tensor.layout != torch.strided for tensor in tensors):
            return self._allreduce_sparse(operation, tensors, opts)
        reductions = [reduction_of(opts, tensor.dtype, operation) for tensor in tensors]
        if any(one.folded for one in reductions):
            return self._allreduce_folded(operation, tensors, reductions, opts)
        views = [one.view(tensor) for one, tensor in zip(reductions, tensors, strict=True)]
        kinds = dict.fromkeys(one.reduce for one in reductions)
        wait, requests = _waits(opts) and len(kinds) == 1, list[Request]()
        for reduce in kinds:
            some = [view for view, one in zip(views, reductions, strict=True) if one.reduce == reduce]
            many = len(some) > 1
            request = self._submit(operation, Kind.ALLREDUCE, some, some, reduce=reduce, grouped=many, wait=wait)
            requests.append(request)
        if key is not None and hash(opts.reduceOp) != _PREMUL_SUM:
            self._remember(key, request, tensors[0])
        return self._work(requests, tensors, opts)

    def _allreduce_folded(
        self, operation: str, tensors: Sequence[Tensor], reductions: Sequence[Reduction], opts: Any
    ) -> Work:
        """Reduce with an operator that the engine lacks: members gather all inputs and fold them in rank order."""

        def submit(tensor: Tensor, one: Reduction) -> Request:
            def write(request: Request) -> None:
                parts = [row.view(tensor.dtype) for row in _outputs(request)[0].view(self._size, -1)]
                tensor.detach().copy_(fold(one, parts, tensor))

            rows = [moved(tensor).reshape(1, -1)]
            return self._submit(operation, Kind.ALLGATHER, rows, wait=False, last=write, targets=[tensor])

        return self._work([submit(*both) for both in zip(tensors, reductions, strict=True)], tensors, opts)

    def _allreduce_sparse(self, operation: str, tensors: Sequence[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        if hash(opts.reduceOp) != _SUM_OF_TORCH:
            raise ValueError(f"{operation} of sparse tensors takes ReduceOp.SUM only, on rank {self._own_rank}")
        own = tensor.coalesce()
        indices = self._submit(operation, Kind.ALLGATHER, [own.indices().t().contiguous()], wait=False)

        def write(values: Request) -> None:  # the last of both: they are executed in order
            indices.raise_error()
            (where,), (what,) = _outputs(indices), _outputs(values)
            tensor.copy_(torch.sparse_coo_tensor(where.t(), what, tensor.shape).coalesce())
            values.outputs = [where, what, tensor._indices(), tensor._values()]  # memory that the caller's stream uses

        values = self._submit(operation, Kind.ALLGATHER, [own.values()], wait=False, last=write, targets=[tensor])
        return self._work([indices, values], tensors, opts)

    def reduce(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not ReduceOptions:
            given = (*arrange("reduce", given, named),)
        tensors, opts = given
        (tensor,) = tensors
        one = reduction_of(opts, tensor.dtype, "reduce")
        if one.folded or self._size == 1:
            return self._allreduce("reduce", tensors, opts)
        at_root, key = opts.rootRank == self._rank, ("reduce", tensor.shape, tensor.dtype, hash(opts.reduceOp))
        if key in self._known:
            work = self._again(key, tensor, tensor if at_root else torch.empty_like(tensor), opts)
            if work is not None:
                return work
        view = one.view(tensor)
        result = [view] if at_root else None
        request = self._submit("reduce", Kind.ALLREDUCE, [view], result, reduce=one.reduce, wait=_waits(opts))
        if hash(opts.reduceOp) != _PREMUL_SUM:
            self._remember(key, request, tensor)
        return self._work([request], tensors, opts)

    def reduce_scatter_single(self, outputTensor: Tensor, inputTensor: Tensor, opts: Any = None) -> Work:
        """Reduce the input and keep this rank's part."""
        opts = ReduceScatterOptions() if opts is None else opts
        whole, part = inputTensor, outputTensor
        key = "reduce_scatter", whole.shape, part.shape, whole.dtype, part.dtype, hash(opts.reduceOp)
        work = self._again(key, inputTensor, outputTensor, opts, self._rank * outputTensor.nbytes)
        return work or self._reduce_scatter("reduce_scatter_tensor", [outputTensor], [inputTensor], opts, key)

    def reduce_scatter_single_coalesced(
        self, outputTensors: Sequence[Tensor], inputTensors: Sequence[Tensor], opts: Any = None
    ) -> Work:
        if len(outputTensors) == len(inputTensors) == 1:
            return self.reduce_scatter_single(outputTensors[0], inputTensors[0], opts)
        return self._reduce_scatter("reduce_scatter_tensor_coalesced", outputTensors, inputTensors, opts)

    def reduce_scatter(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not ReduceScatterOptions:
            given = (*arrange("reduce_scatter", given, named),)
        outputs, inputs, opts = given
        if len(outputs) == 1 and all(tensor.numel() == outputs[0].numel() for tensor in inputs[0]):
            rows = torch.stack([tensor.detach().reshape(-1) for tensor in inputs[0]])
            return self.reduce_scatter_single(outputs[0], rows, opts)
        requests = []
        for output, some in zip(outputs, inputs, strict=True):
            one = reduction_of(opts, output.dtype, "reduce_scatter")
            parts = [one.view(tensor.detach()).reshape(-1) for tensor in some]
            if len({part.numel() for part in parts}) == 1 and parts[0].numel() == one.view(output).numel():
                requests.append(self._scatter_rows("reduce_scatter", torch.stack(parts), output, one, wait=False))
            else:
                requests.append(self._scatter_parts("reduce_scatter", parts, output, one))
        return self._work(requests, outputs, opts)

    def _reduce_scatter(
        self, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, key: object = None
    ) -> Work:
        requests = []
        for output, input_ in zip(outputs, inputs, strict=True):
            self._check_sizes(operation, ("input", input_), ("output", output))
            one = reduction_of(opts, output.dtype, operation)
            rows = one.view(input_.detach()).reshape(self._size, -1)
            wait = _waits(opts) and len(outputs) == 1
            requests.append(self._scatter_rows(operation, rows, output, one, wait=wait))
        request = requests[0]
        if key is not None and request.signature.kind == Kind.REDUCESCATTER and hash(opts.reduceOp) != _PREMUL_SUM:
            self._remember(key, request, inputs[0])
        return self._work(requests, outputs, opts)

    def _scatter_rows(self, operation: str, rows: Tensor, output: Tensor, one: Reduction, *, wait: bool) -> Request:
        """Reduce row m to member m."""
        target = one.view(output.detach())
        if one.folded is not None or one.reduce.op not in _SCATTERED:

            def write(request: Request) -> None:
                target.copy_(fold(one, list(_outputs(request)[0].view(rows.dtype)), target))

            splits, sent = [1] * self._size, [moved(rows)]
            return self._submit(operation, Kind.ALLTOALL, sent, splits=splits, wait=False, last=write, targets=[target])
        if rows.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
            return self._submit(operation, Kind.REDUCESCATTER, [rows], [target], reduce=one.reduce, wait=wait)

        # The output is a part of the input, which is still being read when the first results arrive.
        def copy(request: Request) -> None:
            target.copy_(_outputs(request)[0].view_as(target))

        reduce, targets = one.reduce, [target]
        return self._submit(operation, Kind.REDUCESCATTER, [rows], reduce=reduce, wait=wait, last=copy, targets=targets)

    def _scatter_parts(self, operation: str, parts: Sequence[Tensor], output: Tensor, one: Reduction) -> Request:
        """Reduce parts of different sizes: reduce everything, and keep this member's part."""
        if one.folded is not None:
            raise ValueError(f"{operation} cannot reduce parts of different sizes by this operator: pad them")
        whole, target = torch.cat(list(parts)), one.view(output.detach())
        begin = sum(part.numel() for part in parts[: self._rank])
        if target.numel() != parts[self._rank].numel():
            raise ValueError(
                f"{operation} on rank {self._own_rank}: the output has {target.numel()} elements, but this "
                f"rank's part of the input {parts[self._rank].numel()}"
            )

        def write(request: Request) -> None:
            target.copy_(_outputs(request)[0][begin : begin + target.numel()].view_as(target))

        reduce, targets = one.reduce, [target]
        return self._submit(operation, Kind.ALLREDUCE, [whole], reduce=reduce, wait=False, last=write, targets=targets)

    # Moving.

    def broadcast(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not BroadcastOptions:
            given = (*arrange("broadcast", given, named),)
        tensors, opts = given
        root = self._ranks[opts.rootRank]
        many = len(tensors) > 1
        key = "broadcast", tensors[0].shape, tensors[0].dtype, root
        work = None if many else self._again(key, tensors[0], tensors[0], opts)
        if work is not None:
            return work
        views = [moved(tensor) for tensor in tensors]
        request = self._submit("broadcast", Kind.BROADCAST, views, views, root=root, grouped=many, wait=_waits(opts))
        if not many:
            self._remember(key, request, tensors[0])
        return self._work([request], tensors, opts)

    def allgather(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not AllgatherOptions:
            given = (*arrange("allgather", given, named),)
        outputs, inputs, opts = given
        if len(inputs) == 1:
            return self._allgather_list("all_gather", inputs[0], outputs[0], outputs, opts)
        return self._allgather_lists("all_gather", outputs, inputs, opts)

    def _allgather_list(
        self, operation: str, tensor: Tensor, targets: Sequence[Tensor], outputs: Sequence[Any], opts: Any
    ) -> Work:
        """Gather one tensor of each member into separate ones, if there are any here."""
        key, count = (operation, tensor.shape, tensor.dtype), tensor.numel()
        if key in self._known and all(target.numel() == count for target in targets):
            work = self._again(key, tensor, tensor.new_empty(self._size * count), opts, targets=targets)
            if work is not None:
                return work
        row, last = [moved(tensor).reshape(-1)], self._deal_out(operation)
        request = self._submit(operation, Kind.ALLGATHER, row, wait=_waits(opts), last=last, targets=targets)
        self._remember(key, request, tensor, last=last)
        return self._work([request], outputs, opts)

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[Tensor]], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        # A list of tensors for each member.
        by_tensor = [[of_member[index] for of_member in output_lists] for index in range(len(input_list))]
        return self._allgather_lists("all_gather_coalesced", by_tensor, input_list, opts)

    def _allgather_lists(
        self, operation: str, outputs: Sequence[Sequence[Tensor]], inputs: Sequence[Tensor], opts: Any
    ) -> Work:
        wait = _waits(opts) and len(inputs) == 1

        def submit(tensor: Tensor, targets: Sequence[Tensor]) -> Request:
            row, last = [moved(tensor).reshape(-1)], self._deal_out(operation)
            return self._submit(operation, Kind.ALLGATHER, row, wait=wait, last=last, targets=targets)

        return self._work([submit(*both) for both in zip(inputs, outputs, strict=True)], outputs, opts)

    def _deal_out(self, operation: str) -> _Last:
        """Return a last step that copies the gathered data of all members to the caller's tensors, if it has any."""

        def write(request: Request) -> None:
            if not request.targets:
                return
            whole, *received = _outputs(request)
            views = [moved(target.detach()) for target in request.targets]
            sizes = [view.numel() for view in views]
            sent = received[0].tolist() if received else request.answer or sizes  # a repeated call has them agreed on
            if sizes != sent:
                raise ValueError(
                    f"{operation} on rank {self._own_rank}: the members sent {sent} elements, but the tensors for them "
                    f"have {sizes}: give each the size of its member's tensor"
                )
            for view, part in zip(views, whole.split(sizes), strict=True):
                view.copy_(part.view_as(view))

        return write

    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Gather tensors of one size into one tensor."""
        opts = AllgatherOptions() if opts is None else opts
        key = "all_gather", input.shape, output.shape, input.dtype, output.dtype
        work = self._again(key, input, output, opts, -self._rank * input.nbytes)
        return work or self._allgather_single("all_gather_into_tensor", [output], [input], opts, key)

    def all_gather_single_coalesced(
        self, output_lists: Sequence[Tensor], input_list: Sequence[Tensor], opts: Any = None
    ) -> Work:
        if len(output_lists) == len(input_list) == 1:
            return self.all_gather_single(output_lists[0], input_list[0], opts)
        return self._allgather_single("all_gather_into_tensor_coalesced", output_lists, input_list, opts)

    def _allgather_single(
        self, operation: str, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any, key: object = None
    ) -> Work:
        for output, input_ in zip(outputs, inputs, strict=True):
            self._check_sizes(operation, ("output", output), ("input", input_))
        rows, targets = [moved(tensor).reshape(1, -1) for tensor in inputs], [moved(tensor) for tensor in outputs]
        many = len(rows) > 1
        request = self._submit(operation, Kind.ALLGATHER, rows, targets, grouped=many, wait=_waits(opts))
        if key is not None:
            self._remember(key, request, inputs[0])
        return self._work([request], outputs, opts)

    def _check_sizes(self, operation: str, whole: tuple[str, Tensor], part: tuple[str, Tensor]) -> None:
        """Check the tensor of all members' parts against one part; both have their names in messages."""
        (whole_name, all_parts), (part_name, one_part) = whole, part
        if all_parts.numel() != one_part.numel() * self._size or all_parts.dtype != one_part.dtype:
            raise ValueError(
                f"{operation} on rank {self._own_rank}: the {whole_name} must have {self._size} times the "
                f"{part_name}'s elements and its dtype, but it has {all_parts.numel()} of {all_parts.dtype} and the "
                f"{part_name} {one_part.numel()} of {one_part.dtype}"
            )

    def gather(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not GatherOptions:
            given = (*arrange("gather", given, named),)
        outputs, inputs, opts = given
        (tensor,) = inputs
        targets = outputs[0] if opts.rootRank == self._rank else ()
        if tensor.nbytes * self._size <= _SMALL_BYTES:
            return self._allgather_list("gather", tensor, targets, outputs, opts)
        row = moved(tensor).reshape(-1)
        splits = [row.numel() if member == opts.rootRank else 0 for member in range(self._size)]
        last, wait = self._deal_out("gather"), _waits(opts)
        request = self._submit("gather", Kind.ALLTOALL, [row], splits=splits, wait=wait, last=last, targets=targets)
        return self._work([request], outputs, opts)

    def scatter(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not ScatterOptions:
            given = (*arrange("scatter", given, named),)
        outputs, inputs, opts = given
        (output,), at_root = outputs, opts.rootRank == self._rank
        parts = [moved(tensor).reshape(-1) for tensor in inputs[0]] if at_root else []
        is_even = {part.numel() for part in parts} <= {moved(output).numel()}
        if is_even and output.nbytes * self._size <= _SMALL_BYTES:
            return self._scatter_by_broadcast(parts, output, opts)
        row, splits = moved(output).new_empty(0), [0] * self._size
        if at_root:
            row, splits = torch.cat(parts), [part.numel() for part in parts]
        last, wait = self._receive_part(opts.rootRank), _waits(opts)
        request = self._submit("scatter", Kind.ALLTOALL, [row], splits=splits, wait=wait, last=last, targets=outputs)
        return self._work([request], outputs, opts)

    def _scatter_by_broadcast(self, parts: Sequence[Tensor], output: Tensor, opts: Any) -> Work:
        """Send all parts to all members, which takes one step; each keeps its own."""
        like, root = moved(output), self._ranks[opts.rootRank]
        whole = torch.cat(list(parts)) if parts else like.new_empty(like.numel() * self._size)
        key = "scatter", output.shape, output.dtype, root
        work = self._again(key, whole, whole, opts, targets=[output])
        if work is not None:
            return work

        def write(request: Request) -> None:
            (target,) = request.targets
            rows = moved(target.detach())
            rows.copy_(_outputs(request)[0].view(self._size, -1)[self._rank].view_as(rows))

        wait, both = _waits(opts), [whole]
        request = self._submit(
            "scatter", Kind.BROADCAST, both, both, root=root, wait=wait, last=write, targets=[output]
        )
        self._remember(key, request, output, last=write)
        return self._work([request], [output], opts)

    def _receive_part(self, root: int) -> _Last:
        """Return the last step of an alltoall in which one member sends."""

        def write(request: Request) -> None:
            whole, sent = _outputs(request)
            (target,) = request.targets
            rows = moved(target.detach())
            if sent[root] != rows.numel():
                raise ValueError(
                    f"scatter on rank {self._own_rank}: the root sent {int(sent[root])} elements, but the tensor for "
                    f"them has {rows.numel()}: give it the size of its part"
                )
            rows.copy_(whole.view_as(rows))

        return write

    def all_to_all_single(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not AllToAllOptions:
            given = (*arrange("all_to_all_single", given, named),)
        output, input, output_splits, input_splits, opts = given
        key = "all_to_all", input.shape, output.shape, input.dtype, output.dtype, (*output_splits,), (*input_splits,)
        work = self._again(key, input, output, opts)
        if work is not None:
            return work
        row, target = moved(input), moved(output)
        send = self._elements("input", row, input_splits)
        receive = self._elements("output", target, output_splits)
        rows, wait, last = [row.reshape(-1)], _waits(opts), self._receive_rows(receive)
        request = self._submit(
            "all_to_all_single", Kind.ALLTOALL, rows, splits=send, wait=wait, last=last, targets=[output]
        )
        if send == receive:
            self._remember(key, request, input, last=last)
        return self._work([request], [output], opts)

    def _receive_rows(self, receive: Sequence[int]) -> _Last:
        """Return the last step of an alltoall that is to receive so many elements from each member."""

        def write(request: Request) -> None:
            whole, *counts = _outputs(request)  # without counts if the call was repeated by all members alike
            if counts and counts[0].tolist() != receive:
                raise ValueError(
                    f"all_to_all_single on rank {self._own_rank}: the others sent {counts[0].tolist()} elements, "
                    f"but output_split_sizes make it {receive}"
                )
            (target,) = request.targets
            if whole.data_ptr() != target.data_ptr():
                rows = moved(target.detach())
                rows.copy_(whole.view_as(rows))

        return write

    def _elements(self, what: str, tensor: Tensor, splits: Sequence[int]) -> list[int]:
        """Return the number of elements for each member, from rows."""
        rows = tensor.shape[0] if tensor.dim() else 1
        per_row = tensor.numel() // rows if rows else math.prod(tensor.shape[1:])
        if not splits:
            if rows % self._size:
                raise ValueError(
                    f"all_to_all_single on rank {self._own_rank}: the first dimension of the {what}, {rows}, "
                    f"must divide by the group's {self._size} members, or {what}_split_sizes say how many rows each has"
                )
            return [rows // self._size * per_row] * self._size
        if len(splits) != self._size or sum(splits) != rows or min(splits) < 0:
            raise ValueError(
                f"all_to_all_single on rank {self._own_rank}: {what}_split_sizes must be {self._size} numbers "
                f"whose sum is {rows}, the first dimension of the {what}, but they are {list(splits)}"
            )
        return [rows_of * per_row for rows_of in splits]

    def alltoall(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not AllToAllOptions:
            given = (*arrange("alltoall", given, named),)
        outputs, inputs, opts = given
        parts = [moved(tensor).reshape(-1) for tensor in inputs]
        row, splits, last = torch.cat(parts), [part.numel() for part in parts], self._deal_out("all_to_all")
        key = "all_to_all list", row.dtype, *splits
        if key in self._known and [output.numel() for output in outputs] == splits:
            work = self._again(key, row, torch.empty_like(row), opts, targets=outputs)
            if work is not None:
                return work
        wait = _waits(opts)
        request = self._submit("all_to_all", Kind.ALLTOALL, [row], splits=splits, wait=wait, last=last, targets=outputs)
        self._remember(key, request, inputs[0], last=last)
        return self._work([request], outputs, opts)

    # Messages.

    def send(self, tensors: Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:
        (tensor,) = tensors
        self._check_peer("destination", dstRank)
        if self._move_now(self._messages.send_now, tensor, dstRank, tag):
            return DONE
        data = moved(tensor.detach()).cpu().resolve_neg().contiguous()
        return self._post(self._messages.send, data, self._ranks[dstRank], tag, [], tensors)

    def recv(self, tensors: Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:
        self._check_peer("source", srcRank)
        _tell_autograd(tensors[0])  # while the message is on its way
        done = Work(tensors)
        arrived = self._move_now(self._messages.receive_now, tensors[0], srcRank, tag)
        return done if arrived else self._receive(tensors, [self._ranks[srcRank]], tag)

    def _move_now(self, move: Callable[..., bool], tensor: Tensor, member: int, tag: int) -> bool:
        """Send or receive a message at once, if the ring has room for it or contains it."""
        kind = DTYPE_CODES.get(tensor.dtype)
        if kind is None or not self._runtime.is_current or not _is_plain(tensor):
            return False
        return move(self._ranks[member], self._queue.process_set_id, tag, kind, tensor.data_ptr(), tensor.nbytes)

    def recv_anysource(self, tensors: Sequence[Tensor], tag: int = 0) -> Work:
        _tell_autograd(tensors[0])
        others = [rank for member, rank in enumerate(self._ranks) if member != self._rank]
        return self._receive(tensors, others, tag)

    def _receive(self, tensors: Sequence[Tensor], sources: Sequence[int], tag: int) -> Work:
        (tensor,) = tensors
        target = moved(tensor if _is_plain(tensor) else tensor.detach())
        direct = target.is_cpu and target.is_contiguous() and not target.is_neg()
        data = (
            target if direct else torch.empty(target.shape, dtype=target.dtype, device="cpu", pin_memory=target.is_cuda)
        )
        peer = sources[0] if len(sources) == 1 else ANY_SOURCE
        last = None if direct else _copy_to(target, data)
        return self._post(self._messages.receive, data, peer, tag, sources, tensors, last)

    def _post(
        self,
        post: Callable[[Message], None],
        data: Tensor,
        peer: int,
        tag: int,
        sources: Sequence[int],
        tensors: Sequence[Tensor],
        last: Callable[[Message], object] | None = None,
    ) -> Work:
        self._check_here()
        memory = data.data_ptr(), data.nbytes
        message = Message(peer, self._queue.process_set_id, tag, memory, DTYPE_CODES[data.dtype], data, sources)
        message.last, message.targets = last, tensors
        post(message)
        if not message.done:
            self._messages.go_on()  # in the background, while no thread waits for a message
        return Work(tensors, [message], self, self._limit_s)

    def _check_peer(self, what: str, member: int) -> None:
        if not 0 <= member < self._size or member == self._rank:
            raise ValueError(
                f"rank {self._own_rank}: the {what} must be another member of the group, 0 to "
                f"{self._size - 1}, but it is {member}"
            )

    def member_of(self, rank: int) -> int:
        return self._ranks.index(rank)

    def _late_message(self, message: Message, limit_s: float) -> HorovodInternalError:
        peers = message.sources or [message.peer]
        verb = "send" if message.sources else "receive"
        lines = _listed(self._runtime.lines_of(peers))
        return HorovodInternalError(
            f"rank {self._own_rank} waited {limit_s:g} s until the timeout for rank(s) {list(peers)} to "
            f"{verb} a message with tag {message.tag} in {self._label('messages')}: {lines}"
        )

    def monitored_barrier(self, timeout: timedelta | None = None, wait_all_ranks: bool = False) -> None:
        """Wait for all members; after the timeout member 0 names the missing ones."""
        limit_s = self._limit_s if timeout is None else timeout.total_seconds()
        if self._rank:
            answer = torch.zeros_like(self._token)
            self.send([self._token], 0, _BARRIER_TAG).wait(timedelta(seconds=limit_s))
            # Member 0 answers after its own timeout, when it has asked for the others' positions.
            self.recv([answer], 0, _BARRIER_TAG).wait(timedelta(seconds=2 * limit_s + 5))
            if not answer.item():
                raise HorovodInternalError(
                    f"Rank {self._own_rank} successfully reached monitoredBarrier, but received errors while "
                    f"waiting for send/recv from rank {self._ranks[0]}: see the error of that one"
                )
        else:
            self._answer_members(limit_s, wait_all_ranks=wait_all_ranks)
        self.wait_for_all("monitored_barrier")  # every member has its answer before one may leave the job

    def _answer_members(self, limit_s: float, *, wait_all_ranks: bool) -> None:
        """Tell the members that have arrived whether all have; raises an error that names the missing ones."""
        deadline = time.monotonic() + limit_s
        missing, members = [], range(1, self._size)
        works = {member: self.recv([torch.zeros_like(self._token)], member, _BARRIER_TAG) for member in members}
        for member, work in works.items():
            try:
                work.wait(timedelta(seconds=max(deadline - time.monotonic(), 0.001)))
            except HorovodInternalError:
                missing.append(self._ranks[member])
                if not wait_all_ranks:
                    break
        for member in [member for member, work in works.items() if work.is_success()]:
            self.send([torch.full_like(self._token, not missing)], member, _BARRIER_TAG)
        if missing:
            raise HorovodInternalError(
                f"Rank{'s' * (len(missing) > 1)} {', '.join(map(str, missing))} failed to pass monitoredBarrier: Rank "
                f"{self._ranks[0]} timed out in monitoredBarrier after {round(limit_s * 1000)} ms; "
                + _listed(self._runtime.lines_of(missing))
            )

    def wait_for_all(self, operation: str) -> None:
        """Wait for every member, without counting as a call of the user."""
        request = self._submit_barrier(operation, wait=True)
        self._finish_in_time(request)

    def barrier(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not BarrierOptions:
            given = (*arrange("barrier", given, named),)
        (opts,) = given
        work = self._again("barrier", self._token, self._token, opts)
        if work is not None:
            return work
        self._check_here()
        request = self._submit_barrier("barrier", wait=_waits(opts))
        self._remember("barrier", request)
        return self._work([request], [], opts)

    def _submit_barrier(self, operation: str, *, wait: bool) -> Request:
        request = Request(Signature(int(Kind.BARRIER), self._label(operation), None))
        self._queue.submit(request, background=not wait)
        return request

    # Method names of other torch versions.
    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single


_SUM_OF_TORCH, _PREMUL_SUM = hash(dist.ReduceOp.SUM), hash(dist.ReduceOp.PREMUL_SUM)
_BARRIER_TAG = -(2**31)  # tag of monitored_barrier's messages, which users cannot use
DTYPE_CODES = {dtype: code for code, dtype in enumerate(DTYPES.values())}
_SCATTERED = (0, 1)  # the operators of the engine's reducescatter


def _copy_to(target: Tensor, data: Tensor) -> Callable[[Message], object]:
    """Return the last step of a message that arrives in another tensor: a GPU's data is copied on the caller's stream,
    without waiting for the GPU.
    """
    if not target.is_cuda:
        return lambda message: target.copy_(data)
    stream = torch.cuda.current_stream(target.device)

    def write(message: Message) -> None:
        with torch.cuda.stream(stream):
            target.copy_(data, non_blocking=True)
            message.device_event = stream.record_event()

    return write


def _is_plain(tensor: Tensor) -> bool:
    """Return whether a tensor's memory can be copied bytewise."""
    return (
        type(tensor) is Tensor
        and tensor.is_cpu
        and not tensor.requires_grad
        and tensor.is_contiguous()
        and not tensor.is_neg()
        and not tensor.is_inference()
    )


def _tell_autograd(tensor: Tensor) -> None:
    """Count a write to a tensor, whose bytes the engine writes without autograd."""
    if not tensor.is_inference():
        increment_version(tensor)


def _listed(lines: Mapping[int, str]) -> str:
    return "; ".join(f"rank {rank} is at {line}" for rank, line in lines.items())


def _waits(opts: Any) -> bool:
    """Return whether the caller waits for the result. If torch does not say, a background thread drives it."""
    return opts is not None and not getattr(opts, "asyncOp", True)


def _outputs(request: Request) -> list[Tensor]:
    assert request.outputs is not None
    return request.outputs
