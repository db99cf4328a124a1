"""allreduce in all its forms: every dtype, op, shape, set; scaling; any order; compression; Adasum."""

from __future__ import annotations

import math
import warnings

import pytest
import torch
from hvd_session import (
    REDUCED,
    SHAPES,
    SMALL,
    assert_equal,
    assert_same_everywhere,
    even_and_odd,
    mine,
    of_all_ranks,
    raises,
    session,
)

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)
OPS = [hvd.Sum, hvd.Average, hvd.Min, hvd.Max, hvd.Product]


def expected(tensors, op):
    dtype = tensors[0].dtype
    stack = torch.stack([t.to(torch.float64) for t in tensors])
    if op in (hvd.Sum, hvd.Average):
        total = stack.sum(0)
        if op == hvd.Average:
            total = total / len(tensors)
        return (total if dtype.is_floating_point else total.trunc()).to(dtype)
    result = {hvd.Min: stack.amin, hvd.Max: stack.amax}[op](0) if op != hvd.Product else stack.prod(0)
    return result.to(dtype)


def check(actual, tensors, op):
    want = expected(tensors, op)
    if op == hvd.Average and want.dtype.is_floating_point:
        assert actual.dtype == want.dtype
        torch.testing.assert_close(actual, want)
    else:
        assert_equal(actual, want)


def forms(tensor, op, process_set, name):
    """Yield the results of all ways to call it."""
    a, b = tensor.clone(), tensor.clone()
    yield hvd.allreduce(tensor, op=op, name=name, process_set=process_set)
    yield hvd.synchronize(hvd.allreduce_async(tensor, op=op, name=name, process_set=process_set))
    assert hvd.allreduce_(a, op=op, name=name, process_set=process_set) is a
    yield a
    assert hvd.synchronize(hvd.allreduce_async_(b, op=op, process_set=process_set)) is b
    yield b


@session(sets=True)
def test_dtypes_ops_and_forms(sets):
    for process_set in sets:
        results = []
        for dtype in REDUCED:
            for op in OPS:
                tensor = mine((5, 17), dtype)
                before = tensor.clone()
                for result in forms(tensor, op, process_set, f"a.{dtype}.{op}"):
                    check(result, of_all_ranks(process_set, (5, 17), dtype), op)
                    results.append(result)
                assert_equal(tensor, before)
        assert_same_everywhere(results, process_set)


@session
def test_small_integers():
    for dtype in SMALL:
        for op in (hvd.Sum, hvd.Min, hvd.Max):
            check(hvd.allreduce(mine((17,), dtype), op=op), of_all_ranks(hvd.global_process_set, (17,), dtype), op)


@pytest.mark.over_network
@session(sets=True)
def test_shapes(sets):
    for process_set in sets:
        for shape in SHAPES:
            for dtype in (torch.float32, torch.int64):
                for result in forms(mine(shape, dtype), hvd.Sum, process_set, None):
                    check(result, of_all_ranks(process_set, shape, dtype), hvd.Sum)


@pytest.mark.over_network
@session(sets=True)
def test_grouped_forms(sets):
    shapes, dtypes = [(3,), (), (4, 5), (0, 2)], [torch.float32, torch.int32, torch.float64, torch.float16]
    for process_set in sets:
        tensors = [mine(s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
        want = [of_all_ranks(process_set, s, d, i) for i, (s, d) in enumerate(zip(shapes, dtypes, strict=True))]
        inplace = [t.clone() for t in tensors]
        also = tuple(t.clone() for t in tensors)
        blocking = hvd.grouped_allreduce(tensors, op=hvd.Sum, process_set=process_set)
        assert type(blocking) is list
        handle = hvd.grouped_allreduce_async(tensors, name="g", op=hvd.Sum, process_set=process_set)
        waited = hvd.synchronize(handle)
        assert type(waited) is tuple
        returned = hvd.grouped_allreduce_(inplace, op=hvd.Sum, process_set=process_set)
        assert type(returned) is tuple
        assert all(a is b for a, b in zip(returned, inplace, strict=True))
        handle = hvd.grouped_allreduce_async_(also, op=hvd.Sum, process_set=process_set)
        assert all(a is b for a, b in zip(hvd.synchronize(handle), also, strict=True))
        for results in (blocking, waited, inplace, also):
            for result, inputs in zip(results, want, strict=True):
                check(result, inputs, hvd.Sum)
            assert_same_everywhere(results, process_set)
        one = hvd.synchronize(hvd.grouped_allreduce_async([torch.ones(2)], process_set=process_set))
        assert type(one) is tuple
        assert len(one) == 1


@session
def test_non_contiguous_tensors_are_read_and_written_back():
    n = hvd.size()
    base = torch.arange(24.0).reshape(4, 6)
    for view in (lambda t: t.t(), lambda t: t[:, ::2], lambda t: t[1:3, 1:4]):
        assert_equal(hvd.allreduce(view(base), op=hvd.Sum), view(base) * n)
        target = base.clone()
        piece = view(target)
        assert hvd.allreduce_(piece, op=hvd.Sum) is piece
        want = base.clone()
        view(want).mul_(n)
        assert_equal(target, want)
        target = base.clone()
        hvd.grouped_allreduce_([view(target), torch.ones(2)], op=hvd.Sum)
        assert_equal(target, want)
    channels_last = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    channels_last = channels_last.to(memory_format=torch.channels_last)
    want = channels_last * n
    hvd.allreduce_(channels_last, op=hvd.Sum)
    assert torch.equal(channels_last, want)
    assert channels_last.is_contiguous(memory_format=torch.channels_last)


@session
def test_parameters_are_reduced_in_place():
    parameter = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    other = torch.nn.Parameter(torch.ones(2, 3).t().contiguous().t())
    assert hvd.allreduce_(parameter, op=hvd.Sum) is parameter
    hvd.grouped_allreduce_([other], op=hvd.Sum)
    assert parameter.tolist() == [sum(range(hvd.size()))] * 3
    assert other.tolist() == [[hvd.size()] * 3] * 2
    assert parameter.requires_grad
    assert other.is_leaf


@pytest.mark.over_network
@session
def test_scaling():
    n = hvd.size()
    for dtype in (torch.float32, torch.float64):
        got = hvd.allreduce(torch.full((5,), 3.0, dtype=dtype), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert_equal(got, torch.full((5,), 6.0 * n, dtype=dtype))
        got = hvd.allreduce(torch.full((5,), 3.0, dtype=dtype), prescale_factor=0.5, postscale_factor=4.0)
        torch.testing.assert_close(got, torch.full((5,), 6.0, dtype=dtype))
        got = hvd.allreduce(torch.full((5,), 3.0, dtype=dtype), op=hvd.Max, prescale_factor=2, postscale_factor=3)
        assert_equal(got, torch.full((5,), 18.0, dtype=dtype))
    # Integers are scaled in float64 and truncated at each step; the prescale applies on every rank before the sum.
    for dtype in (torch.int32, torch.int64):
        got = hvd.allreduce(torch.tensor([7, -7, 5], dtype=dtype), op=hvd.Sum, prescale_factor=0.5)
        assert got.tolist() == [3 * n, -3 * n, 2 * n]
        got = hvd.allreduce(torch.tensor([7, -7, 5], dtype=dtype), op=hvd.Sum, postscale_factor=0.5)
        assert got.tolist() == [math.trunc(7 * n / 2), math.trunc(-7 * n / 2), math.trunc(5 * n / 2)]
    for first in (-7, 7, 1, -1):
        contribution = first if hvd.rank() == 0 else 0
        assert hvd.allreduce(torch.tensor(contribution)).item() == math.trunc(first / n)


@pytest.mark.over_network
@session
def test_half_precision_neither_overflows_nor_underflows_in_between():
    n = hvd.size()
    for count in (5, 70_001):  # in one piece, and in several
        for number in (40000.0, 2.0**-24):  # the second is the smallest float16
            tensor = torch.full((count,), number, dtype=torch.float16)
            shard = hvd.reducescatter(tensor, op=hvd.Average)
            results = [hvd.allreduce(tensor), *hvd.grouped_allreduce([tensor, tensor[:3]]), shard]
            results.append(hvd.allreduce(tensor, op=hvd.Sum, prescale_factor=1 / n))
            assert {value for result in results for value in result.tolist()} <= {number}
        tensor = torch.full((count,), 1.0 if hvd.rank() == 0 else 2.0**-8, dtype=torch.bfloat16)
        exact = torch.tensor(1 + (n - 1) * 2.0**-8).bfloat16().item()
        result = hvd.allreduce(tensor, op=hvd.Sum)
        assert set(result.tolist()) == {exact}
        assert_same_everywhere([result])


@session
def test_average_flag_is_deprecated():
    n, tensor = hvd.size(), torch.ones(2)
    calls = (hvd.allreduce, hvd.allreduce_, lambda t, avg: hvd.grouped_allreduce([t], avg)[0])
    for call in calls:
        for average, want in ((True, 1.0), (False, float(n))):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                assert call(tensor.clone(), average).tolist() == [want] * 2
            assert [w.category for w in caught] == [DeprecationWarning]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert hvd.allreduce_(torch.IntTensor([1]), None, "name", hvd.Sum).tolist() == [n]
        assert hvd.allreduce(tensor, None, "name", hvd.Compression.none, hvd.Sum).tolist() == [n, n]
    for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
        with raises(ValueError, "op parameter supersedes average"):
            call(tensor, average=True, op=hvd.Sum)
    for call in (hvd.grouped_allreduce, hvd.grouped_allreduce_, hvd.grouped_allreduce_async):
        with raises(ValueError, "op parameter supersedes average"):
            call([tensor], average=False, op=hvd.Sum)


class Halves(hvd.Compression.none):
    """A user's compressor that sends every tensor as int32 halves."""

    @staticmethod
    def compress(tensor):
        return (tensor * 2).to(torch.int32), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx) / 2


@session
def test_compression():
    n = hvd.size()
    for dtype in (torch.float32, torch.float64, torch.float16):
        for compression in (hvd.Compression.fp16, hvd.Compression.bf16, hvd.Compression.none, Halves):
            tensor = torch.tensor([1.5, -2.0, 0.5], dtype=dtype)
            got = hvd.allreduce(tensor, compression=compression, op=hvd.Sum)
            assert_equal(got, tensor * n)
            got, same = hvd.grouped_allreduce([tensor, tensor], compression=compression, op=hvd.Sum)
            assert_equal(got, tensor * n)
            assert_equal(same, tensor * n)
    third = torch.full((2,), 1 / 3)
    assert_equal(hvd.allreduce(third, compression=hvd.Compression.fp16), third.half().float())
    assert_equal(hvd.allreduce(third, compression=hvd.Compression.bf16), third.bfloat16().float())
    assert hvd.allreduce(torch.tensor([3]), compression=hvd.Compression.fp16, op=hvd.Sum).tolist() == [3 * n]


@pytest.mark.over_network
@session
def test_names_may_be_submitted_in_any_order():
    n, rank = hvd.size(), hvd.rank()
    order = torch.randperm(100, generator=torch.Generator().manual_seed(rank)).tolist()
    handles = {i: hvd.allreduce_async(torch.full((i + 1,), float(i)), name=f"t{i}", op=hvd.Sum) for i in order}
    for i in torch.randperm(100, generator=torch.Generator().manual_seed(7 + rank)).tolist():
        assert_equal(hvd.synchronize(handles[i]), torch.full((i + 1,), float(i * n)))


@session
def test_one_name_can_be_used_for_every_kind_of_operation():
    n, ones = hvd.size(), torch.ones(n_rows := hvd.size())
    handles = [
        hvd.allreduce_async(ones, name="x", op=hvd.Sum),
        hvd.allgather_async(ones, name="x"),
        hvd.broadcast_async(ones, 0, name="x"),
        hvd.alltoall_async(ones, name="x"),
        hvd.reducescatter_async(ones, name="x"),
        hvd.grouped_allreduce_async([ones], name="x"),
        hvd.grouped_allgather_async([ones], name="x"),
        hvd.grouped_reducescatter_async([ones], name="x"),
    ]
    results = [hvd.synchronize(handle) for handle in handles]
    assert results[0].tolist() == [n] * n_rows
    assert len(results[1]) == n * n_rows
    assert [type(r) for r in results[5:]] == [tuple] * 3


@session
def test_handles():
    handles, polls = [], []
    for i in range(100):
        handles.append(hvd.allreduce_async(torch.ones(50), name=f"h{i}"))
        polls.append(hvd.poll(handles[-1]))
    assert all(type(handle) is int for handle in handles)
    assert False in polls
    assert all(type(done) is bool for done in polls)
    for handle in handles:
        assert hvd.synchronize(handle).tolist() == [1.0] * 50
        assert hvd.synchronize(handle) is None
        with raises(ValueError):
            hvd.poll(handle)
    assert hvd.synchronize(10**6) is None


@pytest.mark.ranks(2, 3, 4)
@session
def test_poll_is_false_while_a_peer_is_missing():
    handle = None
    if hvd.rank() == 0:
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
        assert not hvd.poll(handle)
    hvd.barrier()
    if handle is None:
        handle = hvd.allreduce_async(torch.ones(1), name="late", op=hvd.Sum)
    assert hvd.synchronize(handle).item() == hvd.size()


@session
def test_a_tensor_larger_than_the_staging_area():
    tensor = torch.arange(9_000_001, dtype=torch.int64)
    got = hvd.allreduce(tensor, op=hvd.Sum)
    assert torch.equal(got, tensor * hvd.size())
    floats = torch.full((5_000_003,), 0.5)
    hvd.allreduce_(floats, op=hvd.Sum)
    assert torch.equal(floats, torch.full_like(floats, 0.5 * hvd.size()))


@pytest.mark.ranks(1, 2, 4)
@session
def test_adasum():
    n, rank = hvd.size(), hvd.rank()
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        eps = torch.finfo(dtype).eps
        orthogonal = torch.zeros(8, dtype=dtype)
        orthogonal[2 * rank] = rank + 1
        want = torch.zeros(8, dtype=dtype)
        for r in range(n):
            want[2 * r] = r + 1
        got = hvd.allreduce(orthogonal, op=hvd.Adasum)
        assert (got - want).double().norm() < 100 * eps * want.double().norm()
        parallel = torch.tensor([1.0, -2.0, 3.0], dtype=dtype)
        handle = hvd.allreduce_async_(parallel.clone(), op=hvd.Adasum)
        got = hvd.synchronize(handle)
        assert (got - parallel).double().norm() < 100 * eps * parallel.double().norm()
        assert_same_everywhere([got])
    tiny = torch.full((4,), 1e-160, dtype=torch.float64)
    assert torch.isfinite(hvd.allreduce(tiny, op=hvd.Adasum)).all()
    zeros = torch.zeros(3)
    first, second = hvd.grouped_allreduce([zeros, torch.ones(2)], op=hvd.Adasum)
    assert first.tolist() == [0.0] * 3
    torch.testing.assert_close(second, torch.ones(2))


@pytest.mark.ranks(3, 4)
def test_adasum_is_rejected_where_it_is_undefined():
    halves = even_and_odd()
    hvd.init(process_sets=halves)
    my_half = next(half for half in halves if half.included())
    with raises(NotImplementedError, "adasum", "non-global"):
        hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=my_half)
    if hvd.size() == 3:
        with raises(NotImplementedError, "adasum", "non-power of 2"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum)
    hvd.barrier()
    hvd.shutdown()


@pytest.mark.over_network
@session
def test_results_do_not_depend_on_the_transport():
    """Sums of arbitrary floats have the same bits as a loop over the ranks, whichever rank computes them."""
    generators = [torch.Generator().manual_seed(rank) for rank in range(hvd.size())]
    inputs = [torch.randn(1001, generator=generator) for generator in generators]
    want = inputs[0].clone()
    for other in inputs[1:]:
        want += other
    assert torch.equal(hvd.allreduce(inputs[hvd.rank()], op=hvd.Sum), want)
