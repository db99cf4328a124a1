"""allgather and grouped_allgather: every dtype, unequal and empty contributions, sets."""

from __future__ import annotations

import pytest
import torch
from hvd_session import MOVED, ROWS, assert_equal, assert_same_everywhere, mine, of_all_ranks, session, values

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@session(sets=True)
def test_dtypes_and_forms(sets):
    for process_set in sets:
        results = []
        for dtype in MOVED:
            for shape in ROWS:
                want = torch.cat(of_all_ranks(process_set, shape, dtype))
                tensor = mine(shape, dtype)
                results += [
                    hvd.allgather(tensor, process_set=process_set),
                    hvd.synchronize(hvd.allgather_async(tensor, name="x", process_set=process_set)),
                    *hvd.grouped_allgather([tensor, tensor], process_set=process_set),
                ]
                for result in results[-4:]:
                    assert_equal(result, want)
        assert_same_everywhere(results, process_set)


@pytest.mark.over_network
@session(sets=True)
def test_unequal_rows(sets):
    for process_set in sets:
        for rows in (lambda r: r, lambda r: 3 * r + 1, lambda r: 0, lambda r: 5 if r == 0 else 0):
            want = torch.cat([values(r, (rows(r), 4), torch.float32) for r in process_set.ranks])
            tensor = mine((rows(hvd.rank()), 4), torch.float32)
            assert_equal(hvd.allgather(tensor, process_set=process_set), want)


@pytest.mark.over_network
@session
def test_groups_of_different_tensors():
    shapes = [lambda r: (r + 1,), lambda r: (2, 3), lambda r: (r, 2, 2)]
    dtypes = [torch.int8, torch.float32, torch.bool]
    tensors = [mine(s(hvd.rank()), d) for s, d in zip(shapes, dtypes, strict=True)]
    blocking = hvd.grouped_allgather(tensors, name="g")
    waited = hvd.synchronize(hvd.grouped_allgather_async(tensors))
    assert type(blocking) is tuple
    assert type(waited) is tuple
    for results in (blocking, waited):
        for result, shape, dtype in zip(results, shapes, dtypes, strict=True):
            assert_equal(result, torch.cat([values(r, shape(r), dtype) for r in range(hvd.size())]))


@session
def test_many_at_once_and_non_contiguous():
    base = torch.arange(40.0).reshape(5, 8)
    handles = [hvd.allgather_async(base[:, i : i + 3], name=f"n{i}") for i in range(5)]
    for i, handle in enumerate(handles):
        assert_equal(hvd.synchronize(handle), torch.cat([base[:, i : i + 3]] * hvd.size()))


@session
def test_large():
    rows = 300_000 * (hvd.rank() + 1)
    got = hvd.allgather(torch.full((rows, 2), hvd.rank(), dtype=torch.int64))
    counts = torch.bincount(got[:, 0]).tolist()
    assert counts == [300_000 * (r + 1) for r in range(hvd.size())]
