"""The collectives of `hvd`: Horovod's signatures, each a thin front over one submission.

`x_async` returns a handle, `x` waits for it; a trailing underscore means in place; `grouped_x` takes a list
and is all or nothing. The out-of-place blocking ones are differentiable (`autograd`). The engine checks the
arguments. Sparse tensors are in `sparse`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from hora import engine
from hora.engine.request import Kind
from hora.torch import autograd
from hora.torch.compression import Compression
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Average, handle_average_backwards_compatibility
from hora.torch.submission import registered_id, start, synchronize

__all__ = [
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "reducescatter",
    "reducescatter_async",
]


def allreduce_async(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor over all ranks into a new one; returns a handle."""
    op = handle_average_backwards_compatibility(op, average)
    return _reduce([tensor], name, op, prescale_factor, postscale_factor, process_set)


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks into a new one. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    small, ctx = _compress(compression, tensor)
    reduced = autograd.allreduce(small, name, op, prescale_factor, postscale_factor, process_set)
    return compression.decompress(reduced, ctx)


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor in place; returns a handle."""
    op = handle_average_backwards_compatibility(op, average)
    return _reduce([tensor], name, op, prescale_factor, postscale_factor, process_set, in_place=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place."""
    op = handle_average_backwards_compatibility(op, average)
    return synchronize(
        _reduce(
            [tensor],
            name,
            op,
            prescale_factor,
            postscale_factor,
            process_set,
            in_place=True,
            background=False,
        )
    )


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors as one operation; returns a handle."""
    op = handle_average_backwards_compatibility(op, average)
    return _reduce(_group(tensors), name, op, prescale_factor, postscale_factor, process_set, grouped=True)


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation into new ones. Differentiable."""
    op = handle_average_backwards_compatibility(op, average)
    small, contexts = _compress_all(compression, tensors)
    reduced = autograd.grouped_allreduce(small, name, op, prescale_factor, postscale_factor, process_set)
    return _decompress_all(compression, reduced, contexts)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors in place as one operation; returns a handle."""
    op = handle_average_backwards_compatibility(op, average)
    group = _group(tensors)
    return _reduce(group, name, op, prescale_factor, postscale_factor, process_set, grouped=True, in_place=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> tuple[Tensor, ...]:
    """Reduce several tensors in place as one operation."""
    op = handle_average_backwards_compatibility(op, average)
    group = _group(tensors)
    return synchronize(
        _reduce(group, name, op, prescale_factor, postscale_factor, process_set, grouped=True, in_place=True)
    )


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start concatenating everybody's tensor on dimension 0; returns a handle."""
    return start(Kind.ALLGATHER, [tensor], name=name, process_set=process_set)


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate everybody's tensor on dimension 0, in rank order. Differentiable."""
    return autograd.allgather(tensor, name, process_set)


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start gathering several tensors as one operation; returns a handle."""
    return start(Kind.ALLGATHER, _group(tensors), grouped=True, name=name, process_set=process_set)


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> tuple[Tensor, ...]:
    """Gather several tensors as one operation. Differentiable."""
    return autograd.grouped_allgather(_group(tensors), name, process_set)


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start copying the root's tensor into a new one; returns a handle. The root is a global rank."""
    return start(Kind.BROADCAST, [tensor], name=name, root_rank=root_rank, process_set=process_set)


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """The root's tensor, as a new one. `root_rank` is always a global rank. Differentiable."""
    return autograd.broadcast(tensor, root_rank, name, process_set)


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start overwriting the tensor by the root's; returns a handle."""
    return start(Kind.BROADCAST, [tensor], in_place=True, name=name, root_rank=root_rank, process_set=process_set)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor by the root's."""
    return synchronize(broadcast_async_(tensor, root_rank, name, process_set))


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start sending `splits[r]` rows to each rank r; returns a handle for `(output, received_splits)`."""
    return start(Kind.ALLTOALL, [tensor], name=name, splits=splits, process_set=process_set)


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send `splits[r]` rows to rank r; gives `output, received_splits` if given splits. Differentiable."""
    output, received = autograd.alltoall(tensor, splits, name, process_set)
    return output if splits is None else (output, received)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing a tensor and keeping this rank's share of its rows; returns a handle."""
    return _reduce([tensor], name, op, prescale_factor, postscale_factor, process_set, kind=Kind.REDUCESCATTER)


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor and keep this rank's share of its rows. Differentiable."""
    small, ctx = _compress(compression, tensor)
    mine = autograd.reducescatter(small, name, op, process_set, prescale_factor, postscale_factor)
    return compression.decompress(mine, ctx)


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors as one operation; returns a handle."""
    group = _group(tensors)
    return _reduce(
        group, name, op, prescale_factor, postscale_factor, process_set, kind=Kind.REDUCESCATTER, grouped=True
    )


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reducescatter several tensors as one operation. Differentiable."""
    small, contexts = _compress_all(compression, tensors)
    mine = autograd.grouped_reducescatter(small, name, op, process_set, prescale_factor, postscale_factor)
    return _decompress_all(compression, mine, contexts)


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait for the others; returns the rank that joined last.

    `device` is accepted for Horovod's sake: the engine makes the joined ranks' zeros where they are needed.
    """
    last: int = engine.current_runtime().join()
    return last


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of the set is here."""
    runtime = engine.current_runtime()
    runtime.barrier(registered_id(process_set))


def _reduce(
    tensors: Sequence[Tensor],
    name: str | None,
    op: int,
    prescale: float,
    postscale: float,
    process_set: ProcessSet,
    kind: Kind = Kind.ALLREDUCE,
    in_place: bool = False,
    grouped: bool = False,
    background: bool = True,
) -> int:
    return start(
        kind,
        tensors,
        in_place=in_place,
        grouped=grouped,
        name=name,
        op=op,
        prescale=prescale,
        postscale=postscale,
        process_set=process_set,
        background=background,
    )


def _group(tensors: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not hasattr(tensors, "__iter__"):
        raise ValueError(f"a grouped collective needs a list of tensors, but got {_describe(tensors)}")
    group = list(tensors)
    if not group:
        raise ValueError("a grouped collective needs at least one tensor, but the list is empty")
    return group


def _compress(compression: Any, tensor: Tensor) -> tuple[Tensor, Any]:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a collective needs a torch.Tensor, but got {_describe(tensor)}")
    return compression.compress(tensor)


def _compress_all(compression: Any, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Any]]:
    pairs = [_compress(compression, tensor) for tensor in _group(tensors)]
    return [small for small, _ in pairs], [ctx for _, ctx in pairs]


def _decompress_all(compression: Any, tensors: Sequence[Tensor], contexts: list[Any]) -> list[Tensor]:
    return [compression.decompress(tensor, ctx) for tensor, ctx in zip(tensors, contexts, strict=True)]


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and layout {value.layout}"
    return f"{type(value).__name__}: {value!r:.100}"
