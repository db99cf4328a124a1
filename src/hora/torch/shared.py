"""Tensors in memory that all ranks of a host map: `allreduce_` reduces them where they are, without copies.

They are ordinary tensors otherwise: each rank sees and changes its own. Where the ranks share no memory (one rank, several
hosts, too little of it) they are ordinary in this respect too. A forked process, as a DataLoader's worker, has a copy; a
pickled tensor is a private one, and so is every one of them after the ranks have left the world in which it was made.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterable, Iterator, Sequence
from math import prod

import torch

from hora import engine
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id

__all__ = ["shared_empty", "shared_gradients", "shared_like"]


def shared_empty(
    shape: int | Sequence[int], dtype: torch.dtype | None = None, *, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """A new tensor on the CPU, in memory that all ranks of the set map. All of them call this, with the same arguments."""
    try:
        sizes = [operator.index(size) for size in ([shape] if isinstance(shape, int) else shape)]
    except TypeError:
        raise ValueError(f"the shape must be a whole number or several of them, but it is {shape!r:.100}") from None
    if any(size < 0 for size in sizes):
        raise ValueError(f"no dimension may be negative, but the shape is {sizes}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"dtype must be a torch.dtype, but it is {type(dtype).__name__}: {dtype!r:.100}")
    runtime, set_id = engine.current_runtime(), registered_id(process_set)
    num_bytes = prod(sizes) * dtype.itemsize
    memory = runtime.registered_memory(set_id, num_bytes) if num_bytes else None
    if memory is None:
        return torch.empty(sizes, dtype=dtype, device="cpu")
    return memory.view(dtype).view(sizes)


def shared_like(tensor: torch.Tensor, *, process_set: ProcessSet = global_process_set) -> torch.Tensor:
    """A copy of this rank's tensor in memory that all ranks of the set map: the same shape, dtype and values."""
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"shared_like takes a torch.Tensor, but it was given {type(tensor).__name__}")
    result = shared_empty(tuple(tensor.shape), tensor.dtype, process_set=process_set)
    return result.copy_(tensor.detach())


@contextlib.contextmanager
def shared_gradients(
    model: torch.nn.Module | Iterable[torch.Tensor], *, process_set: ProcessSet = global_process_set
) -> Iterator[list[torch.Tensor]]:
    """Inside, the gradients of a model's parameters lie in memory that all ranks of the set map.

    Gives flat tensors that hold all of them, one for each dtype: `hvd.allreduce_(flat)` reduces every gradient at once. All
    ranks enter it, with the same parameters. Afterwards gradients are private again.
    """
    source = model.parameters() if isinstance(model, torch.nn.Module) else model
    parameters = [parameter for parameter in source if parameter.requires_grad]
    if any(parameter.device.type != "cpu" for parameter in parameters):
        raise ValueError("shared_gradients takes parameters on the CPU; gradients on a GPU lie in its own memory")
    flats: list[torch.Tensor] = []
    views: dict[int, torch.Tensor] = {}
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        members = [parameter for parameter in parameters if parameter.dtype is dtype]
        flat = shared_empty(sum(parameter.numel() for parameter in members), dtype, process_set=process_set).zero_()
        flats.append(flat)
        parts = flat.split([parameter.numel() for parameter in members])
        views |= {id(p): part.view(p.shape) for p, part in zip(members, parts, strict=True)}

    def take_in(parameter: torch.Tensor) -> None:
        view, gradient = views[id(parameter)], parameter.grad
        if gradient is not None and gradient is not view:
            parameter.grad = view.copy_(gradient.detach())

    hooks = []
    for parameter in parameters:
        take_in(parameter)
        if parameter.grad is None:
            parameter.grad = views[id(parameter)]
        hooks.append(parameter.register_post_accumulate_grad_hook(take_in))
    try:
        yield flats
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in parameters:
            if parameter.grad is views[id(parameter)]:
                parameter.grad = views[id(parameter)].clone()
