"""How the data of a collective over several hosts is divided: every element is in one piece."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.engine.transport.hierarchical import pieces


@given(st.lists(st.integers(0, 40), min_size=3, max_size=3).filter(any), st.integers(1, 50))
def test_every_element_is_in_one_piece_and_no_piece_is_large(counts, limit):
    """A piece has at least one element of every member that has any left."""
    whole = [torch.zeros(count) for count in counts]
    turns = []
    for turn, piece in pieces(counts, limit):
        turns.append(turn)
        parts = [tensor[piece] for tensor in whole]
        assert sum(part.numel() for part in parts) <= max(limit, 3)
        for part in parts:
            part += 1
    assert all((tensor == 1).all() for tensor in whole)
    assert turns == [number % 2 for number in range(len(turns))]
