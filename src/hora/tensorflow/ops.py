"""The collectives of `horovod.tensorflow`: Horovod's signatures, implemented by the torch ones, with gradients.

Each works eagerly and in graphs of functions and sessions, where it is one operation (`bridge.carry_out`). Gradients
use the same functions, so they are differentiable themselves. Sparse `IndexedSlices` are gathered.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
import torch

import hora.torch as hvd
from hora import engine
from hora.engine.request import Kind
from hora.tensorflow.bridge import as_tensor, call, carry_out, own_errors, recording
from hora.tensorflow.compression import Compression, Compressor
from hora.torch.collective import Collective
from hora.torch.functions import broadcast_tensors
from hora.torch.process_sets import ProcessSet, global_process_set, registered_id
from hora.torch.reduce_op import Average, Product, Sum, handle_average_backwards_compatibility

__all__ = [
    "allgather",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
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
_SHORT = (tf.uint8, tf.int8, tf.int16)


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
    """Reduce a tensor over all ranks. `IndexedSlices` (Sum or Average) are concatenated.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        device_sparse: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
    """
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor)
    return _allreduce(collective, [tensor], compression, ignore_name_scope)[0]


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
    """Reduce several tensors as one operation; `IndexedSlices` among them are gathered together.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        average: Deprecated, as in Horovod: `True` means `op=hvd.Average`, `False` means `op=hvd.Sum`.
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        device_sparse: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    if not tensors:
        return list(tensors)
    op = handle_average_backwards_compatibility(op, average)
    collective = Collective(Kind.ALLREDUCE, name, process_set, op, prescale_factor, postscale_factor, grouped=True)
    return _allreduce(collective, tensors, compression, ignore_name_scope)


def _allreduce(
    collective: Collective, tensors: Sequence[Any], compression: type[Compressor] | Compressor, ignore_name_scope: bool
) -> list[Any]:
    """Reduce the dense tensors, and gather the `IndexedSlices`, together each."""
    sparse = [i for i, tensor in enumerate(tensors) if isinstance(tensor, tf.IndexedSlices)]
    dense = [i for i, tensor in enumerate(tensors) if not isinstance(tensor, tf.IndexedSlices)]
    outputs: list[Any] = []
    if sparse:
        outputs += _sparse_allreduce(collective, [tensors[i] for i in sparse], ignore_name_scope)
    if dense:
        collective = collective._replace(name=_checked(collective.name, ignore_name_scope))
        outputs += _reduce(collective, [as_tensor(tensors[i]) for i in dense], compression, ignore_name_scope)
    places = dict(zip([*sparse, *dense], outputs, strict=True))
    return [places[i] for i in range(len(tensors))]


def _reduce(
    collective: Collective,
    tensors: Sequence[Any],
    compression: type[Compressor] | Compressor,
    ignore_name_scope: bool,
) -> list[Any]:
    """Run an allreduce or a reducescatter, grouped or not, on the compressed tensors."""
    if collective.op in (Average, Product) and any(tensor.dtype in _SHORT for tensor in tensors):
        # A sum or a product of short integers would leave their range before it is divided.
        longer = [tf.cast(tensor, tf.int32) if tensor.dtype in _SHORT else tensor for tensor in tensors]
        outputs = _reduce(collective, longer, compression, ignore_name_scope)
        return [tf.cast(output, tensor.dtype) for output, tensor in zip(outputs, tensors, strict=True)]
    pairs = [compression.compress(tensor) for tensor in tensors]
    small = [tensor for tensor, _ in pairs]
    scattered = collective.kind is Kind.REDUCESCATTER

    def gradient(*upstream: Any) -> Sequence[Any]:
        grads = _alike(upstream, small)
        name = _gradient_name(collective.name)
        if not scattered:
            return _reduce(collective._replace(name=name), grads, Compression.none, True)
        factor = collective.prescale * collective.postscale
        members = _members(collective.process_set) if collective.op == Sum else tf.ones([], tf.int32)
        scaled = [grad * tf.cast(factor, grad.dtype) * tf.cast(members, grad.dtype) for grad in grads]
        return grouped_allgather(scaled, name, True, collective.process_set)

    shapes = [_any_rows(tensor) if scattered else tensor.shape for tensor in small]
    outputs = _collective(collective, small, shapes, gradient, ignore_name_scope)
    return [compression.decompress(output, ctx) for output, (_, ctx) in zip(outputs, pairs, strict=True)]


def _sparse_allreduce(collective: Collective, slices: Sequence[Any], ignore_name_scope: bool) -> list[tf.IndexedSlices]:
    """Gather the values of all slices, and their indices, each as one operation."""
    _, name, process_set, op, *scales = collective[:6]
    if op not in (Sum, Average) or scales != [1.0, 1.0]:
        raise NotImplementedError(
            "allreduce of IndexedSlices supports Sum and Average without scale factors; pass sparse_as_dense=True, or "
            "tf.convert_to_tensor(slices), for everything else"
        )
    values, indices = (
        grouped_allgather(parts, None if name is None else f"{name}_{what}", ignore_name_scope, process_set)
        for parts, what in (([s.values for s in slices], "values"), ([s.indices for s in slices], "indices"))
    )
    if op == Average:
        values = [_divided(value, process_set) for value in values]
    return [
        tf.IndexedSlices(value, index, dense_shape=part.dense_shape)
        for value, index, part in zip(values, indices, slices, strict=True)
    ]


def _alike(gradients: Sequence[Any], tensors: Sequence[Any]) -> list[Any]:
    """Return dense gradients in the dtypes of these tensors: TensorFlow creates zeros of another one."""
    return [tf.cast(as_tensor(gradient), tensor.dtype) for gradient, tensor in zip(gradients, tensors, strict=True)]


def _divided(value: Any, process_set: ProcessSet) -> Any:
    """Return the quotient; of integers a floating-point number, as TensorFlow divides."""
    return value / tf.cast(_members(process_set), value.dtype)


def allgather(
    tensor: Any, name: str | None = None, ignore_name_scope: bool = False, process_set: ProcessSet = global_process_set
) -> Any:
    """Concatenate the tensors of all ranks along dimension 0, in rank order; their first dimensions may differ.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    return grouped_allgather([tensor], name, ignore_name_scope, process_set)[0]


def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors as one operation.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    if not tensors:
        return list(tensors)
    tensors = [as_tensor(tensor, moved=True) for tensor in tensors]
    collective = Collective(Kind.ALLGATHER, _checked(name, ignore_name_scope), process_set, grouped=len(tensors) > 1)

    def gradient(*upstream: Any) -> Sequence[Any]:
        averages = grouped_allreduce(
            _alike(upstream, tensors),
            op=Average,
            name=_gradient_name(collective.name),
            process_set=process_set,
            ignore_name_scope=True,
        )
        mine = [tf.shape(tensor)[0] for tensor in tensors]
        rows = _gradient_name(collective.name, "rows")
        counts = allgather(tf.stack(mine)[tf.newaxis], rows, True, process_set)
        before = _number(lambda: process_set.rank() or 0, "HorovodRank")
        starts = tf.reduce_sum(counts[:before], axis=0)
        return [total[starts[i] : starts[i] + mine[i]] for i, total in enumerate(averages)]

    return _collective(collective, tensors, [_any_rows(tensor) for tensor in tensors], gradient, ignore_name_scope)


def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return the root's tensor; `root_rank` is a global rank.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    tensor = as_tensor(tensor, moved=True)
    name = _checked(name, ignore_name_scope)
    collective = Collective(Kind.BROADCAST, name, process_set, root_rank=root_rank)

    def gradient(upstream: Any) -> Sequence[Any]:
        average = allreduce(
            as_tensor(upstream), op=Average, name=_gradient_name(name), process_set=process_set, ignore_name_scope=True
        )
        return [tf.where(tf.equal(rank_op(), root_rank), average, tf.zeros_like(average))]

    return _collective(collective, [tensor], [tensor.shape], gradient, ignore_name_scope)[0]


def broadcast_(
    variables: Sequence[Any], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Assign the root's values to the variables as one operation and return them; in a graph, their new values.

    Args:
        variables: The variables to be overwritten with the root's values.
        root_rank: The rank whose value everyone gets.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    variables = list(variables)
    tensors = [as_tensor(variable, moved=True) for variable in variables]

    in_graph = not tf.executing_eagerly()

    def work(unique: str, *arrays: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        return lambda: broadcast_tensors(arrays, root_rank, unique if in_graph else name, process_set)

    dtypes, shapes = [tensor.dtype for tensor in tensors], [tensor.shape for tensor in tensors]
    outputs = call(work, tensors, dtypes, shapes, name=_safe(name or "HorovodBroadcast"))
    assigned = [variable.assign(value) for variable, value in zip(variables, outputs, strict=True)]
    return assigned if in_graph else variables


def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send `splits[r]` rows to rank r, equally many by default; with splits returns `(output, received_splits)`.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """
    tensor = as_tensor(tensor, moved=True)
    name = _checked(name, ignore_name_scope)
    given = [] if splits is None else [tf.cast(splits, tf.int32)]
    received: list[Any] = []

    def gradient(upstream: Any, _: Any = None) -> Sequence[Any]:
        back, _ = alltoall(as_tensor(upstream), received[0], _gradient_name(name), True, process_set)
        # Rows beyond the sum of the splits were not sent; their gradient is zero.
        unsent = tf.shape(tensor)[0] - tf.shape(back)[0]
        padding = tf.concat([[[0, unsent]], tf.zeros([tf.rank(back) - 1, 2], tf.int32)], axis=0)
        return [tf.pad(back, padding), *[None for _ in given]]

    outputs = _collective(
        Collective(Kind.ALLTOALL, name, process_set),
        [tensor, *given],
        [_any_rows(tensor), [None]],
        gradient,
        ignore_name_scope,
        dtypes=[tensor.dtype, tf.int32],
        kept=received,
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
    """Reduce a tensor and keep this rank's share of the rows; lower ranks get the larger shares.

    Args:
        tensor: The tensor. Its shape and type must be the same on all ranks; in an allgather or alltoall the first
            dimension may differ.
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        ignore_name_scope: Do not put TensorFlow's name scope before the operation's name.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
    """
    name = _checked(name, ignore_name_scope)
    collective = Collective(Kind.REDUCESCATTER, name, process_set, op, prescale_factor, postscale_factor)
    return _reduce(collective, [as_tensor(tensor)], compression, ignore_name_scope)[0]


def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: type[Compressor] | Compressor = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reducescatter several tensors as one operation.

    Args:
        tensors: A list of tensors that travel as one operation: all or none of them.
        device_dense: Accepted for Horovod's sake; the operation runs where its input is.
        compression: `hvd.Compression.none`, `.fp16`, `.bf16` or `.int8`: the format in which values travel.
        op: `hvd.Average` (the default), `hvd.Sum`, `hvd.Min`, `hvd.Max`, `hvd.Product` or `hvd.Adasum`.
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
        prescale_factor: Multiply the input by this before it is reduced.
        postscale_factor: Multiply the result by this.
    """
    if not tensors:
        return list(tensors)
    scales = (prescale_factor, postscale_factor)
    collective = Collective(Kind.REDUCESCATTER, None, process_set, op, *scales, grouped=True)
    return _reduce(collective, [as_tensor(tensor) for tensor in tensors], compression, False)


def join() -> Any:
    """Announce that this rank has no more data and wait for the others; returns the last rank to join, as int32."""
    return _number(lambda: hvd.join(), "HorovodJoin", waits=True)


def barrier(process_set: ProcessSet = global_process_set) -> Any:
    """Wait until every member of the set reaches the barrier. In a graph, returns the operation that does so.

    Args:
        process_set: A `hvd.ProcessSet`: the ranks concerned; all ranks where it is not given. Other ranks must not
            call.
    """

    def wait() -> int:
        hvd.barrier(process_set=process_set)
        return 0

    done = _number(wait, "HorovodBarrier", waits=True)
    return None if tf.executing_eagerly() else done.op


def size_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return the number of members of a process set when the operation runs, as int32.

    Args:
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    _check_in_graph(process_set_id)
    return _number(lambda: len(_ranks(process_set_id)), name or "HorovodSize")


def process_set_included_op(process_set_id: int = 0, name: str | None = None) -> Any:
    """Return 1 if this process is a member of the set when the operation runs, else 0, as int32.

    Args:
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    _check_in_graph(process_set_id)
    return _number(lambda: int(hvd.rank() in _ranks(process_set_id)), name or "HorovodProcessSetIncluded")


def local_size_op(name: str | None = None) -> Any:
    """Return the number of processes on this host when the operation runs, as int32.

    Args:
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    return _number(hvd.local_size, name or "HorovodLocalSize")


def rank_op(name: str | None = None) -> Any:
    """Return this process's rank when the operation runs, as int32.

    Args:
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    return _number(hvd.rank, name or "HorovodRank")


def local_rank_op(name: str | None = None) -> Any:
    """Return this process's rank on its host when the operation runs, as int32.

    Args:
        name: Names the operation in timelines and messages. Ranks match operations by name, or by the order of unnamed
            ones.
    """
    return _number(hvd.local_rank, name or "HorovodLocalRank")


def _check_in_graph(process_set: ProcessSet | int) -> None:
    """Raise ValueError for an unknown set when a graph is built; when it runs, it would be an error of TensorFlow."""
    if not tf.executing_eagerly() and hvd.is_initialized():
        with own_errors():
            _ranks(process_set if isinstance(process_set, int) else registered_id(process_set))


def _ranks(process_set_id: int) -> list[int]:
    known = engine.current_runtime().sets.process_sets()
    if process_set_id not in known:
        raise ValueError(
            f"Process set {process_set_id} does not exist or has not been registered on rank {hvd.rank()}, which knows "
            f"{sorted(known)}"
        )
    return list(known[process_set_id])


def _members(process_set: ProcessSet) -> Any:
    return _number(lambda: process_set.size() or 1, "HorovodSize")


def _number(question: Callable[[], int], name: str, *, waits: bool = False) -> Any:
    def answer() -> Sequence[torch.Tensor]:
        return [torch.tensor(question(), dtype=torch.int32, device="cpu")]

    return call(lambda _: answer if waits else answer(), [], [tf.int32], [[]], name=_safe(name))[0]


def _collective(
    collective: Collective,
    tensors: Sequence[Any],
    shapes: Sequence[Any],
    gradient: Gradient,
    ignore_name_scope: bool,
    dtypes: Sequence[Any] | None = None,
    kept: list[Any] | None = None,
) -> list[Any]:
    """Run a collective, with a gradient if one may be taken.

    `dtypes`: of the outputs, if they differ from those of the inputs. `kept`: filled with the outputs after the first.
    """
    if not tf.executing_eagerly() and collective.name is None:
        kind = collective.kind.name.capitalize()
        collective = collective._replace(name=_safe(f"Horovod{kind}_{tensors[0].name}"))
    _check_in_graph(collective.process_set)

    def forward(*inputs: Any) -> tuple[Any, Gradient]:
        leaves_scopes = ignore_name_scope and not tf.executing_eagerly()
        graph = tf.compat.v1.get_default_graph() if leaves_scopes else None
        with contextlib.nullcontext() if graph is None else graph.name_scope(None):
            outputs = carry_out(collective, inputs, dtypes or [tensor.dtype for tensor in tensors], shapes)
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
    return [None, *tensor.shape.as_list()[1:]]


def _checked(name: str | None, ignore_name_scope: bool) -> str | None:
    """Return the name of a collective for the engine or the graph. Without one it is numbered or named there.

    In eager mode the scopes are part of it; a graph adds them itself.
    """
    if name is None:
        return None
    if not isinstance(name, str):
        raise ValueError(f"the name of a collective must be a string, but it is {type(name).__name__}: {name!r}")
    scope = "" if ignore_name_scope or not tf.executing_eagerly() else tf.get_current_name_scope()
    return _safe(f"{scope}/{name}" if scope else name)


def _gradient_name(name: str | None, what: str = "gradient") -> str | None:
    return None if name is None else f"{name}_{what}"


def _safe(name: str) -> str:
    """Return a valid name for a TensorFlow operation."""
    name = re.sub(r"[^a-zA-Z0-9_/.]", "_", name).rstrip("/")
    return name if re.match(r"[a-zA-Z0-9.]", name) else f"Horovod{name}"
