"""Several tensors as one: cutting batches into pieces, and reusable buffers to pack them into.

No communication and no arithmetic. Transports over torch.distributed use it; all tensors are flat.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

__all__ = ["Buffers", "as_bytes", "pieces", "runs", "spread"]

Tensors = Sequence[torch.Tensor]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as bytes: backends that know few dtypes can still move all of them."""
    return tensor.view(torch.uint8)


def runs(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Cut a list of sizes into consecutive runs of at most `limit` in total; a larger one stands alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def pieces(inputs: Tensors, outputs: Tensors, limit: int) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Views of at most `limit` elements in total: small tensors together, large ones cut up."""
    for run in runs([tensor.numel() for tensor in inputs], limit):
        if len(run) == 1 and inputs[run[0]].numel() > limit:
            yield from (
                ([part], [out])
                for part, out in zip(inputs[run[0]].split(limit), outputs[run[0]].split(limit), strict=True)
            )
        else:
            yield [inputs[i] for i in run], [outputs[i] for i in run]


def spread(total: int, num_parts: int) -> list[int]:
    """Cut `total` elements into parts of equal size, of which only the last ones may be shorter."""
    each = -(-total // num_parts)
    return [max(min(each, total - part * each), 0) for part in range(num_parts)]


class Buffers:
    """Memory kept from one batch to the next, one buffer per purpose; large ones are not kept."""

    def __init__(self, device: torch.device, keep_bytes: int, *, pinned: bool = False) -> None:
        self._device = device
        self._keep_bytes = keep_bytes
        self._pinned = pinned
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, purpose: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """`count` elements with any contents. What was taken before for the same purpose is overwritten."""
        num_bytes = count * dtype.itemsize
        memory = self._kept.get(purpose)
        if memory is None or memory.numel() < num_bytes:
            # Powers of two: a batch slightly larger than the last one must not allocate again.
            wanted = 1 << max(num_bytes - 1, 4095).bit_length()
            wanted = wanted if wanted <= self._keep_bytes else -(-num_bytes // 16) * 16
            memory = torch.empty(wanted, dtype=torch.uint8, device=self._device, pin_memory=self._pinned)
            if wanted <= self._keep_bytes:
                self._kept[purpose] = memory
        return memory[:num_bytes].view(dtype)

    def clear(self) -> None:
        self._kept.clear()
