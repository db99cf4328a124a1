"""alltoall: every dtype, with and without splits, unequal and zero splits, unsent rows, sets."""

from __future__ import annotations

import numpy
import pytest
import torch
from hvd_session import MOVED, assert_equal, mine, session, values

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def sent(sender: int, receiver: int, splits, shape, dtype):
    """Return the rows that `sender` sends to member number `receiver`."""
    start = sum(splits[:receiver])
    return values(sender, shape, dtype)[start : start + splits[receiver]]


@pytest.mark.over_network
@session(sets=True)
def test_dtypes_and_forms(sets):
    for process_set in sets:
        n, me = process_set.size(), process_set.rank()
        for dtype in MOVED:
            shape, even = (3 * n, 4), [3] * n
            want = torch.cat([sent(r, me, even, shape, dtype) for r in process_set.ranks])
            tensor = mine(shape, dtype)
            assert_equal(hvd.alltoall(tensor, process_set=process_set), want)
            given = torch.tensor(even, dtype=torch.int32)
            for splits in (even, tuple(even), numpy.array(even), given):
                output, received = hvd.alltoall(tensor, splits, name="x", process_set=process_set)
                assert_equal(output, want)
                assert_equal(received, given)
            for splits in (None, even):
                handle = hvd.alltoall_async(tensor, splits, process_set=process_set)
                output, received = hvd.synchronize(handle)
                assert_equal(output, want)
                assert_equal(received, given)


@pytest.mark.over_network
@session(sets=True)
def test_unequal_splits(sets):
    for process_set in sets:
        n, me = process_set.size(), process_set.rank()
        growing = [[r + m for m in range(n)] for r in range(hvd.size())]
        to_the_first_only = [[4] + [0] * (n - 1)] * hvd.size()
        nothing = [[0] * n] * hvd.size()
        for plan in (growing, to_the_first_only, nothing):
            for unsent in (0, 2):
                shape = (sum(plan[hvd.rank()]) + unsent, 3)
                output, received = hvd.alltoall(mine(shape, torch.float64), plan[hvd.rank()], process_set=process_set)
                want = [sent(r, me, plan[r], (sum(plan[r]) + unsent, 3), torch.float64) for r in process_set.ranks]
                assert_equal(output, torch.cat(want))
                assert received.tolist() == [len(part) for part in want]


@session
def test_one_dimension_and_non_contiguous():
    n = hvd.size()
    tensor = torch.arange(4.0 * n).reshape(2 * n, 2)[:, 1]
    got = hvd.alltoall(tensor)
    assert_equal(got, tensor[2 * hvd.rank() : 2 * hvd.rank() + 2].repeat(n))


@session
def test_zero_rows():
    assert hvd.alltoall(torch.empty(0, 5)).shape == (0, 5)
