"""Norms of many tensors, on every torch: `torch.nn.utils.get_total_norm` and its kin came with torch 2.6."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["scale_all", "total_norm"]


def total_norm(tensors: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Return the norm of all values of all tensors, on the first one's device."""
    if not tensors:
        return torch.tensor(0.0, device="cpu")
    norms = torch._foreach_norm(list(tensors), norm_type)
    return torch.linalg.vector_norm(torch.stack([norm.to(tensors[0].device) for norm in norms]), norm_type)


def scale_all(tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply all tensors by a factor, in place and without waiting for a device."""
    on_device: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        on_device.setdefault(tensor.device, []).append(tensor)
    for device, group in on_device.items():
        torch._foreach_mul_(group, factor.to(device))
