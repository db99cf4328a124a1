"""How the data of a collective over several hosts is divided: rearranged for the slice leaders and back it is the same,
and every element is in one portion.
"""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.engine.transport.hierarchical import Division, consecutive, portions, where
from hora.engine.transport.packing import spread


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_what_is_arranged_by_carrier_comes_back_by_member(data, num_hosts, num_leaders):
    sizes = data.draw(st.lists(st.integers(num_leaders, 4), min_size=num_hosts, max_size=num_hosts))
    members = data.draw(st.permutations(range(sum(sizes))))
    hosts = [sorted(host.tolist()) for host in torch.tensor(members).split(sizes)]
    counts = data.draw(st.lists(st.integers(0, 9), min_size=len(members), max_size=len(members)))
    blocks = [sum(counts[member] for member in host) for host in hosts]
    division = Division(hosts, counts, [spread(block, num_leaders) for block in blocks])
    tensor = torch.arange(sum(counts))
    arranged = torch.full_like(tensor, -1)
    division.by_leader(tensor.split(counts), arranged)
    assert sorted(arranged.tolist()) == tensor.tolist()
    assert [len(part) for part in arranged.split(division.carried)] == division.carried
    result = torch.full_like(tensor, -1)
    division.by_member(arranged, result.split(counts))
    assert torch.equal(result, tensor)


def test_a_carrier_has_its_share_of_every_block():
    division = Division([[0, 2], [1]], [3, 2, 1], [[2, 2], [1, 1]])
    assert division.carried == [3, 3]
    assert division.block(0) == [3, 1]
    arranged = torch.empty(6, dtype=torch.int64)
    division.by_leader(torch.arange(6).split([3, 2, 1]), arranged)
    assert arranged.tolist() == [0, 1, 3, 2, 5, 4]


@given(st.lists(st.lists(st.integers(0, 40), min_size=3, max_size=3), min_size=1, max_size=5), st.integers(1, 50))
def test_every_element_is_in_one_portion_and_no_portion_is_large(counts, limit):
    """As member 1 sees it. What is larger than the limit is one tensor, and of every member at least one element."""
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


def test_members_next_to_one_another_are_a_range_and_have_a_place():
    assert consecutive([0, 1, 4, 6, 7]) == [range(2), range(4, 5), range(6, 8)]
    assert consecutive([]) == []
    whole = torch.arange(10)
    assert where(whole.split([1, 2, 3, 4]), range(1, 3), whole).tolist() == [1, 2, 3, 4, 5]
