"""Assignment of gradients to buckets, and users' parameter groups: pure functions, no process."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hora.torch.compression import Compression, ErrorFeedback, wire_dtype
from hora.torch.optimizer.bucket_plan import plan_buckets
from hora.torch.optimizer.parameters import parameter_groups, parameter_names

SIZES = st.lists(st.integers(0, 5000), min_size=1, max_size=40)


def named(sizes, dtype=torch.float32):
    parameters = [torch.zeros(size, dtype=dtype) for size in sizes]
    return parameters, {p: f"p{i}" for i, p in enumerate(parameters)}


@given(SIZES, st.integers(1, 20_000), st.sampled_from([1, 64, 256]))
def test_every_gradient_has_one_slot_in_order_without_overlap(sizes, bucket_bytes, granularity):
    parameters, names = named(sizes)
    specs = plan_buckets(parameters, names, bucket_bytes=bucket_bytes, granularity=granularity)
    assert [id(p) for spec in specs for p in spec.parameters] == [id(p) for p in parameters]
    for spec in specs:
        end = 0
        for parameter, offset in zip(spec.parameters, spec.offsets, strict=True):
            assert offset >= end
            end = offset + parameter.numel()
        assert spec.num_elements > end  # the control element follows all gradients
        assert spec.num_elements % granularity == 0
    assert len({spec.name for spec in specs}) == len(specs)


@given(SIZES, st.data())
def test_dtypes_never_mix_and_breaks_start_buckets(sizes, data):
    dtypes = [data.draw(st.sampled_from([torch.float32, torch.float64, torch.float16])) for _ in sizes]
    parameters = [torch.zeros(size, dtype=dtype) for size, dtype in zip(sizes, dtypes, strict=True)]
    names = {p: str(i) for i, p in enumerate(parameters)}
    cut = data.draw(st.integers(0, len(sizes)))
    before = {id(p) for p in parameters[:cut]}
    for spec in plan_buckets(parameters, names, breaks=frozenset((cut,))):
        assert len({p.dtype for p in spec.parameters}) == 1
        assert len({id(p) in before for p in spec.parameters}) == 1


def test_a_full_bucket_is_closed_and_arranged_by_group():
    parameters, names = named([100] * 6)
    group = {id(p): i % 2 for i, p in enumerate(parameters)}
    specs = plan_buckets(parameters, names, bucket_bytes=1200, group_of=lambda p: group[id(p)])
    assert [len(spec.parameters) for spec in specs] == [3, 3]
    assert [[group[id(p)] for p in spec.parameters] for spec in specs] == [[0, 0, 1], [0, 1, 1]]
    halves = plan_buckets(parameters, names, bucket_bytes=1200, wire_dtype=torch.float16)
    assert [spec.dtype for spec in halves] == [torch.float16]


def test_parameter_names():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    optimizer = torch.optim.SGD([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.1)
    assert list(parameter_names(optimizer, None).values()) == [
        "allreduce.noname.0.0",
        "allreduce.noname.0.1",
        "allreduce.noname.1.0",
    ]
    pairs = [("a", parameters[0]), ("b", parameters[1]), ("c", parameters[2]), ("tied", parameters[0])]
    assert parameter_names(optimizer, iter(pairs))[parameters[0]] == "a"
    with pytest.raises(ValueError, match="unique; found duplicates: a"):
        parameter_names(optimizer, [("a", p) for p in parameters])


@given(st.integers(1, 12), st.integers(0, 12))
def test_integer_groups_are_contiguous_and_near_even(num_groups, count):
    tensors = [torch.zeros(1) for _ in range(count)]
    groups = parameter_groups(num_groups, tensors)
    assert [id(t) for group in groups for t in group] == [id(t) for t in tensors]
    sizes = [len(group) for group in groups]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(groups) == min(num_groups, count)


def test_wire_dtypes():
    assert wire_dtype(Compression.none) is None
    assert wire_dtype(Compression.fp16) is torch.float16
    assert wire_dtype(ErrorFeedback(Compression.bf16)) is torch.bfloat16
