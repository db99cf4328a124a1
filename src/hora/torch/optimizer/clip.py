"""`clip_grad_norm_`: clip the reduced gradients by their global norm, whichever way the optimizer reduces them.

Called between `loss.backward()` and `optimizer.step()`, as one does without ranks. It waits for the reductions first,
so every rank sees the same norm; a sharded optimizer clips its slice by the norm of all slices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from hora.torch.norms import scale_all, total_norm
from hora.torch.optimizer.base import optimizers_of

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(
    parameters: torch.optim.Optimizer | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scale the gradients so that their total norm is at most `max_norm`; returns the norm before.

    `parameters` may be an optimizer. Gradients that a `DistributedOptimizer` has still to reduce are reduced first, and
    the following `step()` does not reduce them again. `foreach` is torch's, and decided here.
    """
    if isinstance(parameters, torch.optim.Optimizer):
        parameters = [p for group in parameters.param_groups for p in group["params"]]
    elif isinstance(parameters, torch.Tensor):
        parameters = [parameters]
    parameters = list(parameters)
    owners = optimizers_of(parameters)
    norm_type = float(norm_type)
    norms: list[torch.Tensor] = []
    plain = parameters
    scalers: list[Callable[[torch.Tensor], None]] = []
    for owner in owners:
        owner._prepare_to_clip()
        sharded = owner._shard_norm(parameters, norm_type)
        if sharded is not None:
            norms.append(sharded.norm)
            scalers.append(sharded.scale)
            plain = [p for p in plain if p not in sharded.parameters]
    gradients = [p.grad.detach() for p in plain if p.grad is not None]
    if gradients or not norms:
        norms.append(total_norm(gradients, norm_type))
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise RuntimeError(
            f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it cannot be "
            "clipped"
        )
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    scale_all(gradients, factor)
    for scale in scalers:
        scale(factor)
    return total
