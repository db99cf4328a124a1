"""Bridge between TensorFlow tensors and torch functions: immediate in eager mode, an operation in a graph.

Both sides share memory: eager tensors are passed by DLPack, those of a graph by address. In a graph the operation is a
`kernel.HoraCall`, which never blocks a TensorFlow thread: the order in which sessions run operations, and the number of
their threads, may differ between ranks. Ranks match a collective by the name of its operation, which TensorFlow makes
unique.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import linecache
import sys
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.autograph.core import config as autograph
from tensorflow.python.autograph.pyct import loader
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util
from torch.utils import dlpack

from hora.engine.request import Kind
from hora.errors import HorovodInternalError
from hora.tensorflow.kernel import Execution, Work, add_operation
from hora.torch.basics import rank
from hora.torch.collective import Collective, hand_over, repeat_allreduce, run

_ALIGNMENT = 64

# Dtypes with a torch equivalent. DLPack aborts the process if it gets a string.
DTYPES = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.bool}
)

# Only moved, as bits: torch does not compute with them.
_SIGNED = {tf.uint16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}

# AutoGraph rewrites called functions; these modules need no rewriting, and their errors are clearer without.
autograph.CONVERSION_RULES = (autograph.DoNotConvert("hora"), *autograph.CONVERSION_RULES)


def gpu_available(ext_base_name: str = "tensorflow", verbose: bool = False) -> bool:
    """Return whether TensorFlow sees a GPU. The arguments exist for compatibility and are ignored.

    Args:
        verbose: 0, 1 or 2: how much the launcher says.
    """
    return bool(tf.config.list_physical_devices("GPU"))


class CollectiveError(HorovodInternalError, tf.errors.FailedPreconditionError, tf.errors.UnknownError):
    """A collective failed; pickled as a plain HorovodInternalError, which can be read without TensorFlow."""

    def __init__(self, node_def: Any, op: Any, message: str, *details: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, tf.errors.UNKNOWN, *details)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return HorovodInternalError, (self.message,)


class ArgumentError(ValueError, tf.errors.InvalidArgumentError):
    """A collective got an invalid argument; pickled as a plain ValueError."""

    def __init__(self, node_def: Any, op: Any, message: str, *details: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, tf.errors.INVALID_ARGUMENT, *details)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ValueError, (self.message,)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Convert the errors of the torch interface to the ones above."""
    try:
        yield
    except HorovodInternalError as error:
        raise CollectiveError(None, None, str(error)) from error
    except ValueError as error:
        raise ArgumentError(None, None, str(error)) from error


def _new_unknown_error(cls: type, node_def: Any = None, op: Any = None, message: Any = "", *details: Any) -> Any:
    """Return a `CollectiveError` if an operation of a function raised a HorovodInternalError.

    TensorFlow's native part calls the class of an error, so a subclass can replace it there and nowhere else.
    """
    ours = cls is tf.errors.UnknownError and f"{HorovodInternalError.__name__}: " in str(message)
    return Exception.__new__(CollectiveError if ours else cls, node_def, op, message, *details)


tf.errors.UnknownError.__new__ = _new_unknown_error


def _load_from_memory(source: str, delete_on_exit: bool) -> tuple[Any, str]:
    """Load a function that AutoGraph has rewritten from memory; tracebacks still show its source.

    AutoGraph would write a file, remove it at exit and never remove its compiled version; a killed rank would leave
    both.
    """
    name = f"__autograph_generated_file{next(_numbers)}"
    path = f"{name}.py"
    linecache.cache[path] = (len(source), None, source.splitlines(True), path)
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = path
    exec(compile(source, path, "exec"), module.__dict__)
    return module, path


_numbers = itertools.count()
loader.load_source = _load_from_memory

Answer = Sequence[torch.Tensor]
Question = Callable[..., Answer | Callable[[], Answer]]


def as_tensor(value: Any, *, moved: bool = False) -> Any:
    """Return a dense tensor of a dtype that torch supports; raises ValueError otherwise.

    `moved`: only moved, not computed with.
    """
    if not tf.executing_eagerly():
        _check_not_finalized()
    tensor = tf.convert_to_tensor(value)
    if not tf.executing_eagerly() and hasattr(tensor, "numpy"):
        tensor = tf.identity(tensor)  # a value from outside the function becomes part of it and gets a name
    carried = DTYPES | set(_SIGNED) if moved else DTYPES
    if tensor.dtype not in carried:
        known = ", ".join(sorted(dtype.name for dtype in carried))
        raise ValueError(f"a collective cannot carry tensors of {tensor.dtype.name}; it can carry {known}")
    return tensor


def call(
    question: Question,
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    *,
    name: str,
) -> list[Any]:
    """Return `question(name, *tensors)` as TensorFlow tensors of these dtypes and (partly known) shapes.

    A question that waits for other ranks returns a function for the rest, which runs on a thread in a graph. A graph
    makes the name unique.
    """

    def now(inputs: Sequence[torch.Tensor]) -> Answer:
        answer = question(name, *inputs)
        return answer() if callable(answer) else answer

    def work(execution: Execution) -> None:
        answer = question(execution.name, *execution.inputs)
        if callable(answer):
            execution.finish_in_thread(answer)
        else:
            execution.finish(answer)

    return _run_or_add(now, work, tensors, dtypes, shapes, name)


def carry_out(
    collective: Collective, tensors: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]
) -> list[Any]:
    """Run a collective and return its results. In a graph its name is that of the operation, made unique."""
    now, work = functools.partial(_run, collective), functools.partial(_submit, collective)
    return _run_or_add(now, work, tensors, dtypes, shapes, collective.name)


def _run(collective: Collective, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    kind, name, process_set, op, prescale, postscale, *_ = collective
    if kind is Kind.ALLREDUCE and not collective.grouped:
        result = repeat_allreduce(tensors[0], name, op, prescale, postscale, process_set)
        if result is not None:
            return [result]
    return run(*_with_splits(collective, tensors))


def _submit(collective: Collective, execution: Execution) -> None:
    """Submit a collective; the engine finishes the execution."""
    collective, tensors = _with_splits(collective, execution.inputs)
    outputs = None
    if collective.kind in (Kind.ALLREDUCE, Kind.BROADCAST):
        outputs = [execution.output(i, tensor.shape, tensor.dtype) for i, tensor in enumerate(tensors)]
    request = hand_over(collective._replace(name=execution.name), tensors, outputs)

    def finish() -> None:
        try:
            results = request.result()
        except BaseException as error:
            execution.fail(error)
        else:
            execution.finish(results)

    request.when_done(finish)


def _with_splits(collective: Collective, tensors: Sequence[torch.Tensor]) -> tuple[Collective, Sequence[torch.Tensor]]:
    """Return an alltoall with its splits, if they are given, and its tensor; others unchanged."""
    if collective.kind is Kind.ALLTOALL and len(tensors) > 1:
        return collective._replace(splits=tensors[1]), tensors[:1]
    return collective, tensors


def _run_or_add(
    now: Callable[[Sequence[torch.Tensor]], Answer],
    work: Work,
    tensors: Sequence[Any],
    dtypes: Sequence[Any],
    shapes: Sequence[Any],
    name: str | None,
) -> list[Any]:
    """Return the outputs of `now`, or of an operation for `work` that is added to the default graph."""
    if tf.executing_eagerly():
        with own_errors():
            answer = now([to_torch(tensor) for tensor in _moved(tensors)])
            return _with_dtypes([_to_tensorflow(output) for output in answer], dtypes)
    assert name is not None
    _check_not_finalized()
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):  # it can call nothing outside
        raise ValueError(
            f"rank {rank()}: a Horovod operation cannot be part of a function that XLA compiles: pass "
            "jit_compile=False to tf.function or model.compile, or move the operation out of the compiled function"
        )
    moved = [_SIGNED.get(dtype, dtype) for dtype in dtypes]
    outputs = add_operation(work, _moved(tensors), moved, name)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return _with_dtypes(outputs, dtypes)


def _check_not_finalized() -> None:
    """Raise RuntimeError if the default graph is final."""
    if tf.compat.v1.get_default_graph().finalized:
        raise RuntimeError(
            f"rank {rank()}: the graph is finalized, so no Horovod operation can be added to it; add it before the "
            "session finalizes the graph, as MonitoredTrainingSession does; to broadcast variables, pass "
            "hvd.BroadcastGlobalVariablesHook(root_rank) as one of its hooks"
        )


def _moved(tensors: Sequence[Any]) -> list[Any]:
    return [tf.bitcast(t, _SIGNED[t.dtype]) if t.dtype in _SIGNED else t for t in tensors]


def _with_dtypes(outputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [tf.bitcast(o, dtype) if dtype in _SIGNED else o for o, dtype in zip(outputs, dtypes, strict=True)]


def recording() -> bool:
    """Return whether a gradient tape may be recording."""
    return bool(record.could_possibly_record())


def to_torch(tensor: Any) -> torch.Tensor:
    """Return a tensor that shares the memory of an eager one of `DTYPES`."""
    if "GPU" in tensor.device:
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    return dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def _to_tensorflow(tensor: torch.Tensor) -> Any:
    tensor = tensor.contiguous()
    if tensor.data_ptr() % _ALIGNMENT:  # TensorFlow would abort the process
        tensor = tensor.clone()
    return tf.experimental.dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
