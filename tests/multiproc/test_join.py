"""join: ranks with unequal numbers of batches, in several epochs, and operations that are rejected meanwhile."""

from __future__ import annotations

import pytest
import torch
from hvd_session import assert_runtime_works, raises, session

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.mark.over_network
@session
def test_uneven_batches():
    n, rank = hvd.size(), hvd.rank()
    for epoch in range(3):
        for batch in range(rank + 1):
            alive = n - batch  # ranks >= batch still have data
            assert hvd.allreduce(torch.ones(4), op=hvd.Sum, name=f"named{batch}").tolist() == [alive] * 4
            torch.testing.assert_close(hvd.allreduce(torch.ones(2)), torch.full((2,), alive / n))
            grouped = hvd.grouped_allreduce([torch.ones(1), torch.ones(3, dtype=torch.int64)], op=hvd.Sum)
            assert [t.tolist() for t in grouped] == [[alive], [alive] * 3]
        assert hvd.join() == n - 1, epoch
        # Unnamed operations after a join match although the ranks have made different numbers of them.
        assert_runtime_works()
        assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(n))


@session
def test_joined_ranks_contribute_the_identity_of_the_operation():
    last = hvd.size() - 1
    if hvd.rank() == last:
        assert hvd.allreduce(torch.full((2,), 5.0), op=hvd.Min).tolist() == [5.0] * 2
        assert hvd.allreduce(torch.full((2,), -5.0), op=hvd.Max).tolist() == [-5.0] * 2
        assert hvd.allreduce(torch.full((2,), 3), op=hvd.Product).tolist() == [3, 3]
        if hvd.size() in (1, 2, 4):
            assert hvd.allreduce(torch.full((2,), 3.0), op=hvd.Adasum).tolist() == [3.0] * 2
    assert hvd.join() == last


@pytest.mark.over_network
@pytest.mark.ranks(2, 3, 4)
@session
def test_a_batch_of_which_a_joined_rank_submitted_only_a_part():
    """The last rank submits x and joins, the others x and y, fused: its x is scaled, the identity for its y is not."""
    n, last = hvd.size(), hvd.size() - 1
    rights = [(hvd.Sum, 4.0 * n, 4.0 * last), (hvd.Min, 4.0, 4.0), (hvd.Product, 4.0**n, 4.0**last)]
    for op, of_all, of_the_others in rights * 5:
        x, y = torch.full((4,), 8.0), torch.full((4,), 8.0)
        mine = [(x, "x")] if hvd.rank() == last else [(x, "x"), (y, "y")]
        handles = [hvd.allreduce_async_(tensor, name=name, op=op, prescale_factor=0.5) for tensor, name in mine]
        if hvd.rank() == last:
            hvd.join()
        for handle in handles:
            hvd.synchronize(handle)
        if hvd.rank() != last:
            assert y.tolist() == [of_the_others] * 4
            hvd.join()
        assert x.tolist() == [of_all] * 4


@pytest.mark.ranks(2, 3, 4)
@session
def test_other_operations_fail_and_the_callers_can_join():
    n = hvd.size()
    if hvd.rank() == 0:
        assert hvd.join() in range(1, n)
    else:
        # All but rank 0 call it, and get an error that rank 0 has joined.
        calls = [
            lambda: hvd.allgather(torch.ones(n)),
            lambda: hvd.broadcast(torch.ones(2), 1),
            lambda: hvd.alltoall(torch.ones(n)),
            lambda: hvd.reducescatter(torch.ones(n)),
            lambda: hvd.grouped_allgather([torch.ones(2)]),
        ]
        for call in calls:
            with raises(hvd.HorovodInternalError, "not supported with join"):
                call()
        with raises(hvd.HorovodInternalError, "join"):
            hvd.barrier()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == n - 1
        assert hvd.join() in range(1, n)
    assert_runtime_works()


@pytest.mark.ranks(2, 3, 4)
@session(sets=True)
def test_joining_applies_to_process_sets(sets):
    """A member of a set that has joined does not block the others."""
    everyone, mine = sets
    first = mine.ranks[0]
    for epoch in range(2):
        if hvd.rank() != first:
            ones = torch.ones(2)
            for i in range(3):
                alone = hvd.allreduce(ones, op=hvd.Sum, process_set=mine, name=f"{epoch}.{i}")
                assert alone.tolist() == [mine.size() - 1] * 2
            with raises(hvd.HorovodInternalError, "not supported with join", str(first)):
                hvd.broadcast(ones, hvd.rank(), process_set=mine)
            with raises(hvd.HorovodInternalError, "join"):
                hvd.barrier(mine)
        assert hvd.join() in everyone.ranks
        together = hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=mine)
        assert together.item() == mine.size()


@session
def test_all_ranks_at_once():
    assert 0 <= hvd.join() < hvd.size()
    assert 0 <= hvd.join(-1) < hvd.size()
    results = hvd.allgather_object(hvd.join())
    assert len(set(results)) == 1


@pytest.mark.ranks(2, 4)
@session
def test_asynchronous_ops_before_join():
    n, rank = hvd.size(), hvd.rank()
    handles = [hvd.allreduce_async(torch.ones(1), name=f"a{i}", op=hvd.Sum) for i in range(5 * (rank + 1))]
    last = hvd.join()
    assert last in range(n)
    for i, handle in enumerate(handles):
        assert hvd.synchronize(handle).item() == n - i // 5
