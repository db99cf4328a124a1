"""Packing of several flat tensors as one. No communication, no arithmetic.

`portions` keeps small tensors together and splits large ones, `Buffers` is memory to pack them into, and `overlap`
sends one portion while another is processed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Generator, Iterable, Iterator, Sequence

import torch

Tensors = Sequence[torch.Tensor]


# Copies use memmove, which starts no threads, needs no views and is independent of the dtype. Short ones keep the GIL:
# getting it back from a busy main thread would take longer than the copy.
_SHORT_BYTES = 32768
_short_move = ctypes.PyDLL(None).memmove
_long_move = ctypes.CDLL(None).memmove
for _each in (_short_move, _long_move):
    _each.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _each.restype = None


def move(target: int, source: int, num_bytes: int) -> None:
    """Copy bytes between two addresses."""
    (_short_move if num_bytes <= _SHORT_BYTES else _long_move)(target, source, num_bytes)


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy one flat tensor to another of the same dtype and size."""
    move(out.data_ptr(), source.data_ptr(), source.nbytes)


def total(tensors: Tensors) -> int:
    """Return the total number of elements."""
    return tensors[0].numel() if len(tensors) == 1 else sum([tensor.numel() for tensor in tensors])


# Work on a portion that starts something, yields once while that runs in the background, and then does the rest.
InTwoHalves = Generator[None, None, None]


def overlap(works: Iterable[InTwoHalves]) -> None:
    """Do all works in order; each one's first half runs before the second half of the previous one."""
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
    """Return the same memory as bytes: backends that support few dtypes can still move all of them."""
    return tensor.view(torch.uint8)


def runs(sizes: Sequence[int], limit: int) -> Iterator[range]:
    """Split a list of sizes into consecutive runs of at most `limit` in total; a larger one stands alone."""
    start = total = 0
    for index, size in enumerate(sizes):
        if index > start and total + size > limit:
            yield range(start, index)
            start, total = index, 0
        total += size
    if start < len(sizes):
        yield range(start, len(sizes))


def portions(inputs: Tensors, outputs: Tensors, limit: int) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield views of at most `limit` elements in total, and not of none: small tensors together, large ones split."""
    sizes = [tensor.numel() for tensor in inputs]
    for run in runs(sizes, limit):
        if not any(sizes[run.start : run.stop]):
            continue
        if len(run) == 1 and sizes[run[0]] > limit:
            yield from (
                ([part], [out])
                for part, out in zip(inputs[run[0]].split(limit), outputs[run[0]].split(limit), strict=True)
            )
        else:
            yield [inputs[i] for i in run], [outputs[i] for i in run]


def spread(total: int, num_parts: int) -> list[int]:
    """Split `total` elements into parts of equal size, of which only the last ones may be shorter."""
    each = -(-total // num_parts)
    return [max(min(each, total - part * each), 0) for part in range(num_parts)]


def pack(tensors: Tensors, out: torch.Tensor) -> None:
    """Copy the tensors one after another to `out`, which has their total size."""
    if len(tensors) == 1:
        out.copy_(tensors[0])
    else:
        torch.cat(list(tensors), out=out)


def unpack(packed: torch.Tensor, outputs: Tensors) -> None:
    """Copy consecutive parts of `packed` to the outputs."""
    offset = 0
    for output in outputs:
        output.copy_(packed[offset : offset + output.numel()])
        offset += output.numel()


class Buffers:
    """Memory kept between batches, one buffer per purpose; large ones are not kept."""

    def __init__(self, device: torch.device, keep_bytes: int, *, pinned: bool = False) -> None:
        self._device = device
        self._keep_bytes = keep_bytes
        self._pinned = pinned
        self._kept: dict[str, torch.Tensor] = {}

    def get(self, purpose: str, count: int, dtype: torch.dtype) -> torch.Tensor:
        """Return `count` uninitialized elements. Overwrites the last buffer for the same purpose."""
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
