"""The collectives once more, over gloo between all ranks, as if each rank were on a host of its own."""

from __future__ import annotations

import pytest
import test_errors
import test_join
import test_ops_allgather
import test_ops_allreduce
import test_ops_alltoall
import test_ops_broadcast
import test_ops_reducescatter
import torch
from hvd_session import assert_runtime_works, session

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(3, env={"HORA_TRANSPORT": "gloo"})


def test_allreduce():
    test_ops_allreduce.test_shapes()
    test_ops_allreduce.test_grouped_forms()
    test_ops_allreduce.test_scaling()
    test_ops_allreduce.test_names_arrive_in_any_order()


def test_allgather():
    test_ops_allgather.test_unequal_rows()
    test_ops_allgather.test_group_of_unlike_tensors()


def test_alltoall():
    test_ops_alltoall.test_dtypes_and_forms()
    test_ops_alltoall.test_unequal_splits()


def test_broadcast():
    test_ops_broadcast.test_dtypes_and_forms()


def test_reducescatter():
    test_ops_reducescatter.test_dtypes_and_forms()
    test_ops_reducescatter.test_groups()


def test_errors_and_join():
    test_errors.test_mismatched_shapes()
    test_errors.test_other_mismatches()
    test_errors.test_shutdown_of_one_rank_stops_all()
    test_join.test_uneven_batches()


@session
def test_results_do_not_depend_on_the_transport():
    """Awkward floats, reduced in rank order whoever does it: the same bits as a loop over the ranks."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(hvd.size())]
    inputs = [torch.randn(1001, generator=generator) for generator in generators]
    want = inputs[0].clone()
    for other in inputs[1:]:
        want += other
    assert torch.equal(hvd.allreduce(inputs[hvd.rank()], op=hvd.Sum), want)
    assert_runtime_works()
