"""`Broadcast`: broadcast and scatter, which send what one member has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import BroadcastOptions, ScatterOptions

from hora.engine.request import Kind, Request
from hora.torch.distributed.calls import SMALL_BYTES, LastStep, outputs_of, waits
from hora.torch.distributed.reductions import moved
from hora.torch.distributed.repeated import RepeatedCalls
from hora.torch.distributed.signatures import arrange
from hora.torch.distributed.work import Work


class Broadcast(RepeatedCalls):
    """A tensor for all members, or a part for each. A scatter of much data is an alltoall in which one member sends."""

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
        request = self._submit("broadcast", Kind.BROADCAST, views, views, root=root, grouped=many, wait=waits(opts))
        if not many:
            self._remember(key, request, tensors[0])
        return self._work([request], tensors, opts)

    def scatter(self, *given: Any, **named: Any) -> Work:
        if named or not given or type(given[-1]) is not ScatterOptions:
            given = (*arrange("scatter", given, named),)
        outputs, inputs, opts = given
        (output,), at_root = outputs, opts.rootRank == self._rank
        parts = [moved(tensor).reshape(-1) for tensor in inputs[0]] if at_root else []
        is_even = {part.numel() for part in parts} <= {moved(output).numel()}
        if is_even and output.nbytes * self._size <= SMALL_BYTES:
            return self._scatter_by_broadcast(parts, output, opts)
        row, splits = moved(output).new_empty(0), [0] * self._size
        if at_root:
            row, splits = torch.cat(parts), [part.numel() for part in parts]
        last, wait = self._receive_part(opts.rootRank), waits(opts)
        request = self._submit("scatter", Kind.ALLTOALL, [row], splits=splits, wait=wait, last=last, targets=outputs)
        return self._work([request], outputs, opts)

    def _scatter_by_broadcast(self, parts: Sequence[Tensor], output: Tensor, opts: Any) -> Work:
        """Send all parts to all members, which takes one step; each keeps its own."""
        like, root = moved(output), self._ranks[opts.rootRank]
        whole = torch.cat(list(parts)) if parts else like.new_empty(like.numel() * self._size)
        key = "scatter", output.shape, output.dtype, root
        begin = self._rank * like.numel()
        part = whole[begin : begin + like.numel()]
        work = self._again(key, whole, whole, opts, targets=[output], part=part)
        if work is not None:
            return work

        def write(request: Request) -> None:
            for target in request.targets:
                rows = moved(target.detach())
                rows.copy_(outputs_of(request)[0].view(self._size, -1)[self._rank].view_as(rows))

        wait, both = waits(opts), [whole]
        request = self._submit(
            "scatter", Kind.BROADCAST, both, both, root=root, wait=wait, last=write, targets=[output]
        )
        self._remember(key, request, output, last=write)
        return self._work([request], [output], opts)

    def _receive_part(self, root: int) -> LastStep:
        """Return the last step of an alltoall in which one member sends."""

        def write(request: Request) -> None:
            whole, sent = outputs_of(request)
            (target,) = request.targets
            rows = moved(target.detach())
            if sent[root] != rows.numel():
                raise ValueError(
                    f"scatter on rank {self._own_rank}: the root sent {int(sent[root])} elements, but the tensor for "
                    f"them has {rows.numel()}: give it the size of its part"
                )
            rows.copy_(whole.view_as(rows))

        return write
