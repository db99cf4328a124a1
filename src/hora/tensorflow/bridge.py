"""Torch functions on TensorFlow's tensors: at once in eager mode, as an operation inside a `tf.function`.

Memory is shared both ways: eager tensors cross by DLPack, those of a function as numpy arrays. Inside a function the
operation is a stateful `tf.numpy_function`: TensorFlow runs stateful operations in program order, which is the same on
all ranks. It waits on a thread of TensorFlow's inter-op pool; `reserve_threads` keeps that pool large enough for a few
functions that wait at once.
"""

from __future__ import annotations

import itertools
import linecache
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.autograph.core import config as autograph
from tensorflow.python.autograph.pyct import loader
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_util
from torch.utils import dlpack

from hora.tensorflow.errors import own_errors
from hora.torch.arrays import as_numpy, as_torch
from hora.torch.basics import rank

__all__ = ["as_tensor", "call", "check_no_xla", "recording", "reserve_threads"]

_MIN_THREADS = 4
_ALIGNMENT = 64

# Those with a torch twin. DLPack aborts the process when it is given a string.
_DTYPES = frozenset(
    {tf.float16, tf.bfloat16, tf.float32, tf.float64, tf.uint8, tf.int8, tf.int16, tf.int32, tf.int64, tf.bool}
)

# Only moved, as their bits: torch does not calculate with them.
_SIGNED = {tf.uint16: tf.int16, tf.uint32: tf.int32, tf.uint64: tf.int64}

# AutoGraph rewrites what a function calls; these modules need no rewriting, and their errors are clearer without.
autograph.CONVERSION_RULES = (autograph.DoNotConvert("hora"), *autograph.CONVERSION_RULES)


def _load_from_memory(source: str, delete_on_exit: bool) -> tuple[Any, str]:
    """Load a function that AutoGraph has rewritten, without the file in between; tracebacks have its text nevertheless.

    AutoGraph would remove that file when the process exits, and what was compiled from it never: a rank may be killed.
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

Work = Callable[..., Sequence[torch.Tensor]]


def as_tensor(value: Any, *, moved: bool = False) -> Any:
    """Return a dense tensor that torch can hold, else ValueError. `moved`: nothing is calculated with it."""
    tensor = tf.convert_to_tensor(value)
    if not tf.executing_eagerly() and hasattr(tensor, "numpy"):
        tensor = tf.identity(tensor)  # a value from outside of the function: as a part of it, it has a name
    carried = _DTYPES | set(_SIGNED) if moved else _DTYPES
    if tensor.dtype not in carried:
        known = ", ".join(sorted(dtype.name for dtype in carried))
        raise ValueError(f"a collective cannot carry tensors of {tensor.dtype.name}; it can carry {known}")
    return tensor


def call(work: Work, tensors: Sequence[Any], dtypes: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    """Return `work(*tensors)` as TensorFlow tensors of these dtypes and (partly known) shapes."""
    tensors = [tf.bitcast(t, _SIGNED[t.dtype]) if t.dtype in _SIGNED else t for t in tensors]
    if tf.executing_eagerly():
        with own_errors():
            outputs = [_to_tensorflow(output) for output in work(*[_to_torch(tensor) for tensor in tensors])]
        return _with_dtypes(outputs, dtypes)
    check_no_xla()

    def run(*arrays: Any) -> list[Any]:
        return [as_numpy(output) for output in work(*[as_torch(array) for array in arrays])]

    outputs = tf.numpy_function(run, tensors, [_SIGNED.get(dtype, dtype) for dtype in dtypes], stateful=True)
    for output, shape in zip(outputs, shapes, strict=True):
        output.set_shape(shape)
    return _with_dtypes(outputs, dtypes)


def _with_dtypes(outputs: Sequence[Any], dtypes: Sequence[Any]) -> list[Any]:
    return [tf.bitcast(o, dtype) if dtype in _SIGNED else o for o, dtype in zip(outputs, dtypes, strict=True)]


def check_no_xla() -> None:
    """ValueError while a function is being compiled by XLA, which can call nothing outside of it."""
    if control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise ValueError(
            f"rank {rank()}: a Horovod operation cannot be part of a function that XLA compiles: pass "
            "jit_compile=False to tf.function or model.compile, or move the operation out of the compiled function"
        )


def recording() -> bool:
    """Return whether a gradient tape may want to know what is done now."""
    return bool(record.could_possibly_record())


def reserve_threads() -> None:
    """Let several function operations wait at once, unless the user set the number or TensorFlow has started."""
    if tf.config.threading.get_inter_op_parallelism_threads() == 0:
        try:
            tf.config.threading.set_inter_op_parallelism_threads(max(os.cpu_count() or 1, _MIN_THREADS))
        except RuntimeError:  # its threads exist
            return


def _to_torch(tensor: Any) -> torch.Tensor:
    if "GPU" in tensor.device:
        with tf.device("CPU:0"):
            tensor = tf.identity(tensor)
    return dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(tensor))


def _to_tensorflow(tensor: torch.Tensor) -> Any:
    tensor = tensor.contiguous()
    if tensor.data_ptr() % _ALIGNMENT:  # TensorFlow would abort the process
        tensor = tensor.clone()
    return tf.experimental.dlpack.from_dlpack(dlpack.to_dlpack(tensor))  # type: ignore[attr-defined]
