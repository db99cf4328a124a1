"""How a tensor is divided among hosts and carriers: rearranged for the carriers and back, it is the same."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.engine.transport.hierarchical import _Division
from hora.engine.transport.packing import spread


@given(st.data(), st.integers(1, 4), st.integers(1, 3))
def test_what_is_arranged_by_carrier_comes_back_by_member(data, num_hosts, num_carriers):
    sizes = data.draw(st.lists(st.integers(num_carriers, 4), min_size=num_hosts, max_size=num_hosts))
    members = data.draw(st.permutations(range(sum(sizes))))
    hosts = [sorted(host.tolist()) for host in torch.tensor(members).split(sizes)]
    counts = data.draw(st.lists(st.integers(0, 9), min_size=len(members), max_size=len(members)))
    blocks = [sum(counts[member] for member in host) for host in hosts]
    division = _Division(hosts, counts, [spread(block, num_carriers) for block in blocks])
    tensor = torch.arange(sum(counts))
    arranged = division.by_carrier(tensor)
    assert sorted(arranged.tolist()) == tensor.tolist()
    assert [len(part) for part in arranged.split(division.carried)] == division.carried
    result = torch.full_like(tensor, -1)
    division.by_member(arranged, result)
    assert torch.equal(result, tensor)


def test_a_carrier_has_its_share_of_every_block():
    division = _Division([[0, 2], [1]], [3, 2, 1], [[2, 2], [1, 1]])
    assert division.carried == [3, 3]
    assert division.block(0) == [3, 1]
    assert division.by_carrier(torch.arange(6)).tolist() == [0, 1, 3, 2, 5, 4]
