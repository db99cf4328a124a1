"""Digests of tensors and numbers, and whether all ranks have the same one, by sums alone.

Two ranks with the same bits have the same digest, with and without the native part, on any processor. A digest depends
on the order of the elements. It is no protection against an attacker.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np
import torch

_WORDS = 8192  # of 8 bytes, in a block: the factors stay in a processor's cache
_FACTORS = np.random.default_rng(42).integers(1, 2**62, _WORDS, dtype=np.int64) | 1
_PIECE = 2**22  # elements of a GPU's tensor that are summed at a time
_MASK = 2**64 - 1
HALF = 2**24  # a digest is compared in two halves: the square of one, added up over all ranks, fits 64 bits
NUM_SUMS = 4  # of one digest


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements in the order of the memory, without a copy if they lie together."""
    tensor = tensor.detach()
    if not tensor.is_contiguous() and tensor.layout == torch.strided:
        if torch.ops.aten.is_non_overlapping_and_dense(tensor):
            return tensor.as_strided((tensor.numel(),), (1,))
        tensor = tensor.contiguous()
    return tensor.reshape(-1)


def digest(elements: torch.Tensor) -> int | torch.Tensor:
    """Return the 64-bit digest of a flat tensor; of a GPU's tensor one that is still on the GPU."""
    if elements.device.type != "cpu":
        return _digest_there(elements)
    data = elements.view(torch.uint8).numpy()
    num_words = len(data) // 8
    found = zlib.crc32(data[8 * num_words :].tobytes())
    words = data[: 8 * num_words].view(np.int64)
    num_blocks = num_words // _WORDS
    if num_blocks:
        blocks = words[: num_blocks * _WORDS].reshape(num_blocks, _WORDS)
        for block in np.einsum("ij,j->i", blocks, _FACTORS).tolist():
            found = combined(found, block)
    rest = words[num_blocks * _WORDS :]
    return combined(found, int(np.dot(rest, _FACTORS[: len(rest)])))


def _digest_there(elements: torch.Tensor) -> torch.Tensor:
    """Return two sums of the elements' bits, one of them by place; nothing waits for the GPU."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    size = elements.dtype.itemsize
    bits = elements.view(kinds[size]) if size in kinds else torch.view_as_real(elements).reshape(-1).view(torch.int64)
    found = torch.zeros(2, dtype=torch.int64, device=elements.device)
    for number, piece in enumerate(bits.split(_PIECE)):
        numbers = piece.to(torch.int64)
        places = torch.arange(1, 2 * len(numbers), 2, device=elements.device)
        found += torch.stack([numbers.sum() * (2 * number + 1), (numbers * places).sum()])
    return found


def combined(first: int, second: int) -> int:
    """Return the digest of two digests, in this order."""
    return ((first ^ (first >> 29)) * 0x9E3779B97F4A7C15 + second) & _MASK


def digest_of_text(text: str) -> int:
    """Return the digest of a text."""
    return zlib.crc32(text.encode())


def sums_of(number: int) -> list[int]:
    """Return the numbers to add up over all ranks, from which `all_equal` tells whether they have the same digest."""
    number = combined(number, 0) >> 16
    return [value for half in divmod(number, HALF) for value in (half, half * half)]


def all_equal(sums: Sequence[int], num_ranks: int) -> bool:
    """Return whether every rank had the same digest. All ranks have the same sums, so they get the same answer.

    The mean of the squares equals the square of the mean only if all numbers are equal.
    """
    return all(num_ranks * squares == total * total for total, squares in zip(sums[::2], sums[1::2], strict=True))
