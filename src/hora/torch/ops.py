"""The collectives of `hvd` with Horovod's signatures, each a thin front over one `Collective`.

`x_async` submits and returns a handle; `x` runs and returns the result. A trailing underscore means in place.
`grouped_x` takes a list and is all or nothing. The blocking out-of-place functions are differentiable (`autograd`). The
engine validates the arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hora import engine
from hora.engine.request import Kind
from hora.torch.autograd import differentiable
from hora.torch.collective import (
    Collective,
    Tensors,
    repeat_allreduce,
    repeat_allreduce_,
    run,
    submit,
    submit_repeated_allreduce_,
    synchronize,
)
from hora.torch.compression import Compression, Compressor, NoneCompressor, PowerSGD, code_for
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id
from hora.torch.reduce_op import Average, handle_average_backwards_compatibility

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
    "sparse_allreduce_async",
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
    """Start reducing a tensor over all ranks into a new one; returns a handle.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    op = handle_average_backwards_compatibility(op, average)
    return submit(Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor), [tensor])


def allreduce(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor over all ranks into a new one. Differentiable.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    if average is not None:
        op = handle_average_backwards_compatibility(op, average)
    if compression is Compression.none:
        result = repeat_allreduce(tensor, name, op, prescale_factor, postscale_factor, process_set)
        if result is not None:
            return result
    op = handle_average_backwards_compatibility(op, None)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor)
    return _run_compressed(collective, [tensor], compression)[0]


def allreduce_async_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing a tensor in place; returns a handle.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    if average is None:
        handle = submit_repeated_allreduce_(tensor, name, op, prescale_factor, postscale_factor, process_set)
        if handle is not None:
            return handle
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor)
    return submit(collective, [tensor], in_place=True)


def allreduce_(
    tensor: Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensor:
    """Reduce a tensor in place.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    if average is None:
        result = repeat_allreduce_(tensor, name, op, prescale_factor, postscale_factor, process_set)
        if result is not None:
            return result
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor)
    return run(collective, [tensor], in_place=True)[0]


def grouped_allreduce_async(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors as one operation; returns a handle.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return submit(collective, _group(tensors))


def grouped_allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Tensor]:
    """Reduce several tensors as one operation into new ones. Differentiable.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return _run_compressed(collective, _group(tensors), compression)


def grouped_allreduce_async_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start reducing several tensors in place as one operation; returns a handle.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return submit(collective, _group(tensors), in_place=True)


def grouped_allreduce_(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Tensors:
    """Reduce several tensors in place as one operation.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return run(collective, _group(tensors), in_place=True)


def allgather_async(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> int:
    """Start concatenating the tensors of all ranks along dimension 0; returns a handle.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return submit(Collective(Kind.ALLGATHER, name, process_set), [tensor])


def allgather(tensor: Tensor, name: str | None = None, process_set: ProcessSet = global_process_set) -> Tensor:
    """Concatenate the tensors of all ranks along dimension 0, in rank order. Differentiable.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return differentiable(Collective(Kind.ALLGATHER, name, process_set), [tensor])[0]


def grouped_allgather_async(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start gathering several tensors as one operation; returns a handle.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return submit(Collective(Kind.ALLGATHER, name, process_set, grouped=True), _group(tensors))


def grouped_allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensors:
    """Gather several tensors as one operation. Differentiable.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return differentiable(Collective(Kind.ALLGATHER, name, process_set, grouped=True), _group(tensors))


def broadcast_async(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start copying the root's tensor into a new one; returns a handle.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        root_rank: The rank whose tensor everyone gets, counted in the whole world.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return submit(Collective(Kind.BROADCAST, name, process_set, root_rank=root_rank), [tensor])


def broadcast(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Return a copy of the root's tensor. Differentiable.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        root_rank: The rank whose tensor everyone gets, counted in the whole world.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return differentiable(Collective(Kind.BROADCAST, name, process_set, root_rank=root_rank), [tensor])[0]


def broadcast_async_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> int:
    """Start overwriting the tensor with the root's; returns a handle.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        root_rank: The rank whose value everyone gets.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return submit(Collective(Kind.BROADCAST, name, process_set, root_rank=root_rank), [tensor], in_place=True)


def broadcast_(
    tensor: Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Tensor:
    """Overwrite the tensor with the root's.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        root_rank: The rank whose value everyone gets.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return run(Collective(Kind.BROADCAST, name, process_set, root_rank=root_rank), [tensor], in_place=True)[0]


def alltoall_async(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> int:
    """Start sending rows to every rank.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        splits: How many rows of `tensor` go to each rank, by rank; by default the same number to all.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.

    Returns:
        A handle for `(output, received_splits)`.
    """
    return submit(Collective(Kind.ALLTOALL, name, process_set, splits=splits), [tensor])


def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Tensor | tuple[Tensor, Tensor]:
    """Send rows to every rank and return those that the ranks send here. Differentiable.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        splits: How many rows of `tensor` go to each rank, by rank; by default the same number to all.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.

    Returns:
        The received rows in rank order; with `splits` also how many came from each rank.
    """
    output, received = differentiable(Collective(Kind.ALLTOALL, name, process_set, splits=splits), [tensor])
    return output if splits is None else (output, received)


def reducescatter_async(
    tensor: Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start reducing a tensor and keep this rank's share of the rows; returns a handle.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
    """
    return submit(Collective(Kind.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor), [tensor])


def reducescatter(
    tensor: Tensor,
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Tensor:
    """Reduce a tensor and keep this rank's share of its rows. Differentiable.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
    """
    collective = Collective(Kind.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor)
    return _run_compressed(collective, [tensor], compression)[0]


def grouped_reducescatter_async(
    tensors: Sequence[Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> int:
    """Start a reducescatter of several tensors as one operation; returns a handle.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
    """
    collective = Collective(Kind.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return submit(collective, _group(tensors))


def grouped_reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Tensor]:
    """Reducescatter several tensors as one operation. Differentiable.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
    """
    collective = Collective(Kind.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return _run_compressed(collective, _group(tensors), compression)


def join(device: int = -1) -> int:
    """Announce that this rank has no more data and wait for the others; returns the rank that joined last.

    `device` is ignored; it exists for compatibility. The engine creates the joined ranks' zeros where they are needed.

    Args:
        device: Accepted for Horovod's sake; not used.
    """
    return engine.current_runtime().join()


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of the set reaches the barrier.

    Args:
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    engine.current_runtime().barrier(registered_id(process_set))


def _run_compressed(
    collective: Collective, tensors: Sequence[Tensor], compression: type[Compressor] | Compressor
) -> list[Tensor]:
    """Compress the tensors, run a differentiable collective on them, and decompress the results."""
    if compression is PowerSGD or isinstance(compression, PowerSGD):
        raise ValueError("Compression.powersgd needs state from earlier steps: pass it to DistributedOptimizer")
    if compression is not NoneCompressor and collective.kind is Kind.ALLREDUCE:
        code = code_for(compression, [_check_tensor(tensor) for tensor in tensors], op=collective.op)
        if code and engine.current_runtime().spans_hosts(registered_id(collective.process_set)):
            return list(differentiable(collective._replace(code=code), tensors))
    pairs = [compression.compress(_check_tensor(tensor)) for tensor in tensors]
    results = differentiable(collective, [small for small, _ in pairs])
    return [compression.decompress(result, ctx) for result, (_, ctx) in zip(results, pairs, strict=True)]


def _group(tensors: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(tensors, Tensor) or not hasattr(tensors, "__iter__"):
        raise ValueError(f"a grouped collective needs a list of tensors, but got {_describe(tensors)}")
    group = list(tensors)
    if not group:
        raise ValueError("a grouped collective needs at least one tensor, but the list is empty")
    return group


def _check_tensor(tensor: Tensor) -> Tensor:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"a collective needs a torch.Tensor, but got {_describe(tensor)}")
    return tensor


def _describe(value: object) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)} and layout {value.layout}"
    return f"{type(value).__name__}: {value!r:.100}"


def sparse_allreduce_async(
    tensor: Tensor, name: str | None, op: int | None, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start summing (op Average: averaging) sparse tensors; returns a function that waits for the sparse result.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
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
