"""broadcast: every dtype, root and form; the root is a global rank inside process sets too."""

from __future__ import annotations

import pytest
import torch
from hvd_session import MOVED, SHAPES, assert_equal, assert_same_everywhere, mine, session, values

import horovod.torch as hvd

pytestmark = pytest.mark.ranks(1, 2, 3, 4)


@pytest.mark.over_network
@session(sets=True)
def test_dtypes_and_forms(sets):
    for process_set in sets:
        results = []
        root = process_set.ranks[-1]
        for dtype in MOVED:
            for shape in SHAPES:
                want, tensor = values(root, shape, dtype), mine(shape, dtype)
                a, b = tensor.clone(), tensor.clone()
                out = hvd.broadcast(tensor, root, process_set=process_set)
                assert out.data_ptr() != tensor.data_ptr() or not tensor.numel()
                assert_equal(tensor, mine(shape, dtype))
                results += [
                    out,
                    hvd.synchronize(hvd.broadcast_async(tensor, root, "x", process_set=process_set)),
                ]
                assert hvd.broadcast_(a, root, name="x", process_set=process_set) is a
                assert hvd.synchronize(hvd.broadcast_async_(b, root, process_set=process_set)) is b
                results += [a, b]
                for result in results[-4:]:
                    assert_equal(result, want)
        assert_same_everywhere(results, process_set)


@session
def test_every_root():
    handles = [hvd.broadcast_async(mine((7,), torch.float32, root), root) for root in range(hvd.size())]
    for root, handle in enumerate(handles):
        assert_equal(hvd.synchronize(handle), values(root, (7,), torch.float32, root))


@session
def test_in_place_on_a_view_and_on_a_parameter():
    target = torch.zeros(4, 6)
    view = target.t()[1:3]
    view.fill_(float(hvd.rank() + 5))
    hvd.broadcast_(view, 0)
    want = torch.zeros(4, 6)
    want[:, 1:3] = 5
    assert_equal(target, want)
    layer = torch.nn.Linear(3, 2)
    with torch.no_grad():
        layer.weight.fill_(hvd.rank())
    assert hvd.broadcast_(layer.weight, hvd.size() - 1) is layer.weight
    assert layer.weight.tolist() == [[hvd.size() - 1] * 3] * 2


@session
def test_large():
    tensor = torch.full((3_000_001,), hvd.rank(), dtype=torch.int64)
    hvd.broadcast_(tensor, hvd.size() - 1)
    assert bool((tensor == hvd.size() - 1).all())
