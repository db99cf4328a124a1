"""Norms over many tensors, for every supported torch: `torch.nn.utils.get_total_norm` needs torch 2.6."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch

from hora.telemetry.meters import meter


def total_norm(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm over all values of all tensors, on the first tensor's device."""
    if not tensors:
        return torch.tensor(0.0, device="cpu")
    norms = torch._foreach_norm(list(tensors), norm_type)
    return torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in norms]), norm_type)


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by a factor, in place and without synchronizing with a device."""
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        on_device.setdefault(tensor.device, []).append(tensor)
    for device, group in on_device.items():
        torch._foreach_mul_(group, factor.to(device))


def check_finite(gradients: Iterable[tuple[str, torch.Tensor | None]], rank: int) -> None:
    """Raise FloatingPointError with the rank, parameter and step if a gradient contains a NaN or an infinity.

    Takes pairs of parameter name and gradient. Waits for a GPU once, for all gradients together.
    """
    found = {name: _values(gradient) for name, gradient in gradients if gradient is not None}
    found = {name: values for name, values in found.items() if values.numel()}
    # The largest magnitude preserves a NaN or an infinity, and unlike a sum it cannot overflow.
    if not found or math.isfinite(total_norm(list(found.values()), math.inf).item()):
        return
    for name, values in found.items():
        num_nan, num_infinite = int(values.isnan().sum()), int(values.isinf().sum())
        if num_nan or num_infinite:
            text = (
                f"the gradient of {name} on rank {rank} has {num_nan} NaN and {num_infinite} infinite of "
                f"{values.numel()} values, in step {meter.num_steps + 1}; it was not reduced (HORA_NAN_CHECK=1)"
            )
            meter.event("nan", text)
            raise FloatingPointError(text)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
