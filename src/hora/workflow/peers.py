"""The workflow's view of the other ranks; everything is a no-op before `hvd.init()` or in a world of one."""

from __future__ import annotations

from typing import Any

import torch

import hora.torch as hvd
from hora.torch.elastic.loop import is_elastic as is_elastic


def rank() -> int:
    """Return this process's rank; 0 alone."""
    return hvd.rank() if hvd.is_initialized() else 0


def size() -> int:
    """Return the number of ranks; 1 alone."""
    return hvd.size() if hvd.is_initialized() else 1


def is_chief() -> bool:
    """Return whether this process prints, logs and writes files."""
    return rank() == 0


def distribute(optimizer: torch.optim.Optimizer, model: torch.nn.Module, accumulate: int) -> torch.optim.Optimizer:
    """Return an optimizer that averages gradients over the ranks; the same object if alone, or if it already does."""
    if hasattr(optimizer, "skip_synchronize"):
        passes = getattr(optimizer, "backward_passes_per_step", accumulate)
        if passes != accumulate:
            raise ValueError(
                f"the DistributedOptimizer was created with backward_passes_per_step={passes}, but the "
                f"recipe says accumulate={accumulate}; make them equal"
            )
        return optimizer
    if size() == 1 and not is_elastic():
        return optimizer
    known = getattr(optimizer, "_hora_distributed", None)  # a second fit must not hook the parameters twice
    if known is None or known.backward_passes_per_step != accumulate:
        known = hvd.DistributedOptimizer(
            optimizer, named_parameters=model.named_parameters(), backward_passes_per_step=accumulate
        )
        optimizer._hora_distributed = known  # type: ignore[attr-defined]
    return known


def broadcast_start(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Start all ranks from rank 0's weights, buffers and (if it has any) optimizer state."""
    if size() == 1:
        return
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if hvd.broadcast_object(len(optimizer.state) > 0, root_rank=0, name="hora.workflow.has_state"):
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)


def average_buffers(model: torch.nn.Module) -> None:
    """Average running statistics (batch norm) over the ranks, so that they validate and save one model."""
    if size() == 1:
        return
    floats = [buffer for buffer in model.buffers() if buffer.is_floating_point()]
    if floats:
        for buffer, mean in zip(floats, hvd.grouped_allreduce(floats, name="hora.workflow.buffers"), strict=True):
            buffer.copy_(mean)


def sum_floats(values: torch.Tensor) -> torch.Tensor:
    """Return the element-wise sum over the ranks, on the CPU, in float64."""
    mine = values.detach().to("cpu", torch.float64)
    return mine if size() == 1 else hvd.allreduce(mine, op=hvd.Sum, name="hora.workflow.history")


def gather(mine: Any) -> list[Any]:
    """Return every rank's object, in rank order."""
    return [mine] if size() == 1 else hvd.allgather_object(mine, name="hora.workflow.gather")


def broadcast_bytes(payload: bytes | None) -> bytes | None:
    """Return rank 0's bytes, or None if it has none."""
    return payload if size() == 1 else hvd.broadcast_object(payload, root_rank=0, name="hora.workflow.bytes")
