"""Gradient buckets: many gradients in one flat buffer, reduced as one request while backward goes on.

A gradient is copied into its bucket when it is ready (with the cast of the compression, in the same pass), the bucket's last
one submits it, and `.grad` becomes a view of the bucket, so that nothing is copied back. Where the members share memory
the buckets lie in it and are reduced in place. The last bucket is submitted by `finish`, in the thread that then waits
for it. Which gradient goes where was agreed by `adaptation.py`; the optimizer calls `ready` and `finish`.

States of a bucket: filling --last gradient--> submitted --finish--> filling.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from hora.engine.request import Kind
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.error_feedback import ErrorFeedback
from hora.torch.optimizer.per_parameter import EachAlone, Recipe

__all__ = ["Bucket", "Buckets", "unbind_all", "view_like"]

# Gradients smaller than this are copied together when the bucket is complete: a call costs more than the bytes.
_SMALL_BYTES = 16 * 1024


def view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """`parameter.numel()` elements of `flat` from `offset`, in the shape and, if possible, the strides of `parameter`."""
    piece = flat[offset : offset + parameter.numel()]
    if not parameter.is_contiguous() and (
        (parameter.dim() == 4 and parameter.is_contiguous(memory_format=torch.channels_last))
        or (parameter.dim() == 5 and parameter.is_contiguous(memory_format=torch.channels_last_3d))
    ):
        return piece.as_strided(parameter.shape, parameter.stride())
    return piece.view(parameter.shape)


def unbind_all(runtime: Any, bindings: Sequence[Any], gate: Any = None) -> None:
    """Let the runtime forget these reductions, and a gate."""
    for binding in bindings:
        runtime.prepared.unbind(binding)
        if gate is not None:
            runtime.prepared.drop_gate(gate, binding.process_set_id)


def _views_of(flat: torch.Tensor, spec: BucketSpec) -> list[torch.Tensor]:
    return [view_like(flat, offset, p) for offset, p in zip(spec.offsets, spec.parameters, strict=True)]


class Bucket:
    """One flat buffer and the gradients in it. One more element than they need tells the peers about a changed order."""

    __slots__ = (
        "binding",
        "converts",
        "expected",
        "flat",
        "handle",
        "index",
        "name",
        "num_ready",
        "offsets",
        "parameters",
        "places",
        "residuals",
        "scale",
        "small",
        "views",
    )

    def __init__(
        self, spec: BucketSpec, index: int, flat: torch.Tensor, binding: Any, member: int, *, error_feedback: bool
    ) -> None:
        self.index = index
        self.name = spec.name
        self.parameters = spec.parameters
        self.offsets = spec.offsets
        self.expected = len(spec.parameters)
        self.converts = spec.dtype is not spec.parameters[0].dtype  # results are copied to gradients of another kind
        self.flat = flat
        self.binding = binding  # the prepared reduction, where the members share memory
        self.views = _views_of(flat, spec)
        # Where gradients are put: into the buffer itself, or where a direct reduction wants them in this turn.
        self.places = [(flat, self.views)]
        if binding is not None and binding.out is not None:
            self.places = [(views[member], _views_of(views[member], spec)) for views in binding.places]
        self.residuals = [torch.zeros_like(p) for p in spec.parameters] if error_feedback else None
        self.small: list[int] = []
        self.scale = 1.0  # gradients are multiplied with it when they are copied
        self.num_ready = 0
        self.handle: int | None = None

    def place(self) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The flat memory that gradients are to be put into now, and its views."""
        return self.places[self.binding.turn] if len(self.places) > 1 else self.places[0]


class Buckets:
    """Reduces dense gradients in buckets, and what does not fit in (`alone`) one by one."""

    def __init__(
        self,
        runtime: Any,
        recipe: Recipe,
        specs: Sequence[BucketSpec],
        memory: Sequence[tuple[torch.Tensor, Any]],
        alone: EachAlone | None,
    ) -> None:
        self._runtime = runtime
        self._arguments = recipe.arguments()
        self._alone = alone
        self._error_feedback = isinstance(recipe.compression, ErrorFeedback)
        member = recipe.process_set.rank()
        self.specs = tuple(specs)
        self.buckets = [
            Bucket(spec, index, flat, binding, member, error_feedback=self._error_feedback)
            for index, (spec, (flat, binding)) in enumerate(zip(specs, memory, strict=True))
        ]
        for bucket in self.buckets:
            if bucket.binding is not None and bucket.binding.out is None:
                bucket.scale = recipe.early_scale
        self._slots: dict[int, tuple[Bucket, int, bool]] = {}  # by the parameter's id
        for bucket in self.buckets:
            for index, parameter in enumerate(bucket.parameters):
                is_small = parameter.numel() * bucket.flat.element_size() < _SMALL_BYTES
                self._slots[id(parameter)] = (bucket, index, is_small)
        self._last = self.buckets[-1]
        self._control = self._last.flat[-1]
        self._told = [0.0] * len(self._last.places)
        bindings = [bucket.binding for bucket in self.buckets if bucket.binding is not None]
        self._finalizer = weakref.finalize(self, unbind_all, runtime, bindings)
        self._submitted: list[Bucket] = []
        self._in_order = True
        self._next = 0
        self.change_wanted = False

    def ready(self, parameter: torch.Tensor) -> None:
        slot = self._slots.get(id(parameter))
        if slot is None:
            assert self._alone is not None
            self._alone.ready(parameter)
            return
        bucket, index, is_small = slot
        if is_small:
            bucket.small.append(index)
        else:
            self._fill(bucket, [index])
        bucket.num_ready += 1
        if bucket.num_ready == bucket.expected:
            # Whatever arrives in an unexpected order is still right, only slower: note it, and agree on a better one later.
            if bucket.index != self._next:
                self._in_order = False
            self._next += 1
            if bucket is not self._last:
                self._submit(bucket)

    def note_missing(self) -> None:
        """Some gradient did not arrive by itself: its bucket could not be reduced during backward."""
        self._in_order = False

    def finish(self) -> None:
        self._tell(0.0 if self._in_order else 1.0)
        self._in_order, self._next = True, 0
        first_error: Exception | None = None
        at_gate = self._last.binding is not None and self._last.binding.gate is not None
        if not at_gate:
            self._submit(self._last)
        submitted, self._submitted = self._submitted, []
        if at_gate:
            self._fill_small(self._last)
            submitted.append(self._last)
        for bucket in submitted:
            handle, bucket.handle, bucket.num_ready = bucket.handle, None, 0
            try:
                if handle is None:
                    self._runtime.prepared.reduce_at_gate(bucket.binding)
                else:
                    self._runtime.synchronize(handle)
            except Exception as error:  # every handle must be collected, whatever becomes of the others
                first_error = first_error or error
        if self._alone is not None:
            self._alone.finish()
        if first_error is not None:
            raise first_error
        answer = self._control.item()
        self.change_wanted = answer != 0.0
        if len(self._told) == 1:
            self._told[0] = answer  # reduced in place
        for bucket in submitted:
            if bucket.converts:
                self._give_back(bucket)

    def _tell(self, value: float) -> None:
        """Put the control element beside the gradients, unless it is there. Other turns' places may still be read."""
        turn = self._last.binding.turn if len(self._told) > 1 else 0
        if self._told[turn] != value:
            self._told[turn] = value
            self._last.places[turn][0][-1] = value

    def _fill(self, bucket: Bucket, indices: Sequence[int]) -> None:
        """Copy gradients to where they are reduced; without compression `.grad` is where the result will be."""
        targets, sources = [], []
        places = bucket.place()[1]
        for index in indices:
            parameter, view, place = bucket.parameters[index], bucket.views[index], places[index]
            gradient = parameter.grad
            if gradient is None:
                place.zero_()
                if view.dtype is not parameter.dtype:
                    parameter.grad = torch.zeros_like(parameter)
                    continue
            elif gradient is not place:
                gradient = gradient.detach()
                if gradient.is_sparse:
                    gradient = gradient.to_dense()
                    bucket.converts = True
                    torch.mul(gradient, bucket.scale, out=place)
                    continue
                if bucket.residuals is not None:
                    gradient.add_(bucket.residuals[index])
                targets.append(place)
                sources.append(gradient)
            elif bucket.scale != 1.0:
                place.mul_(bucket.scale)
            if view.dtype is parameter.dtype:
                parameter.grad = view
        if bucket.scale != 1.0:
            for target, source in zip(targets, sources, strict=True):
                torch.mul(source, bucket.scale, out=target)
        elif len(targets) == 1:
            targets[0].copy_(sources[0])
        elif targets:
            torch._foreach_copy_(targets, sources)
        if bucket.residuals is not None:
            for index in indices:
                gradient = bucket.parameters[index].grad
                if gradient is not None:
                    torch.sub(gradient, places[index], out=bucket.residuals[index])

    def _fill_small(self, bucket: Bucket) -> None:
        if bucket.small:
            self._fill(bucket, bucket.small)
            bucket.small = []

    def _submit(self, bucket: Bucket) -> None:
        self._fill_small(bucket)
        background = bucket is not self._last
        if bucket.binding is not None:
            bucket.handle = self._runtime.prepared.submit(bucket.binding, background=background)
        else:
            bucket.handle = self._runtime.submit(
                Kind.ALLREDUCE,
                [bucket.flat],
                outputs=[bucket.flat],
                name=bucket.name,
                background=background,
                **self._arguments,
            )
        self._submitted.append(bucket)

    def release(self) -> None:
        """Forget the prepared reductions; gradients that look into the buckets keep the memory."""
        self._finalizer()

    def _give_back(self, bucket: Bucket) -> None:
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True):
            gradient = parameter.grad
            if gradient is None:
                parameter.grad = view.to(parameter.dtype, copy=True)
            elif gradient is not view:
                if gradient.is_sparse:
                    parameter.grad = view.to(parameter.dtype).to_sparse(1)
                else:
                    gradient.detach().copy_(view)
