"""Assignment of gradients to buckets: a pure function of the order that the ranks agreed on.

`BucketOrder` collects the order in which gradients arrive on all ranks and calls `plan_buckets`. Every rank computes
the same plan.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

import torch

# Large enough that a request costs little per byte, small enough that reduction starts early and ends soon after
# backward.
BUCKET_BYTES = 4 * 2**20
# Gradients start on cache lines so that vector loads are aligned.
_ALIGNMENT = 16


@dataclass(frozen=True, eq=False)
class BucketSpec:
    """A bucket: its gradients in order of arrival, their offsets, and its length including one control element."""

    name: str
    parameters: tuple[torch.Tensor, ...]
    offsets: tuple[int, ...]
    num_elements: int
    dtype: torch.dtype
    device: torch.device

    def views(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return a view of `flat` for each parameter."""
        return [view_like(flat, offset, p) for offset, p in zip(self.offsets, self.parameters, strict=True)]

    def gaps(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Return views of the gaps in `flat` between the gradients and after the last one."""
        ends = [offset + p.numel() for offset, p in zip(self.offsets, self.parameters, strict=True)]
        found = [flat[end:begin] for end, begin in zip(ends, (*self.offsets[1:], self.num_elements), strict=True)]
        return [gap for gap in found if gap.numel()]


def view_like(flat: torch.Tensor, offset: int, parameter: torch.Tensor) -> torch.Tensor:
    """Return a view of `flat` from `offset` with the parameter's shape and, if possible, its strides."""
    elements = flat[offset : offset + parameter.numel()]
    if is_channels_last(parameter):
        return elements.as_strided(parameter.shape, parameter.stride())
    return elements.view(parameter.shape)


def is_channels_last(parameter: torch.Tensor) -> bool:
    """Return whether the parameter lies in a bucket in another order than its elements."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    other = formats.get(parameter.dim())
    return other is not None and not parameter.is_contiguous() and parameter.is_contiguous(memory_format=other)


def plan_buckets(
    parameters: Sequence[torch.Tensor],
    names: dict[torch.Tensor, str],
    *,
    breaks: frozenset[int] = frozenset(),
    wire_dtype: torch.dtype | None = None,
    group_of: Callable[[torch.Tensor], int] | None = None,
    granularity: int = 1,
    bucket_bytes: int = BUCKET_BYTES,
    label: str = "optimizer",
) -> list[BucketSpec]:
    """Fill buckets in the given order, one per dtype and device at a time; a new one starts at indices in `breaks`.

    Inside a bucket, parameters of one group (`group_of`) are adjacent. Lengths are multiples of `granularity`.
    """

    def dtype_of(parameter: torch.Tensor) -> torch.dtype:
        return wire_dtype or parameter.dtype

    def num_bytes(parameter: torch.Tensor) -> int:
        return parameter.numel() * dtype_of(parameter).itemsize

    specs: list[BucketSpec] = []
    for members in filled(parameters, lambda p: (p.dtype, p.device), num_bytes, bucket_bytes, breaks):
        if group_of is not None:
            members.sort(key=group_of)
        offsets, position = [], 0
        for parameter in members:
            offsets.append(position)
            position += -(-parameter.numel() // _ALIGNMENT) * _ALIGNMENT
        what = names[members[0]] if len(members) == 1 else f"{names[members[0]]} .. {names[members[-1]]}"
        name = f"{label}.bucket.{len(specs)} ({what}: {len(members)})"
        num_elements = -(-(position + _ALIGNMENT) // granularity) * granularity
        dtype, device = dtype_of(members[0]), members[0].device
        specs.append(BucketSpec(name, tuple(members), tuple(offsets), num_elements, dtype, device))
    return specs


def filled(
    parameters: Sequence[torch.Tensor],
    kind_of: Callable[[torch.Tensor], Hashable],
    num_bytes_of: Callable[[torch.Tensor], int],
    enough: int,
    breaks: frozenset[int] = frozenset(),
) -> Iterator[list[torch.Tensor]]:
    """Divide parameters, in this order, into lists of one kind with `enough` bytes; new ones start at `breaks`."""
    filling, sizes = defaultdict[Hashable, list[torch.Tensor]](list), Counter[Hashable]()
    for index, parameter in enumerate(parameters):
        if index in breaks:
            yield from filling.values()
            filling.clear()
            sizes.clear()
        kind = kind_of(parameter)
        filling[kind].append(parameter)
        sizes[kind] += num_bytes_of(parameter)
        if sizes[kind] >= enough:
            del sizes[kind]
            yield filling.pop(kind)
    yield from filling.values()
