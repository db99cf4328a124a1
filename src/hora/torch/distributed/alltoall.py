"""`Alltoall`: all_to_all of one tensor and of lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import AllToAllOptions

from hora.engine.request import Kind, Request
from hora.torch.distributed.calls import LastStep, outputs_of, waits
from hora.torch.distributed.reductions import moved
from hora.torch.distributed.repeated import RepeatedCalls
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import Work


class Alltoall(RepeatedCalls):
    """A part of every member's tensor for every member."""

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
        rows, wait, last = [row.reshape(-1)], waits(opts), self._receive_rows(receive)
        request = self._submit(
            "all_to_all_single", Kind.ALLTOALL, rows, splits=send, wait=wait, last=last, targets=[output]
        )
        if send == receive:
            self._remember(key, request, input, last=last)
        return self._work([request], [output], opts)

    def _receive_rows(self, receive: Sequence[int]) -> LastStep:
        """Return the last step of an alltoall that is to receive so many elements from each member."""

        def write(request: Request) -> None:
            whole, *counts = outputs_of(request)  # without counts if the call was repeated by all members alike
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
        wait = waits(opts)
        request = self._submit("all_to_all", Kind.ALLTOALL, [row], splits=splits, wait=wait, last=last, targets=outputs)
        self._remember(key, request, inputs[0], last=last)
        return self._work([request], outputs, opts)
