"""Allreduce of sparse tensors: indices and values are gathered; duplicates add up on coalescing."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hora.engine.request import Kind
from hora.torch.collective import Collective, submit, synchronize
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Average

__all__ = ["sparse_allreduce_async"]


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start adding up (op Average: averaging) sparse tensors; call what it returns for the sparse result."""
    what = tensor.layout if isinstance(tensor, Tensor) else type(tensor).__name__
    if not isinstance(tensor, Tensor) or tensor.layout is not torch.sparse_coo:
        raise ValueError(f"sparse_allreduce_async needs a sparse COO tensor, but got {what}")
    indices, values = tensor._indices().t(), tensor._values()
    handles = [
        submit(Collective(Kind.ALLGATHER, None if name is None else f"{name}.{what}", process_set), [part])
        for part, what in ((indices, "indices"), (values, "values"))
    ]

    def finish() -> Tensor:
        all_indices, all_values = [synchronize(handle) for handle in handles]
        if op is None or op == Average:
            rounding = None if all_values.is_floating_point() else "trunc"
            all_values = torch.div(all_values, process_set.size() or 1, rounding_mode=rounding)
        return torch.sparse_coo_tensor(all_indices.t(), all_values, tensor.shape, check_invariants=False)

    return finish
