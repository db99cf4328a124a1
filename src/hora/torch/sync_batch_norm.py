"""`SyncBatchNorm`: batch normalization over the batches of all ranks, with one allreduce in each direction.

Forward sums every channel's sum, sum of squares and count in one float64 tensor; backward sums the two terms of its
formula. Counts may differ: ranks without rows and joined ranks add nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from hora import engine
from hora.torch.ops import allreduce_
from hora.torch.reduce_op import Sum


class SyncBatchNorm(_BatchNorm):
    """Like `torch.nn.BatchNorm*d`, with statistics over the batches of all ranks; input of two or more dimensions."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        self._check_input_dim(input)
        use_batch = self.training or self.running_mean is None
        if not use_batch or not engine.is_initialized() or engine.current_runtime().world.size == 1:
            return super().forward(input)
        mean, variance, count = _global_statistics(input)
        if self.training and self.track_running_stats:
            self._update_running(mean, variance, count)
        return _Normalise.apply(input, self.weight, self.bias, mean, variance, count, self.eps)

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor, count: torch.Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


def _other_dims(input: torch.Tensor) -> list[int]:
    return [dim for dim in range(input.dim()) if dim != 1]


@torch.no_grad()
def _global_statistics(input: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Mean, biased variance and count over all ranks; in float64, because differences of squares cancel in float32."""
    channels = input.shape[1]
    count = input.numel() // channels if channels else 0
    packed = torch.zeros(2 * channels + 1, dtype=torch.float64, device=input.device)
    if count:
        working = input if input.dtype in (torch.float32, torch.float64) else input.float()
        variance, mean = (t.double() for t in torch.var_mean(working, _other_dims(input), correction=0))
        packed[:channels] = mean * count
        packed[channels:-1] = (variance + mean * mean) * count
        packed[-1] = count
    allreduce_(packed, op=Sum)
    total = packed[-1].clamp(min=1)
    mean = packed[:channels] / total
    variance = (packed[channels:-1] / total - mean * mean).clamp(min=0)
    return mean, variance, packed[-1]


class _Normalise(torch.autograd.Function):
    """Normalize with given statistics; the gradient includes the statistics that all ranks share."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        mean: torch.Tensor,
        variance: torch.Tensor,
        count: torch.Tensor,
        eps: float,
    ) -> torch.Tensor:
        working = torch.float64 if input.dtype is torch.float64 else torch.float32
        inverse_std = torch.rsqrt(variance + eps)
        ctx.save_for_backward(input, weight, mean, inverse_std, count)
        mean, variance = mean.to(working), variance.to(working)
        output = functional.batch_norm(
            input.to(working), mean, variance, _cast(weight, working), _cast(bias, working), eps=eps
        )
        return output.to(input.dtype)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight, mean, inverse_std, count = ctx.saved_tensors
        working = torch.float64 if input.dtype is torch.float64 else torch.float32
        grad, values = grad_output.to(working), input.to(working)
        shape = [1, -1] + [1] * (input.dim() - 2)
        dims = _other_dims(input)
        channels = input.shape[1]
        centred = values - mean.to(working).view(shape)
        sums = torch.cat([grad.sum(dims), (grad * centred).sum(dims)]).double()
        grad_weight = grad_bias = grad_input = None
        if weight is not None:
            grad_weight = (sums[channels:] * inverse_std).to(weight.dtype)
            grad_bias = sums[:channels].to(weight.dtype) if ctx.needs_input_grad[2] else None
        # Every rank takes part because another rank may need the sums.
        totals = allreduce_(sums.clone(), op=Sum) / count.clamp(min=1)
        if ctx.needs_input_grad[0]:
            scale = inverse_std if weight is None else inverse_std * weight.double()
            slope = (-scale * inverse_std * inverse_std * totals[channels:]).to(working).view(shape)
            offset = (-scale * totals[:channels]).to(working).view(shape)
            grad_input = torch.addcmul(offset + grad * scale.to(working).view(shape), centred, slope).to(input.dtype)
        return grad_input, grad_weight, grad_bias, None, None, None, None


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return None if tensor is None else tensor.to(dtype)
