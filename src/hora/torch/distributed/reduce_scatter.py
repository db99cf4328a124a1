"""`ReduceScatter`: reductions of which each member gets a part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import ReduceScatterOptions

from hora.engine.request import Kind, Request
from hora.torch.distributed.calls import outputs_of, waits
from hora.torch.distributed.reductions import PREMUL_SUM, Reduction, fold, moved, reduction_of
from hora.torch.distributed.repeated import RepeatedCalls
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import Work

_SCATTERED = (0, 1)  # the operators of the engine's reducescatter


class ReduceScatter(RepeatedCalls):
    """reduce_scatter of lists, of one tensor, and coalesced."""

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
            wait = waits(opts) and len(outputs) == 1
            requests.append(self._scatter_rows(operation, rows, output, one, wait=wait))
        request = requests[0]
        if key is not None and request.signature.kind == Kind.REDUCESCATTER and hash(opts.reduceOp) != PREMUL_SUM:
            self._remember(key, request, inputs[0])
        return self._work(requests, outputs, opts)

    def _scatter_rows(self, operation: str, rows: Tensor, output: Tensor, one: Reduction, *, wait: bool) -> Request:
        """Reduce row m to member m."""
        target = one.view(output.detach())
        if one.folded is not None or one.reduce.op not in _SCATTERED:

            def write(request: Request) -> None:
                target.copy_(fold(one, list(outputs_of(request)[0].view(rows.dtype)), target))

            splits, sent = [1] * self._size, [moved(rows)]
            return self._submit(operation, Kind.ALLTOALL, sent, splits=splits, wait=False, last=write, targets=[target])
        if rows.untyped_storage().data_ptr() != target.untyped_storage().data_ptr():
            return self._submit(operation, Kind.REDUCESCATTER, [rows], [target], reduce=one.reduce, wait=wait)

        # The output is a part of the input, which is still being read when the first results arrive.
        def copy(request: Request) -> None:
            target.copy_(outputs_of(request)[0].view_as(target))

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
            target.copy_(outputs_of(request)[0][begin : begin + target.numel()].view_as(target))

        reduce, targets = one.reduce, [target]
        return self._submit(operation, Kind.ALLREDUCE, [whole], reduce=reduce, wait=False, last=write, targets=targets)
