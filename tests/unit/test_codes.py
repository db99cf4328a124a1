"""Numbers in fewer bytes: what is decoded, what is lost, and what becomes of the loss."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from hora.engine.shm import native
from hora.engine.transport import codes
from hora.engine.transport.codes import CODES
from hora.engine.transport.packing import Buffers

SIZES = (1, 3, 255, 256, 257, 5000)


def encoded(code, numbers, residual=None):
    data = torch.empty(code.num_bytes(numbers.numel()), dtype=torch.uint8)
    code.encode(numbers, data, residual, Buffers(torch.device("cpu"), 2**20))
    return data


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("name", CODES)
def test_the_sender_goes_on_with_what_the_others_decode(name, count):
    code, generator = CODES[name], torch.Generator().manual_seed(count)
    wanted = torch.randn(count, generator=generator)
    sent = wanted.clone()
    data = encoded(code, sent)
    received = torch.full((count,), math.nan)
    code.decode(data, received)
    assert torch.equal(sent, received)
    largest = wanted.abs().max().item()
    assert (received - wanted).abs().max() <= {"fp16": 2**-11, "bf16": 2**-8, "int8": 1 / 254}[name] * largest * 1.01


@pytest.mark.parametrize("name", CODES)
def test_the_bytes_are_a_half_or_a_quarter(name):
    assert CODES[name].num_bytes(2**20) <= {"fp16": 2**21, "bf16": 2**21, "int8": 1.02 * 2**20}[name]


@pytest.mark.parametrize("name", CODES)
def test_what_is_lost_comes_with_the_next_ones(name):
    code, wanted = CODES[name], torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-3
    wanted[0] = 1.0  # beside which, as bytes, the others are nothing
    residual, total = torch.zeros(1000), torch.zeros(1000)
    for _ in range(400):
        sent = wanted.clone()
        encoded(code, sent, residual)
        total += sent
    assert torch.allclose(total / 400, wanted, rtol=1e-3, atol=1e-4)
    assert torch.allclose(total + residual, 400 * wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("name", CODES)
def test_what_is_not_finite_is_told_once(name, value):
    code, residual, sent = CODES[name], torch.zeros(300), torch.ones(300)
    sent[7] = value
    data = encoded(code, sent, residual)
    code.decode(data, sent)
    assert not sent[7].isfinite()
    assert torch.equal(sent[256:], torch.ones(44))  # another block
    assert residual.isfinite().all()


def test_zeros_stay_zeros():
    sent = torch.zeros(600)
    encoded(CODES["int8"], sent)
    assert torch.equal(sent, torch.zeros(600))


@pytest.mark.skipif(native.library() is None, reason=f"no native part: {native.absence()}")
@pytest.mark.parametrize("count", SIZES)
def test_bytes_are_the_same_with_and_without_the_native_part(count):
    generator = torch.Generator().manual_seed(count)
    wanted = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-40, 30, (count,), generator=generator)
    for residual in (None, wanted.flip(0) * 0.1):
        results = []
        for encode, decode in ((encoded, CODES["int8"].decode), (natively_encoded, natively_decoded)):
            sent, lost = wanted.clone(), None if residual is None else residual.clone()
            data, received = encode(CODES["int8"], sent, lost), torch.empty(count)
            data[-(-count // codes._BLOCK) * 4 + count :] = 0  # what only keeps the next part aligned
            decode(data, received)
            results.append((data, sent, received, torch.zeros(1) if lost is None else lost))
        for one, other in zip(*results, strict=True):
            assert torch.equal(one, other)


def natively_encoded(code, numbers, residual):
    data = torch.empty(code.num_bytes(numbers.numel()), dtype=torch.uint8)
    at, steps_at = data.data_ptr(), data.data_ptr() + -(-numbers.numel() // codes._BLOCK) * 4
    lost = 0 if residual is None else residual.data_ptr()
    pointers = [ctypes.c_void_p(each) for each in (numbers.data_ptr(), lost, at, steps_at)]
    native.library().long.hora_encode_int8(*pointers, ctypes.c_size_t(numbers.numel()))
    return data


def natively_decoded(data, out):
    at, steps_at = data.data_ptr(), data.data_ptr() + -(-out.numel() // codes._BLOCK) * 4
    pointers = [ctypes.c_void_p(each) for each in (at, steps_at, out.data_ptr())]
    native.library().long.hora_decode_int8(*pointers, ctypes.c_size_t(out.numel()))
