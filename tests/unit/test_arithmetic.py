"""The arithmetic of reductions, compared with numpy and with the explicit rules."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.engine.request import Reduce, ReduceOp
from hora.engine.transport.arithmetic import adasum_pair, arithmetic_of, identity

HALVES = [torch.float16, torch.bfloat16]
FLOATS = [*HALVES, torch.float32, torch.float64]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
OPS = [ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT]


def values(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return (torch.randn(count, generator=generator) * 8).to(dtype)
    low = 0 if dtype == torch.uint8 else -60
    return torch.randint(low, 60, (count,), generator=generator).to(dtype)


def reduced(parts, op, prescale=1.0, postscale=1.0, out=None):
    arithmetic = arithmetic_of(Reduce(op, prescale, postscale), parts[0].dtype, len(parts))
    prepared = []
    for part in parts:
        prepared.append(torch.empty_like(part))
        arithmetic.prepare(part, prepared[-1])
    out = torch.empty_like(parts[0]) if out is None else prepared[out]
    arithmetic.reduce(prepared, out)
    return out


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("num_members", [1, 2, 3, 5])
def test_members_are_combined_in_order_and_half_precision_is_rounded_once(dtype, op, num_members):
    parts = [values(101, dtype, seed) for seed in range(num_members)]
    wide = [part.float() for part in parts] if dtype in HALVES else parts
    expected = wide[0]
    for part in wide[1:]:
        if op in (ReduceOp.SUM, ReduceOp.AVERAGE):
            expected = expected + part
        elif op == ReduceOp.PRODUCT:
            expected = expected * part
        else:
            expected = torch.where((part < expected) == (op == ReduceOp.MIN), part, expected)
    if op == ReduceOp.AVERAGE and not dtype.is_floating_point:
        expected = torch.from_numpy(np.trunc(expected.double().numpy() / num_members)).to(dtype)
    elif op == ReduceOp.AVERAGE:
        expected = torch.from_numpy(expected.numpy() / expected.numpy().dtype.type(num_members))
    assert torch.equal(reduced(parts, op), expected.to(dtype))


@pytest.mark.parametrize(
    ("dtype", "op", "prescale", "numbers", "expected"),
    [
        (torch.float16, ReduceOp.AVERAGE, 1.0, [40000.0, 40000.0], 40000.0),
        (torch.float16, ReduceOp.SUM, 0.5, [40000.0, 40000.0], 40000.0),
        (torch.float16, ReduceOp.SUM, 1.0, [60000.0, 60000.0, -60000.0], 60000.0),
        (torch.float16, ReduceOp.PRODUCT, 1.0, [256.0, 256.0, 0.5], 32768.0),
        (torch.float16, ReduceOp.AVERAGE, 1.0, [2.0**-24] * 2, 2.0**-24),  # the smallest float16
        (torch.float16, ReduceOp.AVERAGE, 1.0, [2.0**-24, 2.0**-24, 2.0**-24, 0.0], 2.0**-24),
        (torch.float16, ReduceOp.SUM, 0.25, [2.0**-24] * 4, 2.0**-24),
        (torch.bfloat16, ReduceOp.SUM, 1.0, [1.0] + [2.0**-8] * 7, 1.03125),
        (torch.bfloat16, ReduceOp.SUM, 0.3, [1.0, 1.0, 1.0], 0.8984375),
    ],
)
def test_half_precision_neither_overflows_nor_underflows_in_between(dtype, op, prescale, numbers, expected):
    parts = [torch.full((40_000,), number, dtype=dtype) for number in numbers]
    assert set(reduced(parts, op, prescale).tolist()) == {expected}


@pytest.mark.parametrize("num_members", [1, 2, 3, 4])
@pytest.mark.parametrize("op", OPS)
def test_the_output_may_be_any_of_the_operands(op, num_members):
    parts = [values(77, torch.float32, seed) for seed in range(num_members)]
    expected = reduced(parts, op)
    for out in range(num_members):
        assert torch.equal(reduced(parts, op, out=out), expected)


@given(
    st.lists(st.integers(-(2**61), 2**61), min_size=2, max_size=7),
)
@settings(max_examples=100, deadline=None)
def test_integer_average_truncates_toward_zero_exactly(numbers):
    parts = [torch.tensor([number // 8]) for number in numbers]
    exact = sum(number // 8 for number in numbers)
    expected = abs(exact) // len(numbers) * (1 if exact >= 0 else -1)
    assert reduced(parts, ReduceOp.AVERAGE).item() == expected


def test_integers_are_scaled_in_float64_and_truncated_at_each_step():
    parts = [torch.tensor([-7, 7, 5, 100], dtype=torch.int32)] * 2
    # 0.5: -3, 3, 2, 50 for each member; sums -6, 6, 4, 100; 1.3: -7.8, 7.8, 5.2, 130
    assert reduced(parts, ReduceOp.SUM, 0.5, 1.3).tolist() == [-7, 7, 5, 130]
    # Average with a postscale: one factor. 3 (-7 - 7) / 2 = -21
    assert reduced(parts, ReduceOp.AVERAGE, 1.0, 3.0).tolist() == [-21, 21, 15, 300]
    assert reduced(parts, ReduceOp.MAX, -1.0, 0.5).tolist() == [3, -3, -2, -50]


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_scaled_in_their_own_precision(dtype):
    wide = torch.promote_types(dtype, torch.float32)
    part = values(1000, dtype, 1)
    factor = torch.tensor(0.1, dtype=wide)
    scaled = (part.to(wide) * factor).to(dtype)
    assert torch.equal(reduced([part], ReduceOp.SUM, 0.1), scaled)
    assert torch.equal(reduced([part], ReduceOp.SUM, 1.0, 0.1), scaled)
    once = part.to(wide) * factor
    post = ((once + once) * torch.tensor(0.7 / 2, dtype=wide)).to(dtype)
    assert torch.equal(reduced([part, part], ReduceOp.AVERAGE, 0.1, 0.7), post)


@pytest.mark.parametrize("num_members", [2, 3, 4, 7, 8])
def test_average_of_floats_is_the_exact_division(num_members):
    sums = torch.cat((torch.randn(5000), torch.tensor([1e-44, 1.4e-45, 3e38, math.inf, math.nan, -0.0])))
    arithmetic = arithmetic_of(Reduce(ReduceOp.AVERAGE), torch.float32, num_members)
    expected = torch.from_numpy(sums.numpy() / np.float32(num_members))
    arithmetic.finish(sums, sums)
    assert torch.equal(sums.view(torch.int32), expected.view(torch.int32))


def test_nan_propagates_and_integers_wrap():
    parts = [torch.tensor([1.0, math.nan, math.inf]), torch.tensor([math.nan, 2.0, -math.inf])]
    for op in OPS:
        result = reduced(parts, op)
        assert result[:2].isnan().all()
    assert reduced(parts, ReduceOp.SUM)[2].isnan()
    high = torch.tensor([torch.iinfo(torch.int64).max])
    assert reduced([high, torch.tensor([1])], ReduceOp.SUM).item() == torch.iinfo(torch.int64).min


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_identity_changes_nothing(op, dtype):
    part = values(50, dtype, 3)
    neutral = torch.full_like(part, identity(op, dtype))
    result = reduced([neutral, part], op if op != ReduceOp.AVERAGE else ReduceOp.SUM)
    assert torch.equal(result, part)


def test_identity_of_booleans():
    assert identity(ReduceOp.MIN, torch.bool) is True
    assert identity(ReduceOp.MAX, torch.bool) is False


def test_the_same_arguments_return_the_same_object():
    first = arithmetic_of(Reduce(ReduceOp.SUM), torch.float32, 2)
    assert arithmetic_of(Reduce(ReduceOp.SUM), torch.float32, 2) is first
    assert not first.prescales
    assert arithmetic_of(Reduce(ReduceOp.SUM, prescale=0.5), torch.float32, 2).prescales


def test_adasum_is_not_an_elementwise_reduction():
    with pytest.raises(AssertionError, match="not an element-wise reduction"):
        arithmetic_of(Reduce(ReduceOp.ADASUM), torch.float32, 2)


def adasum(a, b):
    out = torch.empty_like(a)
    adasum_pair(a, b, out)
    return out


@pytest.mark.parametrize("dtype", FLOATS)
def test_adasum_of_orthogonal_vectors_is_their_sum_and_of_parallel_ones_their_mean(dtype):
    a, b = torch.zeros(40_000, dtype=dtype), torch.zeros(40_000, dtype=dtype)
    a[:20_000] = values(20_000, dtype, 1)
    b[20_000:] = values(20_000, dtype, 2)
    assert torch.equal(adasum(a, b), a + b)
    limit = 100 * torch.finfo(dtype).eps
    mean = (a.double() + 3 * a.double()) / 2
    error = (adasum(a, (3 * a.double()).to(dtype)).double() - mean).norm() / mean.norm()
    assert error < limit


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e-160, 1e150])
def test_adasum_follows_the_rule_at_every_magnitude(scale):
    a, b = values(1001, torch.float64, 1) * scale, values(1001, torch.float64, 2)
    result = adasum(a, b)
    x, y = a.numpy(), b.numpy()
    dot, norm_x, norm_y = x @ y, x @ x, y @ y
    tiny = math.sqrt(np.finfo(np.float64).tiny)
    share_x = 1.0 if norm_x < tiny else 1 - dot / (2 * norm_x)
    expected = share_x * x + (1 - dot / (2 * norm_y)) * y
    assert np.linalg.norm(result.numpy() - expected) <= 1e-13 * np.linalg.norm(expected)


def test_adasum_of_empty_tensors_and_of_zeros():
    assert adasum(torch.empty(0), torch.empty(0)).numel() == 0
    assert torch.equal(adasum(torch.zeros(5), torch.ones(5)), torch.ones(5))
    assert torch.equal(adasum(torch.zeros(5), torch.zeros(5)), torch.zeros(5))


def test_adasum_may_write_into_an_operand():
    a, b = values(50_000, torch.float32, 1), values(50_000, torch.float32, 2)
    expected = adasum(a, b)
    other = b.clone()
    adasum_pair(a, other, other)
    assert torch.equal(other, expected)
    adasum_pair(a, b, a)
    assert torch.equal(a, expected)
