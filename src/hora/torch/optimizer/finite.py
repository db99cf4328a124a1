"""The check for gradients that are not finite (`HORA_NAN_CHECK=1`): on the rank where they arise, before they are reduced.

After a reduction every rank has the same NaN, and nothing tells whose it was. The optimizer's hook calls this with every
gradient that is complete; on a GPU each call waits for the device, so it is for looking, not for every day.
"""

from __future__ import annotations

import torch

from hora.telemetry.meters import meter

__all__ = ["check_finite"]


def check_finite(parameter: torch.Tensor, name: str, rank: int) -> None:
    """FloatingPointError names the rank, the parameter and the step, if its gradient has a NaN or an infinity."""
    gradient = parameter.grad
    if gradient is None:
        return
    values = gradient.detach()
    values = values.coalesce().values() if values.is_sparse else values
    if bool(torch.isfinite(values).all()):
        return
    num_nan, num_infinite = int(values.isnan().sum()), int(values.isinf().sum())
    text = (
        f"the gradient of {name} on rank {rank} has {num_nan} NaN and {num_infinite} infinite of {values.numel()} values, "
        f"in step {meter.num_steps + 1}; it was not reduced (HORA_NAN_CHECK=1)"
    )
    meter.event("nan", text)
    raise FloatingPointError(text)
