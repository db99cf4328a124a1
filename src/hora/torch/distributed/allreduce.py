"""`Allreduce`: all_reduce and reduce."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllreduceCoalescedOptions, AllreduceOptions, ReduceOptions

from hora.engine.request import Kind, Reduce, ReduceOp, Request
from hora.torch.distributed.calls import SMALL_BYTES, outputs_of, waits
from hora.torch.distributed.reductions import PREMUL_SUM, SUM, Reduction, fold, moved, reduction_of
from hora.torch.distributed.repeated import RepeatedCalls
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import Work

_MEAN, _ASYNC = Reduce(ReduceOp.AVERAGE), AllreduceOptions()


class Allreduce(RepeatedCalls):
    """Reductions whose result all members get, or one of them."""

    def allreduce(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not AllreduceOptions:
            given = (*arrange("allreduce", given, named),)
        tensors, opts = given
        if self._watched:
            self.comparisons.reduces()
        return self._allreduce_one(tensors, opts) if len(tensors) == 1 else self._allreduce("all_reduce", tensors, opts)

    def allreduce_coalesced(self, tensors: Sequence[Tensor], opts: Any = None) -> Work:
        opts = AllreduceCoalescedOptions() if opts is None else opts
        if len(tensors) == 1:
            return self._allreduce_one(tensors, opts)
        kinds = tuple([(tensor.shape, tensor.dtype) for tensor in tensors])
        key = "all_reduce_coalesced", kinds, hash(opts.reduceOp)
        if key in self._known:  # packed in one tensor
            whole = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
            work = self._again(key, whole, whole, opts, targets=tensors)
            if work is not None:
                return work
        return self._allreduce("all_reduce_coalesced", tensors, opts, key)

    def average(self, source: Tensor, target: Tensor) -> Work:
        """Write the mean of all members' sources to a target in other memory. Sources stay as they are."""
        key = "average", source.shape, source.dtype
        work = self._again(key, source, target, _ASYNC)
        if work is None:
            request = self._submit("all_reduce", Kind.ALLREDUCE, [source], [target], reduce=_MEAN, wait=False)
            self._remember(key, request, source)
            work = self._work([request], [target], _ASYNC)
        return work

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
        wait, requests = waits(opts) and len(kinds) == 1, list[Request]()
        for reduce in kinds:
            some = [view for view, one in zip(views, reductions, strict=True) if one.reduce == reduce]
            many = len(some) > 1
            request = self._submit(operation, Kind.ALLREDUCE, some, some, reduce=reduce, grouped=many, wait=wait)
            requests.append(request)
        if key is not None and hash(opts.reduceOp) != PREMUL_SUM and len(kinds) == 1:
            if len(tensors) == 1:
                self._remember(key, request, tensors[0])
            elif sum(tensor.nbytes for tensor in tensors) <= SMALL_BYTES:
                self._remember(key, request, *tensors, last=_unpack)
        return self._work(requests, tensors, opts)

    def _allreduce_folded(
        self, operation: str, tensors: Sequence[Tensor], reductions: Sequence[Reduction], opts: Any
    ) -> Work:
        """Reduce with an operator that the engine lacks: members gather all inputs and fold them in rank order."""

        def submit(tensor: Tensor, one: Reduction) -> Request:
            def write(request: Request) -> None:
                parts = [row.view(tensor.dtype) for row in outputs_of(request)[0].view(self._size, -1)]
                tensor.detach().copy_(fold(one, parts, tensor))

            rows = [moved(tensor).reshape(1, -1)]
            return self._submit(operation, Kind.ALLGATHER, rows, wait=False, last=write, targets=[tensor])

        return self._work([submit(*both) for both in zip(tensors, reductions, strict=True)], tensors, opts)

    def _allreduce_sparse(self, operation: str, tensors: Sequence[Tensor], opts: Any) -> Work:
        (tensor,) = tensors
        if hash(opts.reduceOp) != SUM:
            raise ValueError(f"{operation} of sparse tensors takes ReduceOp.SUM only, on rank {self._own_rank}")
        own = tensor.coalesce()
        indices = self._submit(operation, Kind.ALLGATHER, [own.indices().t().contiguous()], wait=False)

        def write(values: Request) -> None:  # the last of both: they are executed in order
            indices.raise_error()
            (where,), (what,) = outputs_of(indices), outputs_of(values)
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
        request = self._submit("reduce", Kind.ALLREDUCE, [view], result, reduce=one.reduce, wait=waits(opts))
        if hash(opts.reduceOp) != PREMUL_SUM:
            self._remember(key, request, tensor)
        return self._work([request], tensors, opts)


def _unpack(request: Request) -> None:
    """Copy the parts of a packed result to the caller's tensors."""
    for target, result in zip(request.targets, outputs_of(request), strict=bool(request.targets)):
        target.detach().copy_(result)
