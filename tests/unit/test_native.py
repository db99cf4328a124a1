"""The native part compared with Python: identical bits, and behaviour without it."""

from __future__ import annotations

import shutil

import pytest
import torch

from hora.engine.request import Reduce, ReduceOp
from hora.engine.shm import native
from hora.engine.transport.arithmetic import Arithmetic

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTEGERS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]

needs_it = pytest.mark.skipif(native.library() is None, reason=f"no native part: {native.absence()}")


def numbers(count, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point:
        return torch.randint(0, 120, (count,), generator=generator).to(dtype)
    values = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-6, 5, (count,), generator=generator)
    values[3], values[4], values[5], values[6] = float("inf"), -0.0, 1e-41, float("nan")
    return values.to(dtype)


def reduced(parts, reduce, compiled, out):
    arithmetic = Arithmetic(reduce, parts[0].dtype, len(parts), False, (), compiled)
    prepared = [torch.empty_like(part) for part in parts]
    for part, place in zip(parts, prepared, strict=True):
        arithmetic.prepare(part, place)
    result = torch.empty_like(parts[0]) if out is None else prepared[out]
    arithmetic.reduce(prepared, result)
    return result, arithmetic.sum is not None


@needs_it
@pytest.mark.parametrize("num_members", [1, 2, 3, 4, 6, 8, 17])
@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_sums_have_the_same_bits_with_and_without_it(dtype, num_members):
    parts = [numbers(5003, dtype, seed) for seed in range(num_members)]
    ops = [ReduceOp.SUM, ReduceOp.AVERAGE] if dtype.is_floating_point else [ReduceOp.SUM]
    scales = [(1.0, 1.0), (0.3, 1.0), (1.0, 0.7), (0.5, 3.0)] if dtype.is_floating_point else [(1.0, 1.0)]
    for op in ops:
        for prescale, postscale in scales:
            for out in (None, num_members - 1):
                reduce = Reduce(op, prescale, postscale)
                expected, _ = reduced(parts, reduce, None, out)
                found, in_c = reduced(parts, reduce, native.library(), out)
                assert in_c
                if dtype.is_floating_point:  # a NaN stays a NaN, but its payload bits are unspecified in torch too
                    assert torch.equal(found.isnan(), expected.isnan())
                    assert torch.equal(found.signbit()[~found.isnan()], expected.signbit()[~expected.isnan()])
                    found, expected = found.nan_to_num(7.0), expected.nan_to_num(7.0)
                assert torch.equal(found, expected), (op, prescale, postscale, out)


@needs_it
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_unsupported_operations_are_left_to_torch(op):
    parts = [numbers(100, torch.int32, seed) for seed in range(3)]
    expected, _ = reduced(parts, Reduce(op), None, None)
    found, in_c = reduced(parts, Reduce(op), native.library(), None)
    assert not in_c
    assert torch.equal(found, expected)


def test_the_native_part_can_be_disabled(monkeypatch):
    monkeypatch.setenv("HORA_NATIVE", "0")
    assert native.load.__wrapped__() == "HORA_NATIVE=0"


def test_python_works_without_the_native_part_and_beside_an_invalid_one(monkeypatch, tmp_path):
    monkeypatch.delenv("HORA_NATIVE", raising=False)
    monkeypatch.setattr(native, "_PATH", tmp_path / "libhora.so")
    assert "no C compiler" in native.load.__wrapped__()
    (tmp_path / "libhora.so").write_bytes(b"something else")
    assert "libhora.so" in native.load.__wrapped__()


@needs_it
def test_a_library_built_from_an_older_source_is_rejected(monkeypatch, tmp_path):
    monkeypatch.delenv("HORA_NATIVE", raising=False)
    for path in native._PATH.parent.glob("*.[chs]*"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(native, "_PATH", tmp_path / "libhora.so")
    assert isinstance(native.load.__wrapped__(), native.Library)
    with (tmp_path / "sums.h").open("a") as source:
        source.write("/* changed since the library was built */\n")
    assert "built from another source" in native.load.__wrapped__()
