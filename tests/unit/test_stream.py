"""Several tensors as one stream: whatever the sizes, pieces are full, in order, and views of the tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.engine.transport.stream import copy, cut, put, take, total


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 17))
@settings(max_examples=300, deadline=None)
def test_pieces_are_full_in_order_and_cover_everything(sizes, piece):
    flat = torch.arange(sum(sizes))
    pieces = cut(flat.split(sizes), piece)
    lengths = [piece.count for piece in pieces]
    assert lengths == [total(piece.parts) for piece in pieces]
    assert lengths == [len(part) for part in flat.split(piece) if len(part)]
    assert all(view.numel() for part in pieces for view in part.parts)
    if pieces:
        assert torch.cat([view for part in pieces for view in part.parts]).tolist() == flat.tolist()
        addresses = [view.data_ptr() for part in pieces for view in part.parts]
        assert addresses[0] == flat.data_ptr()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 17))
@settings(max_examples=100, deadline=None)
def test_what_is_put_into_slots_is_taken_out_again(sizes, piece):
    source, target = torch.arange(sum(sizes)), torch.zeros(sum(sizes), dtype=torch.int64)
    for sent, received in zip(cut(source.split(sizes), piece), cut([target], piece), strict=True):
        slot = torch.empty(sent.count, dtype=torch.int64)
        put(sent, slot)
        take(slot, received)
    again = [torch.zeros(size, dtype=torch.int64) for size in sizes]
    for sent, received in zip(cut([target], piece), cut(again, piece), strict=True):
        slot = torch.empty(sent.count, dtype=torch.int64)
        put(sent, slot)
        take(slot, received)
    assert torch.equal(torch.cat(again), source)


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 100, 200_000])
def test_copy(dtype, count):
    source = torch.randint(0, 2, (count,)).to(dtype)
    out = torch.zeros(count, dtype=dtype)
    copy(source, out)
    assert torch.equal(out, source)
