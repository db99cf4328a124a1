"""Every collective of a process group, with members in any order, whoever asks for its end and whatever that is."""

from __future__ import annotations

import pytest
import torch.distributed as dist
from group_calls import CALLS, FUNCTIONAL, assert_written
from hvd_session import needs_torch_2_7
from test_process_group import in_group

pytestmark = [pytest.mark.ranks(2, 3), needs_torch_2_7]
_TIMES = 3  # the first call is negotiated, later ones may be repeated


def orders(size):
    """Return the members of groups in several orders."""
    return [list(range(size)), list(range(size))[::-1], [*range(1, size), 0]]


@pytest.mark.over_network
@pytest.mark.both_ways
@in_group
def test_members_may_have_any_order(rank, size):
    for ranks in orders(size):
        group, me = dist.new_group(ranks, sort_ranks=False), ranks.index(rank)
        assert (dist.get_process_group_ranks(group), dist.get_rank(group)) == (ranks, me)
        for name, build in CALLS.items():
            for _ in range(_TIMES):
                call = build(group, ranks, me, 5)
                call.start(False)
                assert_written(name, call.outputs, call.expected)
        for name, build in FUNCTIONAL.items():
            for _ in range(_TIMES):
                found, expected = build(group, ranks, me, 5)
                assert_written(name, [tensor + 0 for tensor in found], expected)
