"""`Allgather`: all_gather, gather and all_to_all of lists: what each member sends, dealt out to separate tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch._C._distributed_c10d import AllgatherOptions, GatherOptions

from hora.engine.request import Kind, Request
from hora.torch.distributed.calls import SMALL_BYTES, waits
from hora.torch.distributed.reductions import moved
from hora.torch.distributed.repeated import RepeatedCalls
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import Work


class Allgather(RepeatedCalls):
    """All members' tensors, for all or for one. A gather of much data is an alltoall in which one member receives."""

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
        request = self._submit(operation, Kind.ALLGATHER, row, wait=waits(opts), last=last, targets=targets)
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
        wait = waits(opts) and len(inputs) == 1

        def submit(tensor: Tensor, targets: Sequence[Tensor]) -> Request:
            row, last = [moved(tensor).reshape(-1)], self._deal_out(operation)
            return self._submit(operation, Kind.ALLGATHER, row, wait=wait, last=last, targets=targets)

        return self._work([submit(*both) for both in zip(inputs, outputs, strict=True)], outputs, opts)

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
        request = self._submit(operation, Kind.ALLGATHER, rows, targets, grouped=many, wait=waits(opts))
        if key is not None:
            self._remember(key, request, inputs[0])
        return self._work([request], outputs, opts)

    def gather(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not GatherOptions:
            given = (*arrange("gather", given, named),)
        outputs, inputs, opts = given
        (tensor,) = inputs
        targets = outputs[0] if opts.rootRank == self._rank else ()
        if tensor.nbytes * self._size <= SMALL_BYTES:
            return self._allgather_list("gather", tensor, targets, outputs, opts)
        row = moved(tensor).reshape(-1)
        splits = [row.numel() if member == opts.rootRank else 0 for member in range(self._size)]
        last, wait = self._deal_out("gather"), waits(opts)
        request = self._submit("gather", Kind.ALLTOALL, [row], splits=splits, wait=wait, last=last, targets=targets)
        return self._work([request], outputs, opts)
