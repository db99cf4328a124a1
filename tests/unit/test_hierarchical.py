"""Dividing the data of a collective between hosts: every element is in exactly one portion."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.engine.transport.hierarchical import portions


@given(st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(1, 50))
def test_every_element_is_in_one_portion_and_no_portion_is_large(counts, limit):
    """Member 1's view. A portion above the limit is one tensor, and has at least one element of every member."""
    own = [torch.zeros(each[1]) for each in counts]
    whole = [torch.zeros(sum(each)) for each in counts]
    turns = []
    for portion in portions(own, whole, counts, limit):
        turns.append(portion.turn)
        assert sum(sum(each) for each in portion.counts) <= max(limit, 3)
        for mine, parts, sizes in zip(portion.own, portion.members, portion.counts, strict=True):
            assert [part.numel() for part in parts] == list(sizes)
            assert mine.numel() == sizes[1]
            mine += 1
            for part in parts:
                part += 1
    assert all((tensor == 1).all() for tensor in (*own, *whole))
    assert turns == [number % 2 for number in range(len(turns))]
