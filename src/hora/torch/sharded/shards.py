"""Shards: the parameters, gradients and optimizer state of a sharded optimizer, and this rank's slice of them.

Buckets are flat, as in `buckets.py`; member m owns slice m of every bucket. Where all members share memory (`shared`),
parameters lie in it once, every member's gradients beside them, and so does the optimizer state: each member reduces
and steps its slice, and nothing is sent. Otherwise gradients are reduce-scattered and parameters all-gathered.
Called by `sharded.ShardedOptimizer`.

A step: filling --ready of all--> reduced (`finish`) --`step`--> filling. Nobody may look at the parameters between the last
`ready` and the end of `step`, which is why the last bucket is submitted by `finish` and `step` ends with a barrier.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.engine.request import Kind, ReduceOp
from hora.errors import HorovodInternalError
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.buckets import unbind_all, view_like
from hora.torch.optimizer.per_parameter import Recipe
from hora.torch.optimizer.shared_memory import SharedMemory
from hora.torch.sharded.bucket import ShardBucket
from hora.torch.sharded.staging import NUM_PLACES, Staging

__all__ = ["Piece", "Shards"]


@dataclass(frozen=True, eq=False)
class Piece:
    """A run of elements of one bucket that this rank owns, all of one kind, as a parameter to step."""

    parameter: torch.nn.Parameter
    kind: int
    bucket: int
    begin: int
    end: int


class Shards:
    """What one rank holds of a sharded optimizer."""

    def __init__(
        self,
        runtime: Any,
        recipe: Recipe,
        specs: Sequence[BucketSpec],
        kind_of: Callable[[torch.Tensor], int],
        memory: SharedMemory | None,
    ) -> None:
        self.runtime = runtime
        self.shared = memory is not None
        self._set_id = recipe.process_set.process_set_id
        self._recipe = recipe
        self._member: int = recipe.process_set.rank()
        self._size: int = recipe.process_set.size()
        self.buckets: list[ShardBucket] = []
        staging = None if memory is None else Staging(specs, self._size, memory)
        for index in range(len(specs)):
            self.buckets.append(self._make_bucket(specs, index, memory, staging))
        self._exit = None if memory is None else memory.take_gate(runtime, "optimizer.step", self._set_id, self._size)
        self.pieces = [piece for index in range(len(specs)) for piece in self._cut(index, kind_of)]
        self.slots = {
            parameter: (bucket, index)
            for bucket in self.buckets
            for index, parameter in enumerate(bucket.spec.parameters)
        }
        self._slots_by_id = {id(parameter): slot for parameter, slot in self.slots.items()}
        bindings = [bucket.binding for bucket in self.buckets if bucket.binding is not None]
        self._finalizer = weakref.finalize(self, unbind_all, runtime, bindings, self._exit)
        self._holding: list[ShardBucket] = []  # buckets whose memory was in use when their gradients came
        self._move_parameters()

    def _make_bucket(
        self, specs: Sequence[BucketSpec], index: int, memory: SharedMemory | None, staging: Staging | None
    ) -> ShardBucket:
        spec = specs[index]
        count, dtype = spec.num_elements, spec.parameters[0].dtype
        share = count // self._size
        begin, end = self._member * share, (self._member + 1) * share
        if memory is None or staging is None:
            values = torch.zeros(count, dtype=dtype, device=spec.device)
            gradients = torch.zeros(count, dtype=spec.dtype, device=spec.device)
            return ShardBucket(self.runtime, self._recipe, spec, values, gradients, begin, end)
        values = memory.take(count, dtype)
        peers = staging.of(index)
        mine = peers[self._member]
        # Nobody else reads the own slice of the own gradients: the reduced slice can lie there, if it can stay there.
        out = torch.zeros(share, dtype=spec.dtype) if staging.in_turn else mine[begin:end]
        gate = None
        if index == len(specs) - 1:  # the caller waits for it: no need to agree on it
            gate = memory.take_gate(self.runtime, f"reducescatter.{spec.name}", self._set_id, self._size)
        binding = self.runtime.prepared.bind(
            Kind.REDUCESCATTER,
            [peers],
            name=spec.name,
            out=out,
            gate=gate,
            ends_together=staging.in_turn,
            **self._recipe.arguments_after_early_scale(),
        )
        bucket = ShardBucket(self.runtime, self._recipe, spec, values, mine, begin, end, binding)
        if staging.in_turn:
            bucket.comes_after(self.buckets[index - NUM_PLACES] if index >= NUM_PLACES else None)
        return bucket

    @staticmethod
    def num_bytes(specs: Sequence[BucketSpec], num_members: int) -> int:
        """What the parameters and everybody's gradients need."""
        values = sum(SharedMemory.space(spec.num_elements, spec.parameters[0].dtype) for spec in specs)
        return values + Staging.num_bytes(specs, num_members) + 2 * SharedMemory.gate_space(num_members)

    def _cut(self, index: int, kind_of: Callable[[torch.Tensor], int]) -> list[Piece]:
        """This rank's slice of a bucket, divided where the kind changes."""
        bucket = self.buckets[index]
        starts = [(offset, kind_of(p)) for offset, p in zip(bucket.spec.offsets, bucket.spec.parameters, strict=True)]
        edges = [start for k, start in enumerate(starts) if k == 0 or start[1] != starts[k - 1][1]]
        pieces = []
        for k, (offset, kind) in enumerate(edges):
            stop = edges[k + 1][0] if k + 1 < len(edges) else bucket.spec.num_elements
            begin, end = max(offset, bucket.begin), min(stop, bucket.end)
            if begin < end:
                parameter = torch.nn.Parameter(bucket.values[begin:end], requires_grad=False)
                if bucket.binding is not None and bucket.gradients.dtype is bucket.values.dtype:
                    parameter.grad = bucket.binding.out[begin - bucket.begin : end - bucket.begin]
                else:
                    parameter.grad = torch.zeros_like(parameter)
                pieces.append(Piece(parameter, kind, index, begin, end))
        return pieces

    def _move_parameters(self) -> None:
        """Parameters become views of the buckets. Shared: the first member's values are everybody's."""
        for bucket in self.buckets:
            for offset, parameter in zip(bucket.spec.offsets, bucket.spec.parameters, strict=True):
                view = view_like(bucket.values, offset, parameter)
                if not self.shared or self._member == 0:
                    view.copy_(parameter.detach())
        if self.shared:
            self.runtime.barrier(self._set_id)
        for parameter, view in self.values():
            parameter.data = view

    def values(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Every parameter and the view of its bucket that holds it."""
        return [
            (parameter, view_like(bucket.values, offset, parameter))
            for bucket in self.buckets
            for offset, parameter in zip(bucket.spec.offsets, bucket.spec.parameters, strict=True)
        ]

    # --- gradients ------------------------------------------------------------------------------------------------

    def ready(self, parameter: torch.Tensor) -> None:
        """Take the gradient of `parameter`, which is None afterwards: whole gradients exist after `materialise` only."""
        bucket, index = self._slots_by_id[id(parameter)]
        gradient = parameter.grad
        if gradient is not None and gradient.is_sparse:
            raise ValueError("sharded=True does not support sparse gradients; use sparse=False, or sharded=False")
        parameter.grad = None
        if self._holding:
            self._put_held()
        bucket.num_ready += 1
        if bucket.held or not bucket.is_free():
            # Never wait here: the others may need a gradient of ours that comes later.
            if not bucket.held:
                self._holding.append(bucket)
            bucket.held.append((index, gradient))
            return
        bucket.put(index, gradient)
        self._submit_if_complete(bucket)

    def note_missing(self) -> None:
        """The layout is fixed: a late gradient costs overlap, nothing else."""

    def finish(self) -> None:
        """Reduce what is left and wait: every piece has its reduced gradient then. All parameters were `ready`."""
        first_error: Exception | None = None
        try:
            for bucket in self.buckets:
                if bucket.before is not None:
                    bucket.before.wait()
                self._put_held()
        except Exception as error:
            first_error = error
        for bucket in self.buckets:
            try:
                if first_error is None or bucket.in_flight:  # whatever becomes of the others
                    bucket.wait()
            except Exception as error:
                first_error = first_error or error
        results = [bucket.take() for bucket in self.buckets]
        self._holding.clear()
        if first_error is not None:
            raise first_error
        for piece in self.pieces:
            bucket, gradient = self.buckets[piece.bucket], piece.parameter.grad
            assert gradient is not None
            result = results[piece.bucket]
            assert result is not None, bucket.spec.name
            reduced = result[piece.begin - bucket.begin : piece.end - bucket.begin]
            if reduced.data_ptr() != gradient.data_ptr():
                gradient.copy_(reduced)

    def _put_held(self) -> None:
        """Put the gradients that were held back where they belong, if that is free now."""
        for bucket in list(self._holding):
            if bucket.is_free():
                self._holding.remove(bucket)
                for index, gradient in bucket.held:
                    bucket.put(index, gradient)
                bucket.held.clear()
                self._submit_if_complete(bucket)

    def _submit_if_complete(self, bucket: ShardBucket) -> None:
        if bucket.num_ready == len(bucket.views) and bucket is not self.buckets[-1]:
            bucket.submit(background=True)

    def materialise(self) -> None:
        """Give every parameter its whole reduced gradient, on all ranks (collective)."""
        handles = []
        for index, bucket in enumerate(self.buckets):
            mine = torch.zeros(bucket.end - bucket.begin, dtype=bucket.parameter_dtype, device=bucket.values.device)
            for piece in self.pieces:
                if piece.bucket == index:
                    assert piece.parameter.grad is not None
                    mine[piece.begin - bucket.begin : piece.end - bucket.begin] = piece.parameter.grad
            handles.append(
                self.runtime.submit(Kind.ALLGATHER, [mine], name=bucket.spec.name, process_set_id=self._set_id)
            )
        for bucket, handle in zip(self.buckets, handles, strict=True):
            (whole,) = self.runtime.synchronize(handle)
            for offset, parameter in zip(bucket.spec.offsets, bucket.spec.parameters, strict=True):
                parameter.grad = view_like(whole, offset, parameter)

    def take_whole(self) -> None:
        """Take this rank's slices of the parameters' whole gradients, which the user may have changed."""
        for piece in self.pieces:
            bucket = self.buckets[piece.bucket]
            assert piece.parameter.grad is not None
            piece.parameter.grad.zero_()
            for parameter, source, target in self.overlaps(bucket, piece):
                if parameter.grad is not None:
                    piece.parameter.grad[target] = _in_memory_order(parameter.grad, parameter)[source].to(
                        piece.parameter.dtype
                    )
        for parameter in self.slots:
            parameter.grad = None

    @staticmethod
    def overlaps(bucket: ShardBucket, piece: Piece) -> list[tuple[torch.Tensor, slice, slice]]:
        """Parameters that lie in a piece: (parameter, which of its elements, where in the piece)."""
        found = []
        for offset, parameter in zip(bucket.spec.offsets, bucket.spec.parameters, strict=True):
            begin, end = max(offset, piece.begin), min(offset + parameter.numel(), piece.end)
            if begin < end:
                where = slice(begin - piece.begin, end - piece.begin)
                found.append((parameter, slice(begin - offset, end - offset), where))
        return found

    # --- after the step -------------------------------------------------------------------------------------------

    def publish(self) -> None:
        """Make the stepped slices everybody's: a barrier where memory is shared, otherwise all-gather them."""
        if self._exit is not None:
            self.meet()
            return
        handles = [
            self.runtime.submit(
                Kind.ALLGATHER,
                [bucket.values[bucket.begin : bucket.end]],
                name=f"parameters.{bucket.spec.name}",
                process_set_id=self._set_id,
            )
            for bucket in self.buckets
        ]
        for bucket, handle in zip(self.buckets, handles, strict=True):
            (whole,) = self.runtime.synchronize(handle)
            bucket.values.copy_(whole)

    def meet(self) -> None:
        """Return when every member is here: needed before stepping when gradients were reduced earlier."""
        if self._exit is not None and self._exit.pass_through():
            raise HorovodInternalError(
                "a sharded optimizer is not supported with Join: every rank has to step its slice"
            )

    def release(self) -> None:
        """Forget the prepared reductions."""
        self._finalizer()

    def gradient_norm(self, norm_type: float) -> torch.Tensor:
        """The norm of all members' slices together (collective)."""
        gradients = [piece.parameter.grad for piece in self.pieces if piece.parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type).double().reshape(1)
        infinite = norm_type == float("inf")
        value = norm if infinite else norm**norm_type
        handle = self.runtime.submit(
            Kind.ALLREDUCE,
            [value],
            outputs=[value],
            name="gradient norm",
            op=ReduceOp.MAX if infinite else ReduceOp.SUM,
            process_set_id=self._set_id,
        )
        self.runtime.synchronize(handle)
        total = value if infinite else value ** (1.0 / norm_type)
        return total.float().squeeze(0)

    def inner_groups(self, groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A parameter group for each kind, with the options given for it and this rank's pieces.

        A rank without a piece of some kind steps one idle element instead, to know the scalars of its state.
        """
        result = []
        for kind, group in enumerate(groups):
            members = [piece.parameter for piece in self.pieces if piece.kind == kind]
            if not members:
                like = group["params"][0]
                idle = torch.nn.Parameter(torch.zeros(1, dtype=like.dtype, device=like.device), requires_grad=False)
                idle.grad = torch.zeros_like(idle)
                members.append(idle)
            result.append({**group, "params": members})
        return result


def _in_memory_order(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The elements of `tensor` in the order in which `like` lies in its bucket."""
    if like.is_contiguous():
        return tensor.reshape(-1)
    flat = torch.empty(like.numel(), dtype=tensor.dtype, device=tensor.device)
    view_like(flat, 0, like).copy_(tensor)
    return flat
