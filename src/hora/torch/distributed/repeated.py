"""`RepeatedCalls`: a call like an earlier one takes the engine's plan for it, without negotiation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hora.engine.request import Request
from hora.torch.distributed.calls import ZERO, Calls, LastStep, is_plain, tell_autograd, waits
from hora.torch.distributed.work import DONE, Work

_KEPT = 4096


class RepeatedCalls(Calls):
    """Calls that remember the engine's plans by what their tensors look like."""

    def _again(
        self,
        key: object,
        source: Tensor,
        target: Tensor,
        opts: Any,
        shift: int = 0,
        targets: Sequence[Tensor] | None = None,
        part: Tensor | None = None,
    ) -> Work | None:
        """Repeat an earlier call on the fast path; returns None if that is impossible. `shift`: bytes by which the
        target may begin after the source, if they share memory. `targets`: what the plan's last step writes from it:
        their data in order, from `part` of it if given.
        """
        plan = self._known.get(key)
        if plan is None or opts is None or not self._runtime.is_current or opts.timeout > ZERO:
            return None
        if not is_plain(target) or torch.is_inference_mode_enabled():
            return None
        if source is not target:
            distance = target.data_ptr() - source.data_ptr()
            if not is_plain(source) or (-target.nbytes < distance < source.nbytes and distance != shift):
                return None
        if not waits(opts):
            request = plan.path.start(plan, source, target, targets)
            if request is None:
                return None
            self._num_calls += 1
            return Work([target] if targets is None else targets, [request], self, self._limit_s)
        # The caller waits, so plain targets are written here, which saves a request.
        dealt_here = targets is not None and all(one.dtype is target.dtype and is_plain(one) for one in targets)
        if not plan.path.carry_out(plan, source, target, self._finish_in_time, () if dealt_here else targets):
            return None
        self._num_calls += 1
        if targets is None:
            tell_autograd(target)
        elif dealt_here and targets:
            _deal_out(target if part is None else part, targets)
        return DONE

    def _remember(self, key: object, request: Request, *tensors: Tensor, last: LastStep | None = None) -> None:
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

    def _check_sizes(self, operation: str, whole: tuple[str, Tensor], part: tuple[str, Tensor]) -> None:
        """Check the tensor of all members' parts against one part; both have their names in messages."""
        (whole_name, all_parts), (part_name, one_part) = whole, part
        if all_parts.numel() != one_part.numel() * self._size or all_parts.dtype != one_part.dtype:
            raise ValueError(
                f"{operation} on rank {self._own_rank}: the {whole_name} must have {self._size} times the "
                f"{part_name}'s elements and its dtype, but it has {all_parts.numel()} of {all_parts.dtype} and the "
                f"{part_name} {one_part.numel()} of {one_part.dtype}"
            )


def _deal_out(whole: Tensor, targets: Sequence[Tensor]) -> None:
    """Copy consecutive parts of a flat tensor to plain tensors."""
    parts = torch.split_with_sizes(whole, [target.numel() for target in targets])
    torch._foreach_copy_([*targets], [part.view_as(target) for part, target in zip(parts, targets, strict=True)])
