"""Compression between hosts to one byte per number: decoded values, errors and residuals."""

from __future__ import annotations

import ctypes
import math

import pytest
import torch

from hora.engine.shm import native

pytestmark = pytest.mark.skipif(native.library() is None, reason=f"no native part: {native.absence()}")

SIZES = (1, 3, 255, 256, 257, 5000)
BLOCK = 256  # numbers per scale: CODE_BLOCK of codes.h


INT8 = 3  # CODE_INT8


def num_blocks(count):
    return -(-count // BLOCK)


def called(function, *addresses, count):
    getattr(ctypes.CDLL(str(native._PATH)), function)(INT8, *map(ctypes.c_void_p, addresses), ctypes.c_int64(count))


def encoded(numbers, residual=None):
    """Encode `numbers`, scales first; they become their decoded values, and `residual` the encoding error."""
    count = numbers.numel()
    data = torch.zeros(num_blocks(count) * 4 + -(-count // 4) * 4, dtype=torch.uint8)
    called(
        "hora_encode", numbers.data_ptr(), 0 if residual is None else residual.data_ptr(), data.data_ptr(), count=count
    )
    return data


def decoded(data, count):
    out = torch.full((count,), math.nan)
    called("hora_decode", data.data_ptr(), out.data_ptr(), count=count)
    return out


@pytest.mark.parametrize("count", SIZES)
def test_the_sender_continues_with_the_decoded_values(count):
    wanted = torch.randn(count, generator=torch.Generator().manual_seed(count))
    sent = wanted.clone()
    received = decoded(encoded(sent), count)
    assert torch.equal(sent, received)
    assert (received - wanted).abs().max() <= 1.01 / 254 * wanted.abs().max()


@pytest.mark.parametrize("count", SIZES)
def test_a_step_is_one_127th_of_the_largest_number_of_its_block(count):
    generator = torch.Generator().manual_seed(count)
    wanted = torch.randn(count, generator=generator) * 10.0 ** torch.randint(-40, 30, (count,), generator=generator)
    for residual in (None, wanted.flip(0) * 0.1):
        lost = None if residual is None else residual.clone()
        data = encoded(wanted.clone(), lost)
        total = wanted if residual is None else residual + wanted
        steps = data[num_blocks(count) * 4 :].view(torch.int8)[:count]
        scales = data[: num_blocks(count) * 4].clone().view(torch.float32)
        for block, scale in enumerate(scales):
            numbers, found = (tensor[block * BLOCK : (block + 1) * BLOCK] for tensor in (total, steps))
            assert scale == numbers.abs().max() / 127.0
            assert torch.equal(
                found,
                (numbers / scale.clamp(min=torch.finfo(torch.float32).tiny))
                .round()
                .clamp(-127, 127)
                .nan_to_num(0.0)
                .to(torch.int8),
            )
        if lost is not None:
            assert torch.equal(lost, total - decoded(data, count))


def test_the_residual_is_sent_with_later_numbers():
    wanted = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 1e-3
    wanted[0] = 1.0  # the other numbers round to zero beside it
    residual, total = torch.zeros(1000), torch.zeros(1000)
    for _ in range(400):
        sent = wanted.clone()
        encoded(sent, residual)
        total += sent
    assert torch.allclose(total / 400, wanted, rtol=1e-3, atol=1e-4)
    assert torch.allclose(total + residual, 400 * wanted, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_non_finite_numbers_are_sent_but_kept_out_of_the_residual(value):
    residual, sent = torch.zeros(300), torch.ones(300)
    sent[7] = value
    received = decoded(encoded(sent, residual), 300)
    assert not received[7].isfinite()
    assert torch.equal(received[256:], torch.ones(44))  # another block
    assert residual.isfinite().all()


def test_zeros_stay_zeros():
    sent = torch.zeros(600)
    encoded(sent)
    assert torch.equal(sent, torch.zeros(600))
