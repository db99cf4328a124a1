"""Compression: a cast before the collective and its inverse after it, for the fronts and the optimizer.

Between hosts float32 on the CPU is not cast by each rank: the engine reduces it as it is inside each host, and encodes
what then travels (`code_for`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from hora.engine.request import ReduceOp

__all__ = [
    "BF16Compressor",
    "Compression",
    "Compressor",
    "ErrorFeedback",
    "FP16Compressor",
    "Int8Compressor",
    "NoneCompressor",
    "PowerSGD",
    "code_for",
    "described",
    "keeps_losses",
    "wire_dtype",
]


class Compressor:
    """Base of what `compression=` accepts: subclasses (or instances) with these two functions."""

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


class Int8Compressor(NoneCompressor):
    """A byte for each number of a float32 tensor, and a scale for every 256 of them, where sums and averages travel
    between hosts; in the optimizer what that loses is added in the next step. Inside a host, and for everything else,
    tensors are sent as they are.
    """


@dataclass(frozen=True)
class PowerSGD(NoneCompressor):
    """Low-rank factors in the place of gradients, where these travel between hosts; for `DistributedOptimizer` alone.

    The first `start_step` steps send gradients as they are. Then one of n rows and m columns becomes (n + m) * `rank`
    numbers, if these are less than n * m by more than the factor `min_compression_rate`; vectors stay as they are.
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
    """The compressors by name."""

    none = NoneCompressor
    fp16 = FP16Compressor
    bf16 = BF16Compressor
    int8 = Int8Compressor
    powersgd = PowerSGD


class ErrorFeedback(Compressor):
    """A casting compressor whose rounding errors are carried over: what a cast loses in one step is added in the next.

    The remainders live in the optimizer's buckets, in the parameters' dtype, on each rank; between hosts each rank has
    those of what it sends for its host. Outside the optimizer it behaves as the compressor inside it.
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
    """The dtype that a casting compressor sends, None for any other compressor."""
    if isinstance(compression, ErrorFeedback):
        compression = compression.compression
    if compression is FP16Compressor:
        return torch.float16
    return torch.bfloat16 if compression is BF16Compressor else None


def code_for(compression: type[Compressor] | Compressor, tensors: Sequence[torch.Tensor], *, op: int) -> str:
    """The engine's code for sums and averages of these tensors between hosts; empty if there is none."""
    if isinstance(compression, ErrorFeedback):
        compression = compression.compression
    if op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        return ""
    if not all(tensor.dtype is torch.float32 and tensor.device.type == "cpu" for tensor in tensors):
        return ""
    return next((code for known, code in _CODES.items() if known is compression), "")


def described(compression: type[Compressor] | Compressor) -> str:
    """The compression as the user has written it, in words that are the same on all ranks."""
    if isinstance(compression, ErrorFeedback):
        return f"ErrorFeedback({described(compression.compression)})"
    if isinstance(compression, PowerSGD):
        return repr(compression).replace("PowerSGD(", "Compression.powersgd(")
    kind = compression if isinstance(compression, type) else type(compression)
    return next(
        (f"Compression.{name}" for name, known in vars(Compression).items() if known is kind), kind.__qualname__
    )


def keeps_losses(compression: type[Compressor] | Compressor) -> bool:
    """Return whether the optimizer adds what was lost in the next step."""
    return isinstance(compression, ErrorFeedback) or compression is Int8Compressor


_CODES: dict[type[Compressor], str] = {FP16Compressor: "fp16", BF16Compressor: "bf16", Int8Compressor: "int8"}
