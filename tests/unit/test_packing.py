"""Packing several tensors into one: portions, and the order in which portions overlap."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.engine.transport.packing import Buffers, copy, overlap, portions, runs, spread, unpack

sizes = st.lists(st.integers(0, 50), max_size=12)


@given(sizes, st.integers(1, 60))
def test_runs_cover_all_tensors_once_and_respect_the_limit(each, limit):
    found = [list(run) for run in runs(each, limit)]
    assert [index for run in found for index in run] == list(range(len(each)))
    for run in found:
        assert len(run) == 1 or sum(each[index] for index in run) <= limit


@given(sizes, st.integers(1, 60))
def test_portions_are_views_of_all_tensors_in_order(each, limit):
    flat = torch.arange(sum(each))
    inputs = list(flat.split(each))
    found = list(portions(inputs, inputs, limit))
    views = [view for sources, _ in found for view in sources]
    assert torch.equal(torch.cat([flat[:0], *views]), flat)
    for sources, results in found:
        assert 0 < sum(view.numel() for view in sources) <= limit
        assert [view.data_ptr() for view in sources] == [view.data_ptr() for view in results]


@given(st.integers(0, 200), st.integers(1, 9))
def test_spread_shortens_only_the_end(total, num_parts):
    parts = spread(total, num_parts)
    assert sum(parts) == total
    assert len(parts) == num_parts
    # A gather of equal parts then has all data at its front.
    assert all(part == parts[0] for part in parts[: total // max(parts[0], 1)])
    assert parts == sorted(parts, reverse=True)


def test_each_work_starts_before_its_predecessor_ends():
    order = []

    def work(name):
        order.append(f"start {name}")
        yield
        order.append(f"end {name}")

    overlap(work(name) for name in "abc")
    assert order == ["start a", "start b", "end a", "start c", "end b", "end c"]
    overlap(())


def test_a_work_that_yields_twice_is_an_error():
    def work():
        yield
        yield

    with pytest.raises(AssertionError, match="yields once"):
        overlap([work()])


def test_buffers_are_kept_per_purpose_up_to_their_limit():
    buffers = Buffers(torch.device("cpu"), 8192)
    first = buffers.get("a", 1000, torch.float32)
    assert first.shape == (1000,)
    assert buffers.get("a", 10, torch.int64).data_ptr() == first.data_ptr()
    assert buffers.get("b", 10, torch.int64).data_ptr() != first.data_ptr()
    large = buffers.get("a", 5000, torch.float32)
    assert large.shape == (5000,)
    assert buffers.get("a", 10, torch.uint8).data_ptr() == first.data_ptr()  # the large buffer was not kept
    buffers.clear()


def test_unpack_ignores_the_rest():
    outputs = [torch.zeros(2), torch.zeros(0), torch.zeros(1)]
    unpack(torch.arange(5.0), outputs)
    assert [output.tolist() for output in outputs] == [[0.0, 1.0], [], [2.0]]


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("count", [0, 1, 100, 200_000])
def test_copy(dtype, count):
    source = torch.randint(0, 2, (count,)).to(dtype)
    out = torch.zeros(count, dtype=dtype)
    copy(source, out)
    assert torch.equal(out, source)
