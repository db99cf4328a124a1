"""Which gradient goes into which bucket: a pure function of what the ranks have agreed on.

`adaptation.py` collects the facts (in which order gradients really arrive, on all ranks) and calls `plan_buckets`; every
rank computes the same plan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["BucketSpec", "plan_buckets"]

# Big enough that a request costs little per byte, small enough that reduction starts early and ends soon after backward.
BUCKET_BYTES = 4 * 2**20
# Slots start on cache lines: vector loads are aligned.
_ALIGNMENT = 16


@dataclass(frozen=True)
class BucketSpec:
    """A bucket: its gradients in order of arrival, where each starts, and its length with one control element."""

    name: str
    parameters: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    num_elements: int
    dtype: torch.dtype
    device: torch.device

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, BucketSpec):
            return NotImplemented
        return self.name == other.name and [id(p) for p in self.parameters] == [
            id(p) for p in other.parameters
        ]

    def __hash__(self) -> int:
        return hash(self.name)


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    names: dict[torch.Tensor, str],
    *,
    breaks: frozenset[int] = frozenset(),
    wire_dtype: Callable[[torch.Tensor], torch.dtype],
    bucket_bytes: int = BUCKET_BYTES,
) -> list[BucketSpec]:
    """Fill buckets in the given order, one per dtype and device at a time. A new one starts at each index in `breaks`."""
    specs: list[BucketSpec] = []
    filling: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}

    def close(key: tuple[torch.dtype, torch.device]) -> None:
        members = filling.pop(key, [])
        if members:
            specs.append(_spec(len(specs), members, names, *key))

    for index, parameter in enumerate(parameters):
        if index in breaks:
            for open_key in list(filling):
                close(open_key)
        key = (wire_dtype(parameter), parameter.device)
        members = filling.setdefault(key, [])
        members.append(parameter)
        if sum(p.numel() for p in members) * key[0].itemsize >= bucket_bytes:
            close(key)
    for open_key in list(filling):
        close(open_key)
    return specs


def _spec(
    index: int,
    members: list[torch.Tensor],
    names: dict[torch.Tensor, str],
    dtype: torch.dtype,
    device: torch.device,
) -> BucketSpec:
    offsets, position = [], 0
    for parameter in members:
        offsets.append(position)
        position += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
    what = names[members[0]] if len(members) == 1 else f"{names[members[0]]} .. {names[members[-1]]}"
    name = f"bucket.{index} ({what}, {len(members)} gradients)"
    return BucketSpec(name, tuple(members), tuple(offsets), position + _ALIGNMENT, dtype, device)
