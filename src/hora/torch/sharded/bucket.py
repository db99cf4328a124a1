"""One bucket of a sharded optimizer: parameters, this rank's gradients on their way, and this rank's reduced slice.

In a step: empty --`put` of every gradient--> complete --`submit`--> in flight --`wait`--> reduced --`take`--> empty. The last
bucket is not submitted: `wait`, in the thread that needs the result, carries it out. Several buckets may use the same
memory for their gradients, one after the other (`before`); a gradient that comes too early is held until it `is_free`.
"""

from __future__ import annotations

from typing import Any

import torch

from hora.engine.request import Kind
from hora.torch.optimizer.bucket_plan import BucketSpec
from hora.torch.optimizer.buckets import view_like
from hora.torch.optimizer.per_parameter import Recipe

__all__ = ["ShardBucket"]


class ShardBucket:
    """This rank owns the elements from `begin` to `end`. `binding` is the prepared reduction where memory is shared."""

    def __init__(
        self,
        runtime: Any,
        recipe: Recipe,
        spec: BucketSpec,
        values: torch.Tensor,
        gradients: torch.Tensor,
        begin: int,
        end: int,
        binding: Any = None,
    ) -> None:
        self._runtime = runtime
        self._arguments = recipe.arguments_after_early_scale()
        self._scale = recipe.early_scale
        self.spec = spec
        self.values = values  # parameters: the same memory on all members when shared
        self.gradients = gradients  # this rank's, to be reduced
        self.begin, self.end = begin, end
        self.binding = binding
        self.views = [view_like(gradients, offset, p) for offset, p in zip(spec.offsets, spec.parameters, strict=True)]
        self.before: ShardBucket | None = None
        self.held: list[tuple[int, torch.Tensor | None]] = []  # gradients that came while the memory was in use
        self.num_ready = 0
        self._gaps: list[torch.Tensor] = []
        self._handle: int | None = None  # of the reduction in flight
        self._reduced: torch.Tensor | None = None

    @property
    def parameter_dtype(self) -> torch.dtype:
        return self.spec.parameters[0].dtype

    @property
    def in_flight(self) -> bool:
        return self._handle is not None

    def comes_after(self, before: ShardBucket | None) -> None:
        """The memory of `gradients` is used by other buckets too, in this step by `before`."""
        self.before = before
        # Between the gradients and behind them the others leave numbers, which must not count in a norm.
        ends = [offset + p.numel() for offset, p in zip(self.spec.offsets, self.spec.parameters, strict=True)]
        begins = [*self.spec.offsets[1:], self.spec.num_elements]
        pairs = zip(ends, begins, strict=True)
        self._gaps = [self.gradients[end:begin] for end, begin in pairs if begin > end]

    def is_free(self) -> bool:
        """Whether all members are done with the bucket that uses the memory earlier in this step."""
        before = self.before
        if before is None or before._reduced is not None:
            return True
        return before._handle is not None and bool(self._runtime.poll(before._handle))

    def put(self, index: int, gradient: torch.Tensor | None) -> None:
        """Copy a gradient in, None for one that is missing here."""
        view = self.views[index]
        if gradient is None:
            view.zero_()
        elif self._scale != 1.0:
            torch.mul(gradient.detach(), self._scale, out=view)
        else:
            view.copy_(gradient.detach())

    def submit(self, *, background: bool) -> None:
        """All gradients are in: reduce them."""
        if self.binding is not None:
            self._clear_gaps()
            self._handle = self._runtime.prepared.submit(self.binding, background=background)
        else:
            self._handle = self._runtime.submit(
                Kind.REDUCESCATTER,
                [self.gradients],
                name=self.spec.name,
                background=background,
                **self._arguments,
            )

    def wait(self) -> None:
        """Return when this rank's slice is reduced; reduce it if that has not been requested."""
        if self._reduced is not None:
            return
        if self._handle is None and self.binding is not None and self.binding.gate is not None:
            self._clear_gaps()
            self._reduced = self._runtime.prepared.reduce_at_gate(self.binding)
            return
        if self._handle is None:
            self.submit(background=False)
        handle, self._handle = self._handle, None
        (self._reduced,) = self._runtime.synchronize(handle)

    def take(self) -> torch.Tensor | None:
        """The reduced slice, None if the reduction failed; the bucket is empty again."""
        reduced, self._reduced = self._reduced, None
        self.num_ready = 0
        self.held.clear()
        return reduced

    def _clear_gaps(self) -> None:
        if self._gaps:
            torch._foreach_zero_(self._gaps)
