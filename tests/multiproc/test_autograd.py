"""Gradients of the differentiable collectives: single, grouped, compressed, repeated; second derivatives."""

from __future__ import annotations

import pytest
import torch
from hvd_session import session

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


def leaf(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.full(shape, float(hvd.rank() + 1), dtype=dtype, requires_grad=True)


def check(actual, want):
    torch.testing.assert_close(actual, want)


@session(sets=True)
def test_allreduce(sets):
    for process_set in sets:
        n = process_set.size()
        weight = torch.arange(5.0)
        for op, factor in ((hvd.Sum, n), (hvd.Average, 1)):
            x = leaf(5)
            hvd.allreduce(x, op=op, process_set=process_set).backward(weight)
            check(x.grad, weight * factor)
        x = leaf(5)
        scaled = hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0, postscale_factor=0.25, process_set=process_set)
        scaled.backward(weight)
        check(x.grad, weight * n * 0.5)
        # The upstream gradient is reduced too: every rank's share of the loss counts.
        x = leaf(5)
        (hvd.allreduce(x, op=hvd.Sum, process_set=process_set) * (hvd.rank() + 1)).sum().backward()
        check(x.grad, torch.full((5,), float(sum(r + 1 for r in process_set.ranks))))


@session
def test_compression_stays_in_the_graph():
    x = leaf(4, dtype=torch.float64)
    y = hvd.allreduce(x, op=hvd.Sum, compression=hvd.Compression.fp16)
    assert y.dtype == torch.float64
    y.sum().backward()
    check(x.grad, torch.full((4,), float(hvd.size()), dtype=torch.float64))


@session(sets=True)
def test_allgather(sets):
    for process_set in sets:
        rows = hvd.rank() + 2
        x = leaf(rows, 3)
        gathered = hvd.allgather(x, process_set=process_set)
        # All ranks weight row i of the result with i, so averaging changes nothing.
        weight = torch.arange(float(len(gathered)))[:, None].expand(-1, 3)
        gathered.backward(weight)
        start = sum(r + 2 for r in process_set.ranks if r < hvd.rank())
        check(x.grad, weight[start : start + rows])
        a, b = leaf(2), leaf(hvd.rank(), 2)
        first, second = hvd.grouped_allgather([a, b], process_set=process_set)
        first.backward(torch.full_like(first, float(hvd.rank())))
        second.sum().backward()
        check(a.grad, torch.full((2,), sum(process_set.ranks) / process_set.size()))
        check(b.grad, torch.ones(hvd.rank(), 2))


@session(sets=True)
def test_broadcast(sets):
    for process_set in sets:
        root = process_set.ranks[-1]
        x = leaf(3)
        hvd.broadcast(x, root, process_set=process_set).backward(torch.full((3,), float(hvd.rank())))
        want = sum(process_set.ranks) / process_set.size() if hvd.rank() == root else 0.0
        check(x.grad, torch.full((3,), want))


@session(sets=True)
def test_alltoall(sets):
    for process_set in sets:
        n = process_set.size()
        splits = [m + 1 for m in range(n)]
        unsent = 2
        for given in (splits, torch.tensor(splits, dtype=torch.int32)):
            x = leaf(sum(splits) + unsent, 2)
            output, received = hvd.alltoall(x, given, process_set=process_set)
            assert not received.requires_grad
            output.backward(torch.full_like(output, float(process_set.rank() + 1)))
            # The rows for member m return with m's weight; unsent rows get zeros.
            want = [float(m + 1) for m in range(n) for _ in range(m + 1)] + [0.0] * unsent
            check(x.grad, torch.tensor(want)[:, None].expand(-1, 2))
        x = leaf(2 * n)
        hvd.alltoall(x, process_set=process_set).sum().backward()
        check(x.grad, torch.ones(2 * n))


@session(sets=True)
def test_reducescatter(sets):
    for process_set in sets:
        n, rows = process_set.size(), 2 * process_set.size() + 1
        for op, factor in ((hvd.Sum, n), (hvd.Average, 1)):
            x = leaf(rows, 2)
            mine = hvd.reducescatter(x, op=op, process_set=process_set, prescale_factor=3.0, postscale_factor=0.5)
            mine.backward(torch.full_like(mine, float(process_set.rank())))
            counts = [rows // n + (m < rows % n) for m in range(n)]
            want = torch.tensor([float(m) for m, count in enumerate(counts) for _ in range(count)])
            check(x.grad, (want * factor * 1.5)[:, None].expand(-1, 2))
        a, b = leaf(rows), leaf(n, 2)
        outputs = hvd.grouped_reducescatter([a, b], op=hvd.Sum, process_set=process_set)
        for output in outputs:
            output.sum().backward()
        check(a.grad, torch.full((rows,), float(n)))
        check(b.grad, torch.full((n, 2), float(n)))


@session
def test_group_outputs_can_be_differentiated_one_by_one_and_repeatedly():
    n = hvd.size()
    for call in (hvd.grouped_allreduce, hvd.grouped_reducescatter):
        tensors = [leaf(n * (i + 1)) for i in range(4)]
        outputs = call(tensors, op=hvd.Sum)
        for i, output in enumerate(outputs):
            output.backward(torch.ones_like(output))
            for j, tensor in enumerate(tensors):
                check(tensor.grad, torch.full_like(tensor, float(n)) if j <= i else torch.zeros_like(tensor))
        outputs[0].backward(torch.ones_like(outputs[0]))
        check(tensors[0].grad, torch.full_like(tensors[0], 2.0 * n))


@session
def test_group_with_integers():
    x, whole = leaf(3), torch.arange(4)
    first, second = hvd.grouped_allreduce([x, whole], op=hvd.Sum)
    assert not second.requires_grad
    first.sum().backward()
    check(x.grad, torch.full((3,), float(hvd.size())))
    assert second.tolist() == [i * hvd.size() for i in range(4)]


@session
def test_group_with_a_mask_and_integers():
    """A padded batch is gathered with its mask and its lengths, as contrastive losses do."""
    rows = hvd.rank() + 1
    x, mask, lengths = leaf(rows, 2), torch.arange(rows) % 2 == 0, torch.arange(rows)
    gathered, masks, of_all = hvd.grouped_allgather([mask, x, lengths])[1], *hvd.grouped_allgather([mask, lengths])
    assert masks.dtype == torch.bool
    assert of_all.tolist() == [i for r in range(hvd.size()) for i in range(r + 1)]
    weight = torch.arange(float(len(gathered)))[:, None].expand(-1, 2)
    gathered.backward(weight)
    start = sum(range(1, rows))
    check(x.grad, weight[start : start + rows])


@session
def test_numbers_that_change_between_forward_and_backward():
    n, factor = hvd.size(), torch.tensor(0.5)
    x, y, z = leaf(3), leaf(2 * n), leaf(2 * n)
    results = [
        hvd.allreduce(x, op=hvd.Sum, prescale_factor=factor),
        hvd.reducescatter(y, op=hvd.Sum, postscale_factor=factor),
    ]
    sent, received = hvd.alltoall(z, torch.full((n,), 2, dtype=torch.int32))
    factor.mul_(4)
    received.zero_()
    sum(result.sum() for result in (*results, sent)).backward()
    check(x.grad, torch.full_like(x, 0.5 * n))
    check(y.grad, torch.full_like(y, 0.5 * n))
    check(z.grad, torch.ones_like(z))


@session
def test_ranks_may_differ_in_requires_grad():
    x = torch.ones(3, requires_grad=hvd.rank() == 0)
    y = hvd.allgather(x)
    z = hvd.allreduce(x, op=hvd.Sum)
    assert y.requires_grad == z.requires_grad == (hvd.rank() == 0)
    assert z.tolist() == [hvd.size()] * 3
    with torch.no_grad():
        assert not hvd.allreduce(torch.ones(2, requires_grad=True)).requires_grad


@session
def test_second_derivative():
    n = hvd.size()
    calls = [
        (lambda t: hvd.allreduce(t, op=hvd.Sum), n),
        (lambda t: hvd.allreduce(t), 1),
        (hvd.allgather, 1),
        (lambda t: hvd.broadcast(t, 0), 1 if hvd.rank() == 0 else 0),
        (hvd.alltoall, 1),
        (hvd.reducescatter, 1),
    ]
    for call, factor in calls:
        x = torch.full((2 * n,), 3.0, requires_grad=True)
        (slope,) = torch.autograd.grad(call(x**2).sum(), x, create_graph=True)
        check(slope, torch.full((2 * n,), 6.0 * factor))
        (curvature,) = torch.autograd.grad(slope.sum(), x)
        check(curvature, torch.full((2 * n,), 2.0 * factor))


@session
def test_autograd_functions_under_their_old_names():
    from horovod.torch.mpi_ops import HorovodAllreduce, HorovodBroadcast

    x = leaf(2)
    y = HorovodAllreduce.apply(x, None, "direct", hvd.Sum, 1.0, 1.0, hvd.global_process_set)
    y.sum().backward()
    check(x.grad, torch.full((2,), float(hvd.size())))
    assert HorovodBroadcast.apply(leaf(2), 0, None, hvd.global_process_set).tolist() == [1.0, 1.0]
