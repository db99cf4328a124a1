"""The collectives of `horovod.tensorflow`: Horovod's signatures over the torch ones, with gradients.

Each works eagerly and inside a `tf.function`, where it is one operation (`bridge.call`). Gradients are made of the same
functions, so they have gradients themselves. Sparse `IndexedSlices` are gathered.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch

import hora.torch as hvd
from hora import engine
from hora.tensorflow.bridge import as_tensor, call, recording
from hora.tensorflow.compression import Compression, Compressor
from hora.torch.functions import broadcast_tensors
from hora.torch.process_sets import ProcessSet, global_process_set
from hora.torch.reduce_op import Average, Sum, handle_average_backwards_compatibility

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "function_name",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "size_op",
]

Gradient = Callable[..., Sequence[Any]]


def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Reduce a tensor over all ranks. `IndexedSlices` (Sum or Average) are concatenated."""
    op = handle_average_backwards_compatibility(op, average)
    if isinstance(tensor, tf.IndexedSlices):
        if op not in (Sum, Average) or (prescale_factor, postscale_factor) != (1.0, 1.0):
            raise NotImplementedError(
                "an allreduce of IndexedSlices knows Sum and Average without scale factors; pass "
                "sparse_as_dense=True, or tf.convert_to_tensor(slices), for everything else"
            )
        return _sparse_allreduce(tensor, op, name, process_set, ignore_name_scope)
    tensor = as_tensor(tensor)
    name = _full_name(name, "HorovodAllreduce", tensor, ignore_name_scope)
    return _reduce([tensor], hvd.allreduce, op, compression, prescale_factor, postscale_factor, name, process_set)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Reduce several tensors as one operation; `IndexedSlices` among them one by one."""
    if not tensors:
        return list(tensors)
    op = handle_average_backwards_compatibility(op, average)
    outputs = list(tensors)
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    for i in sorted(set(range(len(outputs))) - set(dense)):
        part = None if name is None else f"{name}_{i}"
        outputs[i] = allreduce(
            tensors[i],
            op=op,
            prescale_factor=prescale_factor,
            postscale_factor=postscale_factor,
            name=part,
            process_set=process_set,
            ignore_name_scope=ignore_name_scope,
        )
    if dense:
        group = [as_tensor(tensors[i]) for i in dense]
        name = _full_name(name, "HorovodGroupedAllreduce", group[0], ignore_name_scope)
        reduced = _reduce(
            group, hvd.grouped_allreduce, op, compression, prescale_factor, postscale_factor, name, process_set
        )
        for i, tensor in zip(dense, reduced, strict=True):
            outputs[i] = tensor
    return outputs


def _reduce(
    tensors: Sequence[Any],
    collective: Callable[..., Any],
    op: int,
    compression: type[Compressor] | Compressor,
    prescale: float,
    postscale: float,
    name: str | None,
    process_set: ProcessSet,
) -> list[Any]:
    """Run an allreduce or a reducescatter of the torch front, grouped or not, on the compressed tensors."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    scales = {"op": op, "prescale_factor": prescale, "postscale_factor": postscale, "process_set": process_set}
    grouped = collective in (hvd.grouped_allreduce, hvd.grouped_reducescatter)
    scattered = collective in (hvd.reducescatter, hvd.grouped_reducescatter)

    def work(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        if grouped:
            return collective(list(arrays), name=name, **scales)
        return [collective(arrays[0], name=name, **scales)]

    def gradient(*upstream: Any) -> Sequence[Any]:
        if not scattered:
            none = Compression.none
            return _reduce(upstream, collective, op, none, prescale, postscale, _gradient_name(name), process_set)
        factor = prescale * postscale
        members = tf.cast(_members(process_set), upstream[0].dtype) if op == Sum else 1
        return grouped_allgather(
            [grad * factor * members for grad in upstream], _gradient_name(name), True, process_set
        )

    shapes = [_any_rows(tensor) if scattered else tensor.shape for tensor in small]
    outputs = _collective(work, small, [tensor.dtype for tensor in small], shapes, gradient)
    return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]


def _sparse_allreduce(
    slices: Any, op: int, name: str | None, process_set: ProcessSet, ignore_name_scope: bool
) -> tf.IndexedSlices:
    values, indices = (
        allgather(part, None if name is None else f"{name}_{what}", ignore_name_scope, process_set)
        for part, what in ((slices.values, "values"), (slices.indices, "indices"))
    )
    if op == Average:
        members = tf.cast(_members(process_set), values.dtype)
        values = values / members if values.dtype.is_floating else values // members
    return tf.IndexedSlices(values, indices, dense_shape=slices.dense_shape)


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the tensors of all ranks on dimension 0, in rank order; their first dimensions may differ."""
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors as one operation."""
    if not tensors:
        return list(tensors)
    tensors = [as_tensor(tensor, moved=True) for tensor in tensors]
    name = _full_name(name, "HorovodAllgather", tensors[0], ignore_name_scope)

    def work(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        if len(arrays) == 1:
            return [hvd.allgather(arrays[0], name=name, process_set=process_set)]
        return hvd.grouped_allgather(list(arrays), name=name, process_set=process_set)

    def gradient(*upstream: Any) -> Sequence[Any]:
        averages = grouped_allreduce(
            list(upstream), op=Average, name=_gradient_name(name), process_set=process_set, ignore_name_scope=True
        )
        mine = [tf.shape(tensor)[0] for tensor in tensors]
        counts = allgather(tf.stack(mine)[tf.newaxis], _gradient_name(name, "rows"), True, process_set)
        starts = tf.reduce_sum(counts[: _member(process_set)], axis=0)
        return [total[starts[i] : starts[i] + mine[i]] for i, total in enumerate(averages)]

    shapes = [_any_rows(tensor) for tensor in tensors]
    return _collective(work, tensors, [tensor.dtype for tensor in tensors], shapes, gradient)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor; `root_rank` is a global rank."""
    tensor = as_tensor(tensor, moved=True)
    name = _full_name(name, "HorovodBroadcast", tensor, ignore_name_scope)

    def work(array: torch.Tensor) -> Sequence[torch.Tensor]:
        return [hvd.broadcast(array, root_rank, name=name, process_set=process_set)]

    def gradient(upstream: Any) -> Sequence[Any]:
        average = allreduce(
            upstream, op=Average, name=_gradient_name(name), process_set=process_set, ignore_name_scope=True
        )
        return [tf.where(tf.equal(rank_op(), root_rank), average, tf.zeros_like(average))]

    return _collective(work, [tensor], [tensor.dtype], [tensor.shape], gradient)[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Assign the root's values to the variables, as one operation, and return them."""
    variables = list(variables)
    tensors = [as_tensor(variable, moved=True) for variable in variables]

    def work(*arrays: torch.Tensor) -> Sequence[torch.Tensor]:
        return broadcast_tensors(arrays, root_rank, name, process_set)

    outputs = call(work, tensors, [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors])
    for variable, value in zip(variables, outputs, strict=True):
        variable.assign(value)
    return variables


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows to rank r, equally many without; with splits gives `(output, received_splits)`."""
    tensor = as_tensor(tensor, moved=True)
    name = _full_name(name, "HorovodAlltoall", tensor, ignore_name_scope)
    given = [] if splits is None else [tf.cast(splits, tf.int32)]
    received: list[Any] = []

    def work(array: torch.Tensor, *parts: torch.Tensor) -> Sequence[torch.Tensor]:
        if not parts:
            members = process_set.size() or 1
            if array.dim() == 0 or len(array) % members:
                raise ValueError(
                    f"alltoall without splits needs a first dimension that is a multiple of the {members} members, but "
                    f"the shape is {tuple(array.shape)} on rank {hvd.rank()}"
                )
            parts = (torch.full((members,), len(array) // members, dtype=torch.int32, device="cpu"),)
        return tuple(hvd.alltoall(array, splits=parts[0], name=name, process_set=process_set))

    def gradient(upstream: Any, _: Any = None) -> Sequence[Any]:
        back, _ = alltoall(upstream, received[0], _gradient_name(name), True, process_set)
        # Rows beyond the sum of the splits were not sent, so nothing depends on them.
        unsent = tf.shape(tensor)[0] - tf.shape(back)[0]
        padding = tf.concat([[[0, unsent]], tf.zeros([tf.rank(back) - 1, 2], tf.int32)], axis=0)
        return [tf.pad(back, padding), *[None for _ in given]]

    outputs = _collective(
        work, [tensor, *given], [tensor.dtype, tf.int32], [_any_rows(tensor), [None]], gradient, kept=received
    )
    return outputs[0] if splits is None else (outputs[0], outputs[1])


def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Reduce a tensor and keep this rank's share of its rows; earlier ranks get the larger shares."""
    tensor = as_tensor(tensor)
    name = _full_name(name, "HorovodReducescatter", tensor, ignore_name_scope)
    scales = (prescale_factor, postscale_factor)
    return _reduce([tensor], hvd.reducescatter, op, compression, *scales, name, process_set)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reducescatter several tensors as one operation."""
    if not tensors:
        return list(tensors)
    tensors = [as_tensor(tensor) for tensor in tensors]
    name = _full_name(None, "HorovodGroupedReducescatter", tensors[0], False)
    scales = (prescale_factor, postscale_factor)
    return _reduce(tensors, hvd.grouped_reducescatter, op, compression, *scales, name, process_set)


def join() -> Any:
    """Say that this rank has no more data and wait for the others; the rank that joined last, as int32."""
    return _number(lambda: hvd.join())


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until every member of the set is here."""

    def wait() -> int:
        hvd.barrier(process_set=process_set)
        return 0

    _number(wait)


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of members of a process set when the operation runs, as int32."""
    return _number(lambda: len(_ranks(process_set_id)))


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is a member of the set when the operation runs, else 0, as int32."""
    return _number(lambda: int(hvd.rank() in _ranks(process_set_id)))


def local_size_op(name: str | None = None) -> Any:
    """Return the number of processes on this host when the operation runs, as int32."""
    return _number(hvd.local_size)


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank when the operation runs, as int32."""
    return _number(hvd.rank)


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's number on its host when the operation runs, as int32."""
    return _number(hvd.local_rank)


def _ranks(process_set_id: int) -> list[int]:
    known = engine.current_runtime().process_sets()
    if process_set_id not in known:
        raise ValueError(f"there is no process set {process_set_id} on rank {hvd.rank()}; there are {sorted(known)}")
    return list(known[process_set_id])


def _members(process_set: ProcessSet) -> Any:
    return _number(lambda: process_set.size() or 1)


def _member(process_set: ProcessSet) -> Any:
    return _number(lambda: process_set.rank() or 0)


def _number(question: Callable[[], int]) -> Any:
    return call(lambda: [torch.tensor(question(), dtype=torch.int32, device="cpu")], [], [tf.int32], [[]])[0]


def _collective(
    work: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    gradient: Gradient,
    kept: list[Any] | None = None,
) -> list[Any]:
    """Run a collective, with its gradient where one may be taken. `kept`: filled with the outputs after the first."""

    def forward(*inputs: Any) -> tuple[Any, Gradient]:
        outputs = call(work, inputs, dtypes, shapes)
        if kept is not None:
            kept[:] = outputs[1:]
        return outputs, gradient

    if tf.executing_eagerly() and not recording():
        outputs, _ = forward(*tensors)
        return list(outputs)
    return list(tf.custom_gradient(forward)(*tensors))


def _any_rows(tensor: Any) -> Any:
    """Return the tensor's shape with its first dimension unknown."""
    if tensor.shape.rank is None:
        return None
    return [None, *tensor.shape[1:]]


def _full_name(name: str | None, kind: str, tensor: Any, ignore_name_scope: bool) -> str | None:
    """Return the name by which ranks recognise the operation; None in eager mode without one: they are numbered there.

    In a function it is derived from what is equal on all ranks: the function's own name and the tensor's in it.
    """
    if name is None:
        if tf.executing_eagerly():
            return None
        return _safe(f"{kind}_{function_name(tensor)}_{tensor.name}")
    if not isinstance(name, str):
        raise ValueError(f"the name of a collective must be a string, but it is {type(name).__name__}: {name!r}")
    scope = "" if ignore_name_scope else tf.get_current_name_scope()
    return _safe(f"{scope}/{name}" if scope else name)


def function_name(tensor: Any) -> str:
    """Return the name of the function that a tensor is part of, without what may differ between ranks."""
    return re.sub(r"_\d+$", "", str(getattr(tensor.graph, "name", "")))


def _gradient_name(name: str | None, what: str = "gradient") -> str | None:
    return None if name is None else f"{name}_{what}"


def _safe(name: str) -> str:
    return re.sub(r"[^a-zA-Z0-9_/.]", "_", name)
