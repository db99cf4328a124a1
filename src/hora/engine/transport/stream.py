"""Several flat tensors as one stream, cut into pieces that fit a slot; copies between pieces and slots.

Copies go through memmove, which starts no
threads, needs no views of its own and doesn't care for the dtype.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

__all__ = ["Piece", "copy", "cut", "put", "take", "total"]


class Piece(NamedTuple):
    """Some views, one after the other, and how many elements they have together."""

    parts: tuple[torch.Tensor, ...] | list[torch.Tensor]
    count: int  # type: ignore[assignment] # a tuple has a method of this name, which nobody calls here


# Short copies keep the GIL: to get it back from a busy main thread would take longer than the copy.
_SHORT_BYTES = 32768
_short_move = ctypes.PyDLL(None).memmove
_long_move = ctypes.CDLL(None).memmove
for _move in (_short_move, _long_move):
    _move.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    _move.restype = None


def copy(source: torch.Tensor, out: torch.Tensor) -> None:
    """Copy one flat tensor to another of the same dtype and size."""
    num_bytes = source.nbytes
    move = _short_move if num_bytes <= _SHORT_BYTES else _long_move
    move(out.data_ptr(), source.data_ptr(), num_bytes)


def total(tensors: Sequence[torch.Tensor]) -> int:
    """How many elements the tensors have together."""
    return tensors[0].numel() if len(tensors) == 1 else sum([tensor.numel() for tensor in tensors])


def cut(tensors: Sequence[torch.Tensor], most: int) -> list[Piece]:
    """Pieces of `most` elements each, the last one shorter. Tensors without elements vanish."""
    pieces: list[Piece] = []
    current: list[torch.Tensor] = []
    room = most
    for tensor in tensors:
        count = tensor.numel()
        if count > room:
            if room < most:  # complete the piece begun by the tensors before
                current.append(tensor[:room])
                pieces.append(Piece(current, most))
                tensor = tensor[room:]
                count -= room
            whole = tensor.split(most)
            left = count % most
            pieces.extend(Piece((view,), most) for view in (whole[:-1] if left else whole))
            current, room = ([whole[-1]], most - left) if left else ([], most)
        elif count:
            current.append(tensor)
            room -= count
        if room == 0:
            pieces.append(Piece(current, most))
            current, room = [], most
    if current:
        pieces.append(Piece(current, most - room))
    return pieces


def put(piece: Piece, slot: torch.Tensor) -> None:
    """Copy a piece into a slot of its size."""
    if len(piece.parts) == 1:
        copy(piece.parts[0], slot)
    else:
        torch.cat(piece.parts, out=slot)


def take(slot: torch.Tensor, piece: Piece) -> None:
    """Copy a slot into a piece of its size."""
    if len(piece.parts) == 1:
        copy(slot, piece.parts[0])
        return
    address, item_bytes = slot.data_ptr(), slot.itemsize
    for part in piece.parts:
        num_bytes = part.numel() * item_bytes
        move = _short_move if num_bytes <= _SHORT_BYTES else _long_move
        move(part.data_ptr(), address, num_bytes)
        address += num_bytes
