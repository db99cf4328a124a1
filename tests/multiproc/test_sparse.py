"""sparse_allreduce_async: sums and averages, unequal and no entries, hybrid tensors, sets."""

from __future__ import annotations

import pytest
import torch
from hvd_session import raises, session

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def sparse(rank: int, num_entries: int) -> torch.Tensor:
    rows = torch.tensor([[(rank + i) % 5 for i in range(num_entries)]], dtype=torch.int64).reshape(1, num_entries)
    entries = torch.arange(float(3 * num_entries)).reshape(num_entries, 3) + rank
    return torch.sparse_coo_tensor(rows, entries, (5, 3), check_invariants=True)


@session(sets=True)
def test_sum_and_average(sets):
    for process_set in sets:
        for entries in (lambda r: 2, lambda r: r, lambda r: 3 if r == 0 else 0, lambda r: 7):
            total = sum(sparse(r, entries(r)).to_dense() for r in process_set.ranks)
            for op, want in ((hvd.Sum, total), (hvd.Average, total / process_set.size())):
                mine = sparse(hvd.rank(), entries(hvd.rank()))
                wait = hvd.sparse_allreduce_async(mine, "s", op, process_set=process_set)
                assert callable(wait)
                got = wait()
                assert got.is_sparse
                assert got.shape == (5, 3)
                torch.testing.assert_close(got.to_dense(), want)


@session
def test_empty_tensors_on_all_ranks():
    got = hvd.sparse_allreduce_async(sparse(0, 0), "empty", hvd.Average)()
    assert got.is_sparse
    assert got._nnz() == 0
    assert got.shape == (5, 3)


@session
def test_two_sparse_dimensions_integers_and_no_name():
    tensor = torch.sparse_coo_tensor([[0, 1], [2, 0]], [3, -3], (2, 3), check_invariants=True)
    waits = [hvd.sparse_allreduce_async(tensor, None, op) for op in (hvd.Sum, hvd.Average)]
    n = hvd.size()
    assert waits[0]().to_dense().tolist() == [[0, 0, 3 * n], [-3 * n, 0, 0]]
    assert waits[1]().coalesce().values().tolist() in ([3, -3], [3 // n * n, -(3 // n * n)])


@session
def test_many_in_flight():
    waits = [hvd.sparse_allreduce_async(sparse(hvd.rank(), 2), f"s{i}", hvd.Sum) for i in range(20)]
    results = [wait().to_dense() for wait in waits]
    assert all(torch.equal(result, results[0]) for result in results)


@session
def test_dense_tensors_are_rejected():
    with raises(ValueError, "sparse", "strided"):
        hvd.sparse_allreduce_async(torch.ones(3), "x", hvd.Sum)
    with raises(ValueError, "dense", "sparse_coo"):
        hvd.allreduce(sparse(0, 2))
