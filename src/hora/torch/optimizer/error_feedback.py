"""Error feedback: what a cast to a shorter dtype loses in one step is added to the gradient of the next.

`compression=ErrorFeedback(Compression.bf16)`. The remainders live in the optimizer's buckets, in the parameters' dtype,
on each rank; outside the optimizer it behaves as the compressor inside it.
"""

from __future__ import annotations

from typing import Any

import torch

from hora.torch.compression import BF16Compressor, Compressor, FP16Compressor

__all__ = ["ErrorFeedback", "wire_dtype"]


class ErrorFeedback(Compressor):
    """A casting compressor whose rounding errors are carried over to the next step."""

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
