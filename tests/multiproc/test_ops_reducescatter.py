"""reducescatter and grouped_reducescatter: dtypes, ops, uneven rows, scaling, compression, sets."""

from __future__ import annotations

import pytest
import torch
from hvd_session import REDUCED, assert_equal, mine, of_all_ranks, session

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def rows_of(member: int, n: int, rows: int) -> slice:
    start = member * (rows // n) + min(member, rows % n)
    return slice(start, start + rows // n + (member < rows % n))


def expected(process_set, shape, dtype, op, salt=0):
    total = torch.stack([t.double() for t in of_all_ranks(process_set, shape, dtype, salt)]).sum(0)
    if op == hvd.Average:
        total = total / process_set.size()
    if not dtype.is_floating_point:
        total = total.trunc()
    return total.to(dtype)[rows_of(process_set.rank(), process_set.size(), shape[0])]


def check(actual, want):
    assert actual.dtype == want.dtype
    torch.testing.assert_close(actual, want)


@pytest.mark.over_network
@session(sets=True)
def test_dtypes_and_forms(sets):
    for process_set in sets:
        for dtype in REDUCED:
            for op in (hvd.Sum, hvd.Average):
                for shape in ((7, 3), (2,), (0, 2), (9, 2, 2)):
                    tensor, want = mine(shape, dtype), expected(process_set, shape, dtype, op)
                    check(hvd.reducescatter(tensor, op=op, process_set=process_set), want)
                    handle = hvd.reducescatter_async(tensor, name="x", op=op, process_set=process_set)
                    check(hvd.synchronize(handle), want)
                    assert_equal(tensor, mine(shape, dtype))


@pytest.mark.over_network
@session(sets=True)
def test_groups(sets):
    shapes, dtypes = [(5, 2), (8,), (1, 3)], [torch.float32, torch.int64, torch.float16]
    for process_set in sets:
        tensors = [mine(s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
        blocking = hvd.grouped_reducescatter(tensors, op=hvd.Sum, process_set=process_set)
        waited = hvd.synchronize(hvd.grouped_reducescatter_async(tensors, op=hvd.Sum, process_set=process_set))
        assert type(blocking) is list
        assert type(waited) is tuple
        for results in (blocking, waited):
            for i, result in enumerate(results):
                assert_equal(result, expected(process_set, shapes[i], dtypes[i], hvd.Sum, i))


@session
def test_default_is_average_and_factors_apply():
    n, rows = hvd.size(), 2 * hvd.size()
    check(hvd.reducescatter(torch.full((rows,), 3.0)), torch.full((2,), 3.0))
    got = hvd.reducescatter(torch.full((rows,), 3.0), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    check(got, torch.full((2,), 6.0 * n))
    got = hvd.reducescatter(torch.full((rows,), 7), op=hvd.Sum, prescale_factor=0.5)
    assert got.tolist() == [3 * n] * 2
    got = hvd.reducescatter(torch.full((rows,), 1.5), compression=hvd.Compression.fp16, op=hvd.Sum)
    check(got, torch.full((2,), 1.5 * n))
    got = hvd.grouped_reducescatter([torch.full((rows,), 1.5)], compression=hvd.Compression.bf16, op=hvd.Sum)
    check(got[0], torch.full((2,), 1.5 * n))


@session
def test_non_contiguous():
    base = torch.arange(60.0).reshape(6, 10)
    got = hvd.reducescatter(base.t(), op=hvd.Sum)
    assert_equal(got, (base.t() * hvd.size())[rows_of(hvd.rank(), hvd.size(), 10)])
