"""Every kind of error: raised on every rank, with both values in the message, while the runtime stays usable."""

from __future__ import annotations

from functools import partial

import numpy
import pytest
import torch
from hvd_session import assert_runtime_works, even_and_odd, raises, session

import horovod.torch as hvd
from hora import engine

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
several = pytest.mark.ranks(2, 3, 4)
Internal = hvd.HorovodInternalError


REDUCING = ["allreduce", "allreduce_", "allreduce_async", "allreduce_async_", "reducescatter", "reducescatter_async"]
GATHERING = ["allgather", "allgather_async"]
PLAIN = [*REDUCING, *GATHERING, "alltoall", "alltoall_async"]
ROOTED = ["broadcast", "broadcast_", "broadcast_async", "broadcast_async_"]
GROUPED = [f"grouped_{name}" for name in (*REDUCING, *GATHERING)]


def all_calls(tensor, process_set=hvd.global_process_set, root=0):
    """Yield a function for every collective on this tensor."""
    for name in PLAIN:
        yield partial(getattr(hvd, name), tensor, process_set=process_set)
    for name in ROOTED:
        yield partial(getattr(hvd, name), tensor, root, process_set=process_set)
    for name in GROUPED:
        yield partial(getattr(hvd, name), [tensor], process_set=process_set)


def test_before_init_and_after_shutdown():
    for _ in range(2):
        for call in (*all_calls(torch.ones(4)), hvd.barrier, hvd.join, lambda: hvd.synchronize(0)):
            with raises(Internal, "has not been initialized"):
                call()
        topology = (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size)
        with raises(ValueError, "has not been initialized"):
            hvd.poll(0)
        for call in (*topology, hvd.stop_timeline, lambda: hvd.start_timeline("x"), hvd.is_homogeneous):
            with raises(ValueError, "has not been initialized; use hvd.init()"):
                call()
        assert hvd.is_initialized() is False
        hvd.shutdown()
        hvd.init()
        assert hvd.is_initialized() is True
        assert_runtime_works()
        hvd.barrier()
        hvd.shutdown()


@session
def test_not_a_tensor():
    for nonsense in (3, [1.0], None, "x", numpy.ones(3)):
        for call in all_calls(nonsense):
            with raises(ValueError, "tensor", type(nonsense).__name__):
                call()
    for call in (
        hvd.grouped_allreduce,
        hvd.grouped_allgather,
        hvd.grouped_reducescatter,
        hvd.grouped_allreduce_async,
    ):
        for nonsense in (torch.ones(3), 3, []):
            with raises(ValueError, "tensor"):
                call(nonsense)
    assert_runtime_works()


@session
def test_wrong_device_dtype_and_name():
    for call in all_calls(torch.ones(4, device="meta")):
        with raises(ValueError, "meta"):
            call()
    for call in all_calls(torch.ones(4, dtype=torch.complex64)):
        with raises(ValueError, "Tensor type torch.complex64 is not supported"):
            call()
    for dtype in (torch.bool, torch.uint8):
        for call in (hvd.allreduce, hvd.reducescatter):
            with raises(ValueError, f"Tensor type {dtype} is not supported"):
                call(torch.ones(4, dtype=dtype))
    for dtype in (torch.int32, torch.int64):
        kind, word = (NotImplementedError, "power of 2") if hvd.size() == 3 else (ValueError, str(dtype))
        with raises(kind, "adasum", "not supported", word):
            hvd.allreduce(torch.ones(4, dtype=dtype), op=hvd.Adasum)
    with raises(ValueError, "name", "int"):
        hvd.allreduce(torch.ones(1), name=3)
    for op in (6, -1, 99, "sum", 1.5):
        with raises(ValueError, str(op)):
            hvd.allreduce(torch.ones(1), op=op)
    with raises(ValueError):
        hvd.allreduce(torch.ones(1), prescale_factor="half")
    for shared in (torch.ones(1).expand(3), torch.ones(2, 1).expand(2, 3)):
        with raises(ValueError, "in place", "share memory", "clone()"):
            hvd.allreduce_(shared)
        assert hvd.allreduce(shared, op=hvd.Sum).flatten()[0].item() == hvd.size()
    assert_runtime_works()


@session
def test_root_outside_the_set():
    for root in (-1, hvd.size(), 99):
        for call in (hvd.broadcast, hvd.broadcast_, hvd.broadcast_async, hvd.broadcast_async_):
            with raises(ValueError, "invalid root rank", str(root)):
                call(torch.ones(1), root)
    for root in (None, "0", 0.5):
        with raises(ValueError, "root"):
            hvd.broadcast(torch.ones(1), root)
    assert_runtime_works()


@several
def test_process_sets_that_cannot_be_used():
    hvd.init(process_sets=(halves := even_and_odd()))
    other = next(half for half in halves if not half.included())
    mine = next(half for half in halves if half.included())
    for call in (*all_calls(torch.ones(4), other, root=other.ranks[0]), lambda: hvd.barrier(other)):
        with raises(ValueError, f"rank {hvd.rank()} is not a member", str(other.ranks)):
            call()
    for call in (*all_calls(torch.ones(4), hvd.ProcessSet([0])), lambda: hvd.barrier(hvd.ProcessSet([0]))):
        with raises(ValueError, "process set", "does not exist, or has not been registered", "[0]"):
            call()
    for call in (*all_calls(torch.ones(4), [0, 1]), lambda: hvd.barrier(0)):
        with raises(ValueError, "ProcessSet"):
            call()
    with raises(ValueError, "invalid root rank", str(other.ranks[0]), str(mine.ranks)):
        hvd.broadcast(torch.ones(1), other.ranks[0], process_set=mine)
    assert_runtime_works()
    hvd.barrier()
    hvd.shutdown()


@session
def test_splits():
    n = hvd.size()
    tensor = torch.ones(2 * n, 2)
    for call in (hvd.alltoall, hvd.alltoall_async):
        with raises(ValueError, "splits", "1-D"):
            call(tensor, torch.ones(n, 1, dtype=torch.int32))
        with raises(ValueError, "splits", "32-bit integer", "int64"):
            call(tensor, torch.ones(n, dtype=torch.int64))
        with raises(ValueError, "splits", "32-bit integer"):
            call(tensor, [0.5] * n)
        with raises(ValueError, "splits", "32-bit integer"):
            call(tensor, [2**40] * n)
        with raises(ValueError, "splits", "number of workers", str(n), str(n + 1)):
            call(tensor, [1] * (n + 1))
        with raises(ValueError, "greater than the first dimension", str(2 * n), str(3 * n)):
            call(tensor, [3] * n)
        with raises(ValueError, "negative"):
            call(tensor, [-1] * n)
        with raises(ValueError, "scalar"):
            call(torch.tensor(1.0))
        if n > 1:
            with raises(ValueError, "even multiple", str(2 * n + 1)):
                call(torch.ones(2 * n + 1))
    assert_runtime_works()


@session
def test_scalars_and_reducescatter_ops():
    for call in (hvd.reducescatter, hvd.reducescatter_async):
        with raises(ValueError, "does not support scalar"):
            call(torch.tensor(1.0))
        for op in (hvd.Min, hvd.Max, hvd.Product, hvd.Adasum):
            for dtype in (torch.float32, torch.int32, torch.uint8):
                with raises(Internal, "only supports AVERAGE and SUM"):
                    call(torch.ones(4, dtype=dtype), op=op)
    with raises(ValueError, "does not support scalar"):
        hvd.grouped_reducescatter([torch.ones(2), torch.tensor(1.0)])
    with raises(RuntimeError, "rank-zero tensor"):
        hvd.synchronize(hvd.allgather_async(torch.tensor(1.0)))
    with raises(RuntimeError, "rank-zero tensor"):
        hvd.grouped_allgather([torch.ones(1), torch.tensor(1.0)])
    with pytest.raises((ValueError, Internal)):
        hvd.allgather(torch.tensor(1.0))
    assert_runtime_works()


@several
@session
def test_duplicate_names():
    """Other ranks wait, so the first request stays in flight; unfinished handles are left behind."""
    ones, rank = torch.ones(2), hvd.rank()
    if rank == 0:
        first = hvd.allreduce_async(ones, name="twice", op=hvd.Sum)
        for call in (hvd.allreduce_async, hvd.allreduce_async_, hvd.allreduce):
            with raises(ValueError, "same name as another tensor", "allreduce.twice"):
                call(ones, name="twice", op=hvd.Sum)
        gather = hvd.grouped_allgather_async([ones], name="twice")
        with raises(ValueError, "same name as another tensor"):
            hvd.grouped_allgather_async([ones], name="twice")
    hvd.barrier()
    if rank != 0:
        first = hvd.allreduce_async(ones, name="twice", op=hvd.Sum)
        gather = hvd.grouped_allgather_async([ones], name="twice")
    assert hvd.synchronize(first).tolist() == [hvd.size()] * 2
    assert hvd.synchronize(gather)[0].tolist() == [1.0] * 2 * hvd.size()
    assert hvd.allreduce(ones, name="twice", op=hvd.Sum).tolist() == [hvd.size()] * 2
    hvd.allreduce_async(ones, name=f"left by {rank}")


def check_mismatch(words, call):
    """Let each rank in turn mismatch: all get the error, the name can be used again, other names work."""
    rank = hvd.rank()
    for odd_one in range(hvd.size()):
        good = hvd.allreduce_async(torch.ones(1), name="bystander", op=hvd.Sum)
        with raises(Internal, *words):
            call(rank == odd_one, "m")
        call(False, "m")
        assert hvd.synchronize(good).item() == hvd.size()


@several
@session
def test_mismatched_data_types():
    def dtype(odd):
        return torch.float64 if odd else torch.int32

    words = ("Mismatched data types", "float64", "int32", ".m")
    n = hvd.size()
    check_mismatch(words, lambda odd, name: hvd.allreduce(torch.ones(3, dtype=dtype(odd)), name=name))
    check_mismatch(words, lambda odd, name: hvd.allreduce_(torch.ones(3, dtype=dtype(odd)), name=name))
    check_mismatch(words, lambda odd, name: hvd.allgather(torch.ones(3, dtype=dtype(odd)), name=name))
    check_mismatch(words, lambda odd, name: hvd.broadcast(torch.ones(3, dtype=dtype(odd)), 0, name=name))
    check_mismatch(words, lambda odd, name: hvd.alltoall(torch.ones(n, dtype=dtype(odd)), name=name))
    check_mismatch(words, lambda odd, name: hvd.reducescatter(torch.ones(n, dtype=dtype(odd)), name=name))
    check_mismatch(
        words,
        lambda odd, name: hvd.grouped_allreduce([torch.ones(2), torch.ones(3, dtype=dtype(odd))], name=name),
    )


@pytest.mark.over_network
@several
@session
def test_mismatched_shapes():
    def check(operation, call, shape, odd_shape):
        words = (f"Mismatched {operation} tensor shapes", str(list(shape)), str(list(odd_shape)))
        check_mismatch(words, lambda odd, name: call(torch.ones(odd_shape if odd else shape), name))

    def broadcast(tensor, name):
        return hvd.broadcast_(tensor, 0, name)

    n = hvd.size()
    check("ALLREDUCE", lambda t, name: hvd.allreduce(t, name=name), (2, 3), (2, 4))
    check("ALLREDUCE", lambda t, name: hvd.allreduce(t, name=name), (2, 3), (6,))
    check("ALLREDUCE", lambda t, name: hvd.grouped_allreduce([t, t], name=name), (2, 3), (3, 2))
    check("ALLREDUCE", lambda t, name: hvd.allreduce(t, name=name), (1,), ())
    check("BROADCAST", broadcast, (2, 3), (3, 3))
    check("REDUCESCATTER", lambda t, name: hvd.reducescatter(t, name=name), (n, 3), (n + 1, 3))
    check("ALLGATHER", hvd.allgather, (2, 3), (2, 4))
    check("ALLGATHER", hvd.allgather, (2, 3), (2, 3, 1))
    check("ALLTOALL", lambda t, name: hvd.alltoall(t, name=name), (n, 2), (n, 3))
    if n in (2, 4):
        check("ALLREDUCE", lambda t, name: hvd.allreduce(t, name=name, op=hvd.Adasum), (4,), (5,))


@pytest.mark.over_network
@several
@session
def test_other_mismatches():
    ones = torch.ones(4 * hvd.size())

    def prescaled(odd, name):
        return hvd.allreduce(ones, name=name, prescale_factor=0.5 if odd else 1.0)

    def postscaled(odd, name):
        return hvd.reducescatter(ones, name=name, postscale_factor=0.25 if odd else 1.0)

    check_mismatch(("Mismatched prescale and/or postscale factors", "0.5", "1.0"), prescaled)
    check_mismatch(("Mismatched prescale and/or postscale factors", "0.25", "1.0"), postscaled)
    check_mismatch(
        ("Mismatched reduction operation", "MIN", "SUM"),
        lambda odd, name: hvd.allreduce(ones, name=name, op=hvd.Min if odd else hvd.Sum),
    )
    check_mismatch(
        ("Mismatched BROADCAST root ranks", "0", "1"),
        lambda odd, name: hvd.broadcast(ones, 1 if odd else 0, name=name),
    )
    check_mismatch(
        ("Mismatched", "number of tensors", "2", "3"),
        lambda odd, name: hvd.grouped_allreduce([ones] * (3 if odd else 2), name=name),
    )
    if hvd.size() in (2, 4):
        check_mismatch(
            ("Mismatched operations", "ADASUM", "ALLREDUCE"),
            lambda odd, name: hvd.allreduce(ones, name=name, op=hvd.Adasum if odd else hvd.Sum),
        )


@several
@session
def test_mismatches_of_unnamed_and_asynchronous_operations():
    for odd_one in range(hvd.size()):
        handles = [
            hvd.allreduce_async_(torch.ones(2 if hvd.rank() == odd_one and i % 2 else 3), op=hvd.Sum) for i in range(6)
        ]
        for i, handle in enumerate(handles):
            if i % 2:
                with raises(Internal, "Mismatched ALLREDUCE tensor shapes", "[2]", "[3]"):
                    hvd.synchronize(handle)
                assert hvd.synchronize(handle) is None
            else:
                assert hvd.synchronize(handle).tolist() == [hvd.size()] * 3


@pytest.mark.over_network
@several
def test_shutdown_of_one_rank_stops_all():
    """Other ranks get HorovodInternalError for pending and later calls; all ranks may initialise again."""
    for leaver in range(2):
        hvd.init()
        if hvd.rank() == leaver:
            hvd.shutdown()
        else:
            with raises(Internal, "has been shut down"):
                hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="pending"))
            with raises(Internal, "has been shut down"):
                hvd.allreduce(torch.ones(1))
            with raises(Internal, "has been shut down"):
                hvd.barrier()
            hvd.shutdown()
    hvd.init()
    assert_runtime_works()
    hvd.barrier()
    hvd.shutdown()


@session
def test_build_queries():
    assert (hvd.mpi_built(), hvd.mpi_enabled(), hvd.gloo_built(), hvd.gloo_enabled()) == (
        False,
        False,
        True,
        True,
    )
    assert (hvd.ddl_built(), hvd.ccl_built()) == (False, False)
    assert type(hvd.nccl_built()) is int
    assert hvd.cuda_built() == (torch.version.cuda is not None)
    assert hvd.rocm_built() == (torch.version.hip is not None)
    with raises(ValueError, "MPI"):
        hvd.mpi_threads_supported()
    from horovod.torch.mpi_ops import is_homogeneous

    assert is_homogeneous() is True
    assert (hvd.local_rank(), hvd.local_size()) == (hvd.rank(), hvd.size())
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)


@session
def test_a_timeline_must_be_enabled_for_dynamic_starts():
    with raises(ValueError, "HOROVOD_TIMELINE=DYNAMIC"):
        hvd.start_timeline("/nonexistent/file")
    hvd.stop_timeline()


@pytest.mark.ranks(2)
@session
def test_numbers_of_unnamed_operations_wrap_after_four_billion():
    queue = engine.current_runtime().sets.queue(0)
    hvd.allreduce(torch.ones(1))
    queue.numbers["allreduce"] = queue.planner.unnamed["allreduce"] = 2**32 - 2
    for _ in range(4):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == hvd.size()
    assert queue.numbers["allreduce"] == 2


@pytest.mark.ranks(2)
@session
def test_an_operation_that_failed_to_be_announced_is_not_in_flight():
    queue = engine.current_runtime().sets.queue(0)

    def refuse(signature, instance):
        raise OverflowError("as planned")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue.negotiation, "announce", refuse)
        for name in ("unheard", None):
            with raises(OverflowError, "as planned"):
                hvd.allreduce_async(torch.ones(1), name=name)
    assert not queue.in_flight
    assert hvd.allreduce(torch.ones(1), name="unheard", op=hvd.Sum).item() == hvd.size()
    assert_runtime_works()


def _resize(tensor):
    tensor.resize_(2 * tensor.numel())


def _shrink(tensor):
    tensor.resize_(10)


def _empty(tensor):
    tensor.untyped_storage().resize_(0)


@pytest.mark.ranks(2, 3)
def test_a_tensor_resized_in_flight_is_named_on_every_rank():
    """All ranks get the error, and none waits for the tensor."""
    for number, change in enumerate((_resize, _shrink, _empty)):
        for start in (
            partial(hvd.allreduce_async_, op=hvd.Sum),
            hvd.allgather_async,
            hvd.reducescatter_async,
            partial(hvd.broadcast_async_, root_rank=0),
            hvd.alltoall_async,
        ):
            hvd.init()
            tensor = torch.ones(6000)
            name = f"resized.{number}"
            if hvd.rank() == 0:
                handle = start(tensor, name=name)
                change(tensor)
            hvd.barrier()  # the others submit theirs after this
            if hvd.rank() > 0:
                handle = start(tensor, name=name)
            with raises(Internal, f".{name} was submitted with a tensor of shape [6000]", "rank 0", "do not resize"):
                hvd.synchronize(handle)
            hvd.shutdown()


@pytest.mark.ranks(2)
def test_a_resized_tensor_of_a_group_is_named():
    hvd.init()
    tensors = [torch.ones(5), torch.ones(5), torch.ones(5)]
    if hvd.rank() == 0:
        handle = hvd.grouped_allreduce_async_(tensors, name="several")
        tensors[1].resize_(7)
    hvd.barrier()
    if hvd.rank() == 1:
        handle = hvd.grouped_allreduce_async_(tensors, name="several")
    with raises(Internal, "several_2of3 was submitted with a tensor of shape [5], which has shape [7]"):
        hvd.synchronize(handle)
    hvd.shutdown()
