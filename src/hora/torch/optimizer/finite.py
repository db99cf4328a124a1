"""The check for gradients that are not finite (`HORA_NAN_CHECK=1`): on the rank where they arise, before they are
reduced.

After a reduction every rank has the same NaN, and nothing tells whose it was. The optimizer's hook calls this with
every gradient that is complete. A gradient in host memory is looked at there and then. To look at one on a GPU is to
wait for the GPU, so the optimizer holds those back until backward is over and has all of them looked at at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hora.telemetry.meters import meter
from hora.torch.norms import total_norm

__all__ = ["check_finite"]


def check_finite(gradients: Iterable[tuple[str, torch.Tensor | None]], rank: int) -> None:
    """FloatingPointError names the rank, a parameter and the step, if a gradient has a NaN or an infinity.

    Waits for a GPU once, however many gradients there are. They come with the names of their parameters.
    """
    found = {name: _values(gradient) for name, gradient in gradients if gradient is not None}
    found = {name: values for name, values in found.items() if values.numel()}
    # The largest magnitude of all: a NaN or an infinity anywhere is one here too, and nothing is added up that could
    # overflow.
    if not found or math.isfinite(total_norm(list(found.values()), math.inf).item()):
        return
    for name, values in found.items():
        num_nan, num_infinite = int(values.isnan().sum()), int(values.isinf().sum())
        if num_nan or num_infinite:
            text = (
                f"the gradient of {name} on rank {rank} has {num_nan} NaN and {num_infinite} infinite of "
                f"{values.numel()} values, in step {meter.num_steps + 1}; it was not reduced (HORA_NAN_CHECK=1)"
            )
            meter.event("nan", text)
            raise FloatingPointError(text)


def _values(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.detach()
    return gradient.coalesce().values() if gradient.is_sparse else gradient
