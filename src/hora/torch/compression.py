"""Compressors: a cast before the collective and its inverse after it, for `ops` and the optimizer.

For float32 on the CPU between hosts, ranks do not cast: the engine reduces in full precision inside each host and
encodes only the data that travels between hosts (`code_for`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.engine.request import ReduceOp


class Compressor:
    """Base class for `compression=`: a subclass (or an instance) with these two functions."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor to send, and a context for `decompress`."""
        raise NotImplementedError

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Invert `compress`."""
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Sends tensors unchanged."""

    @staticmethod
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        return tensor, None

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        return tensor


class _CastCompressor(Compressor):
    """Sends floating-point tensors in another dtype; integers pass through."""

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
    """Sends floating-point tensors as float16."""

    dtype = torch.float16


class BF16Compressor(_CastCompressor):
    """Sends floating-point tensors as bfloat16: the range of float32 in half the bytes."""

    dtype = torch.bfloat16


class Int8Compressor(NoneCompressor):
    """Sends float32 sums and averages between hosts as one byte per value and one scale per 256 values.

    The optimizer adds the quantization error in the next step. Tensors inside a host, and all others, are sent
    unchanged.
    """


@dataclass(frozen=True)
class PowerSGD(NoneCompressor):
    """Sends low-rank factors instead of gradients between hosts; for `DistributedOptimizer` only.

    Args:
        rank: A gradient of n rows and m columns becomes (n + m) * rank numbers; vectors are sent unchanged.
        start_step: Steps that send full gradients first.
        min_compression_rate: A gradient is sent unchanged unless it shrinks by more than this factor.
    """

    rank: int = 4
    start_step: int = 10
    min_compression_rate: float = 2.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("rank", 1), ("start_step", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"powersgd's {name} must be an integer of at least {least}, but it is {value!r}")
        rate = self.min_compression_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not rate > 0:
            raise ValueError(f"powersgd's min_compression_rate must be a number above 0, but it is {rate!r}")


class Compression:
    """Built-in compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    powersgd = PowerSGD


class ErrorFeedback(Compressor):
    """Wraps a casting compressor and carries its rounding errors over: the error of one step is added in the next.

    Each rank keeps its residuals in the optimizer's buckets, in the parameters' dtype. Between hosts, a rank keeps the
    residuals of the slice it sends for its host. Outside the optimizer this behaves like the wrapped compressor.

    Args:
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
    """

    def __init__(self, compression: type[Compressor]) -> None:
        if wire_dtype(compression) is None:
            raise ValueError(
                f"error feedback needs Compression.fp16 or Compression.bf16, but got {compression!r} "
                "(Compression.int8 has it already)"
            )
        self.compression = compression

    def compress(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:  # type: ignore[override]
        return self.compression.compress(tensor)

    def decompress(self, tensor: torch.Tensor, ctx: Any) -> torch.Tensor:  # type: ignore[override]
        return self.compression.decompress(tensor, ctx)


def wire_dtype(compression: type[Compressor] | Compressor) -> torch.dtype | None:
    """Return the dtype that a casting compressor sends; None for other compressors."""
    if isinstance(compression, ErrorFeedback):
        compression = compression.compression
    return next((known.dtype for known in (FP16Compressor, BF16Compressor) if known is compression), None)


def code_for(compression: type[Compressor] | Compressor, tensors: Sequence[torch.Tensor], *, op: int) -> str:
    """Return the engine's encoding for sums and averages of these tensors between hosts; empty if there is none."""
    if isinstance(compression, ErrorFeedback):
        compression = compression.compression
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return ""
    if not all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors):
        return ""
    return next((code for known, code in _CODES.items() if known is compression), "")


def described(compression: type[Compressor] | Compressor) -> str:
    """Return the compression as the user writes it; the text is the same on all ranks."""
    if isinstance(compression, ErrorFeedback):
        return f"ErrorFeedback({described(compression.compression)})"
    if isinstance(compression, PowerSGD):
        return repr(compression).replace("PowerSGD(", "Compression.powersgd(")
    kind = compression if isinstance(compression, type) else type(compression)
    return next(
        (f"Compression.{name}" for name, known in vars(Compression).items() if known is kind), kind.__qualname__
    )


_CODES: dict[type[Compressor], str] = {FP16Compressor: "fp16", BF16Compressor: "bf16", Int8Compressor: "int8"}
