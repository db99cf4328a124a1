"""Several tensors as one: cutting batches into pieces, and reusable buffers to pack them into.

Also the order in which pieces overlap. No communication, no arithmetic; all tensors are flat.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence

import torch

__all__ = ["Buffers", "InTwoHalves", "as_bytes", "complete", "overlap", "pieces", "runs", "spread", "unpack"]

Tensors = Sequence[torch.Tensor]

# Work on a piece that starts something, yields once while that goes on by itself, and then does the rest.
InTwoHalves = Generator[None, None, None]


def overlap(works: Iterable[InTwoHalves]) -> None:
    """Do all works in order; each one's first half comes before the second half of the one before it."""
    under_way: InTwoHalves | None = None
    for work in works:
        next(work)
        if under_way is not None:
            complete(under_way)
        under_way = work
    if under_way is not None:
        complete(under_way)


def complete(work: InTwoHalves) -> None:
    """Do the second half."""
    for _ in work:
        raise AssertionError("a work yields once")


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


def unpack(packed: torch.Tensor, outputs: Tensors) -> None:
    """Copy what lies one after another in `packed` to the outputs."""
    offset = 0
    for output in outputs:
        output.copy_(packed[offset : offset + output.numel()])
        offset += output.numel()


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
