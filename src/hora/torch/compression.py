"""Compression: a cast before the collective and its inverse after it, for the fronts and the optimizer."""

from __future__ import annotations

from typing import Any

import torch

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "FP16Compressor",
    "NoneCompressor",
    "wire_dtype",
]


class Compressor:
    """What `compression=` accepts: subclasses (or instances) with these two functions."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """The tensor to send, and whatever `decompress` needs to undo it."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """The inverse of `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors as they are."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating tensors in another dtype; integers pass through."""

    dtype: torch.dtype

    @classmethod
    def compress(cls, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        if not tensor.is_floating_point():
            return tensor, None
        return tensor.to(cls.dtype), tensor.dtype

    @classmethod
    def decompress(cls, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor if ctx is None else tensor.to(ctx)


class FP16Compressor(_CastCompressor):
    """Sends floating tensors as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating tensors as bfloat16: the range of float32 in half the bytes."""

    dtype = torch.bfloat16


class Compression:
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor


class ErrorFeedback(Compressor):
    """A casting compressor whose rounding errors are carried over: what a cast loses in one step is added in the next.

    The remainders live in the optimizer's buckets, in the parameters' dtype, on each rank; outside the optimizer it behaves
    as the compressor inside it.
    """

    def __init__(self, compression: type[Compressor]) -> None:
        if wire_dtype(compression) is None:
            raise ValueError(f"error feedback needs Compression.fp16 or Compression.bf16, but got {compression!r}")
        self.compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        return self.compression.compress(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        return self.compression.decompress(tensor, ctx)


def wire_dtype(compression: type[Compressor] | Compressor) -> torch.dtype | None:
    """The dtype that a casting compressor sends, None for any other compressor."""
    if isinstance(compression, ErrorFeedback):
        compression = compression.compression
    if compression is FP16Compressor:
        return torch.float16
    return torch.bfloat16 if compression is BF16Compressor else None
