"""Compression between hosts: half precision, or a byte each with a scale for every block.

Inside a host everything is float32. A slice leader encodes its host's part on the way out and decodes what comes in,
and all hosts, the sender's too, go on with what was decoded: results have the same bits everywhere. What encoding loses
is kept by the caller that asks for it (`residual`) and added the next time. The native part does the same (`hosts.h`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from hora.engine.transport.packing import Buffers

__all__ = ["CODES", "Code"]

# How many numbers have one scale: four bytes more for this many. CODE_BLOCK of native.c.
_BLOCK = 256


class Code(ABC):
    """Turns flat float32 tensors into bytes and back. `buffers`: memory of the caller's thread."""

    @abstractmethod
    def num_bytes(self, count: int) -> int:
        """Return the size of `count` encoded numbers."""

    @abstractmethod
    def encode(self, numbers: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, buffers: Buffers) -> None:
        """Write the numbers, with the residual added, to the bytes `out`; then make the numbers what these bytes say,
        and the residual what was lost."""
        # Numbers that are not finite are told to the others, but must not come back in every later step.

    @abstractmethod
    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        """Make the numbers of the bytes."""


class _Cast(Code):
    """Another dtype."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def num_bytes(self, count: int) -> int:
        return count * self._dtype.itemsize

    def encode(self, numbers: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, buffers: Buffers) -> None:
        short = out.view(self._dtype)
        if residual is None:
            short.copy_(numbers)
            numbers.copy_(short)
            return
        residual.add_(numbers)
        short.copy_(residual)
        numbers.copy_(short)
        _keep_loss(residual, numbers)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        out.copy_(data.view(self._dtype))


class _Blocks(Code):
    """A byte for each number: so many 127ths of the largest of its block. The scales come first, then the bytes."""

    def num_bytes(self, count: int) -> int:
        num_blocks = -(-count // _BLOCK)
        return num_blocks * 4 + -(-count // 4) * 4  # the next part's scales must be aligned

    def encode(self, numbers: torch.Tensor, out: torch.Tensor, residual: torch.Tensor | None, buffers: Buffers) -> None:
        scales, steps = _parts(out, numbers.numel())
        if residual is not None:
            residual.add_(numbers)
            numbers.copy_(residual)
        work = buffers.take("steps", numbers.numel(), torch.float32)
        for block_scales, block_steps, block_numbers, block_work in _in_blocks(scales, steps, numbers, work):
            torch.abs(block_numbers, out=block_work)
            torch.amax(block_work, dim=1, keepdim=True, out=block_scales)
            block_scales.div_(127.0)
            # A block of zeros has no scale to divide by; one with infinity or NaN is NaN as a whole.
            torch.div(block_numbers, block_scales.clamp(min=torch.finfo(torch.float32).tiny), out=block_work)
            block_work.round_().clamp_(-127.0, 127.0).nan_to_num_(0.0)
            block_steps.copy_(block_work)
            torch.mul(block_work, block_scales, out=block_numbers)
        if residual is not None:
            _keep_loss(residual, numbers)

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> None:
        scales, steps = _parts(data, out.numel())
        for block_scales, block_steps, block_numbers in _in_blocks(scales, steps, out):
            block_numbers.copy_(block_steps)
            block_numbers.mul_(block_scales)


def _keep_loss(residual: torch.Tensor, sent: torch.Tensor) -> None:
    """Keep the error: what was to be sent less what was sent. What is not finite has been told,
    and must not come back in later steps."""
    residual.sub_(sent).nan_to_num_(0.0, 0.0, 0.0)


def _parts(data: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales and the bytes."""
    num_blocks = -(-count // _BLOCK)
    return data[: num_blocks * 4].view(torch.float32), data[num_blocks * 4 :].view(torch.int8)[:count]


def _in_blocks(scales: torch.Tensor, *tensors: torch.Tensor) -> list[list[torch.Tensor]]:
    """All full blocks as rows, and the rest as one row."""
    count = tensors[0].numel()
    full = count // _BLOCK
    rows = []
    if full:
        rows.append([scales[:full].view(full, 1), *(t[: full * _BLOCK].view(full, _BLOCK) for t in tensors)])
    if count > full * _BLOCK:
        rows.append([scales[full:].view(1, 1), *(t[full * _BLOCK :].view(1, -1) for t in tensors)])
    return rows


CODES: dict[str, Code] = {"fp16": _Cast(torch.float16), "bf16": _Cast(torch.bfloat16), "int8": _Blocks()}
