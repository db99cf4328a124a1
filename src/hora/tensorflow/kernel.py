"""`HoraCall`, the operation of TensorFlow graphs: its kernel starts work in Python and returns its thread at once.

A session or function runs kernels on a few threads, in a different order on each rank. A kernel that blocks could hold
the thread on which the other ranks need another collective started. So the kernel is asynchronous: it submits and
returns, and the engine's thread finishes the execution later.

The kernel is registered through TensorFlow's C API, which every wheel exports, so nothing is compiled. That API passes
`done`, the C++ function that ends an execution, as the address of a `std::function` that lives until the kernel
returns. `_Done` moves it out like its move constructor: in every version of libstdc++ it is two words of state, a
manager and an invoker.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import math
import os
import re
import threading
import weakref
from collections.abc import Callable, Sequence
from ctypes import POINTER, byref, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from typing import Any

import tensorflow as tf
import torch
from tensorflow.python.framework import op_def_library
from tensorflow.python.framework.func_graph import FuncGraph

from hora.errors import HorovodInternalError

_OPERATION = "HoraCall"
_DESTROY = 3  # an operation of a std::function's manager
_ITERATIONS = 64  # loop iterations with distinct names; by default TensorFlow runs ten at once

# TensorFlow's numbers of dtypes and errors.
_DTYPES = {
    1: torch.float32,
    2: torch.float64,
    3: torch.int32,
    4: torch.uint8,
    5: torch.int16,
    6: torch.int8,
    9: torch.int64,
    10: torch.bool,
    14: torch.bfloat16,
    19: torch.float16,
}
_NUMBERS = {dtype: number for number, dtype in _DTYPES.items()}
_UNKNOWN, _INVALID_ARGUMENT, _UNIMPLEMENTED = 2, 3, 12

_Create = ctypes.CFUNCTYPE(c_void_p, c_void_p)
_Compute = ctypes.CFUNCTYPE(None, c_void_p, c_void_p, c_void_p)
_Manager = ctypes.CFUNCTYPE(c_bool, c_void_p, c_void_p, c_int)

_SIGNATURES: dict[str, tuple[Any, list[Any]]] = {
    "TF_NewStatus": (c_void_p, []),
    "TF_DeleteStatus": (None, [c_void_p]),
    "TF_SetStatus": (None, [c_void_p, c_int, c_char_p]),
    "TF_GetCode": (c_int, [c_void_p]),
    "TF_Message": (c_char_p, [c_void_p]),
    "TF_NewOpDefinitionBuilder": (c_void_p, [c_char_p]),
    "TF_OpDefinitionBuilderAddAttr": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderAddInput": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderAddOutput": (None, [c_void_p, c_char_p]),
    "TF_OpDefinitionBuilderSetIsStateful": (None, [c_void_p, c_bool]),
    "TF_OpDefinitionBuilderSetShapeInferenceFunction": (None, [c_void_p, c_void_p]),
    "TF_RegisterOpDefinition": (None, [c_void_p, c_void_p]),
    "TF_NewAsyncKernelBuilder": (c_void_p, [c_char_p, c_char_p, _Create, _Compute, c_void_p]),
    "TF_RegisterKernelBuilder": (None, [c_char_p, c_void_p, c_void_p]),
    "TF_OpKernelConstruction_GetAttrInt64": (None, [c_void_p, c_char_p, POINTER(c_int64), c_void_p]),
    "TF_NumInputs": (c_int, [c_void_p]),
    "TF_GetInput": (None, [c_void_p, c_int, POINTER(c_void_p), c_void_p]),
    "TF_GetIterId": (c_int64, [c_void_p]),
    "TF_TensorType": (c_int, [c_void_p]),
    "TF_NumDims": (c_int, [c_void_p]),
    "TF_Dim": (c_int64, [c_void_p, c_int]),
    "TF_TensorData": (c_void_p, [c_void_p]),
    "TF_DeleteTensor": (None, [c_void_p]),
    "TF_AllocateOutput": (c_void_p, [c_void_p, c_int, c_int, POINTER(c_int64), c_int, c_size_t, c_void_p]),
    "TF_OpKernelContext_Failure": (None, [c_void_p, c_void_p]),
}

# The work of an execution: it submits, and later calls `finish` or `fail`. An exception it raises goes to `fail`.
Work = Callable[["Execution"], None]

_works: weakref.WeakValueDictionary[int, _Kept] = weakref.WeakValueDictionary()
_tokens = itertools.count(1)


class _Kept:
    """Work of an operation and its name among the ranks, kept alive by the operation's graph."""

    name = ""

    def __init__(self, work: Work) -> None:
        self.work = work


def add_operation(work: Work, tensors: Sequence[Any], dtypes: Sequence[Any], name: str) -> list[Any]:
    """Add an operation that does `work` to the default graph, and return its outputs; `name` is made unique there."""
    _register()
    token, kept = next(_tokens), _Kept(work)
    _works[token] = kept
    graph = tf.compat.v1.get_default_graph()
    while getattr(graph, "outer_graph", None) is not None:  # the one around all functions lives longest
        graph = graph.outer_graph
    if not hasattr(graph, "_hora_work"):
        graph._hora_work = []
    graph._hora_work.append(kept)
    _, _, operation, _ = op_def_library._apply_op_helper(
        _OPERATION, inputs=list(tensors), token=token, Tout=list(dtypes), name=name
    )
    kept.name = _name_among_ranks(operation)
    return list(operation.outputs)


def _name_among_ranks(operation: Any) -> str:
    """Return the name by which ranks match an operation: its own, and the names of the functions around it.

    A function's name ends with a number that may differ between ranks. Two functions in one graph, such as the branches
    of two conditions, may have the same name without it.
    """
    graph, name = operation.graph, operation.name
    if not isinstance(graph, FuncGraph):
        return str(name)
    with tf.init_scope():
        called_eagerly = tf.executing_eagerly()
    name = re.sub(r"_\d+$", "", str(graph.name)) + f"/{name}"
    while isinstance(graph, FuncGraph) and (isinstance(graph.outer_graph, FuncGraph) or not called_eagerly):
        graph = graph.outer_graph
    if not hasattr(graph, "_hora_names"):
        graph._hora_names = set()
    candidates = itertools.chain([name], (f"{name}_{i}" for i in itertools.count(1)))
    unique = next(candidate for candidate in candidates if candidate not in graph._hora_names)
    graph._hora_names.add(unique)
    return unique


class Execution:
    """One execution of an operation, until `finish` or `fail`. `inputs` are TensorFlow's memory and must not be
    changed.

    `name`: of this execution among the ranks. Loop iterations that may run at once have different names.
    """

    def __init__(self, context: int, done: _Done) -> None:
        self._context, self._done = context, done
        self._held: list[int] = []
        self._outputs: dict[int, torch.Tensor] = {}
        self._open = threading.Lock()
        self.name = ""
        self.inputs: list[torch.Tensor] = []

    def begin(self, kept: _Kept) -> None:
        """Read the inputs from TensorFlow, and do the work."""
        iteration = _tf().TF_GetIterId(self._context) % _ITERATIONS
        self.name = f"{kept.name}#{iteration}" if iteration else kept.name
        for i in range(_tf().TF_NumInputs(self._context)):
            tensor = c_void_p()
            with _Status() as status:
                _tf().TF_GetInput(self._context, i, byref(tensor), status)
            assert tensor.value is not None
            self._held.append(tensor.value)
            self.inputs.append(_view(tensor.value))
        kept.work(self)

    def output(self, i: int, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Return the memory of a TensorFlow output as a tensor, to be filled before `finish`."""
        dims = (c_int64 * len(shape))(*shape)
        num_bytes = math.prod(shape) * dtype.itemsize
        with _Status() as status:
            tensor = _tf().TF_AllocateOutput(self._context, i, _NUMBERS[dtype], dims, len(shape), num_bytes, status)
        self._held.append(tensor)
        found = self._outputs[i] = _view(tensor)
        return found

    def finish(self, outputs: Sequence[torch.Tensor]) -> None:
        """End the execution with these outputs. Outputs outside the memory of `output` are copied."""
        if not self._open.acquire(blocking=False):
            return
        try:
            for i, output in enumerate(outputs):
                if i not in self._outputs:
                    self.output(i, output.shape, output.dtype).copy_(output)
        except Exception as error:  # TensorFlow lacks memory, or the graph expects another output
            self._set_failure(error)
        self._end()

    def fail(self, error: BaseException) -> None:
        """End the execution with an error."""
        if self._open.acquire(blocking=False):
            self._set_failure(error)
            self._end()

    def finish_in_thread(self, work: Callable[[], Sequence[torch.Tensor]]) -> None:
        """End the execution with the outputs of `work`, which may wait for other ranks."""

        def run() -> None:
            try:
                self.finish(work())
            except BaseException as error:
                self.fail(error)

        threading.Thread(target=run, name="hora-tensorflow", daemon=True).start()

    def _set_failure(self, error: BaseException) -> None:
        code = _UNKNOWN
        if isinstance(error, (ValueError, TypeError)):
            code = _INVALID_ARGUMENT
        elif isinstance(error, NotImplementedError):
            code = _UNIMPLEMENTED
        kind = HorovodInternalError if isinstance(error, HorovodInternalError) else type(error)
        status = _tf().TF_NewStatus()
        _tf().TF_SetStatus(status, code, f"{kind.__name__}: {error}".encode())
        _tf().TF_OpKernelContext_Failure(self._context, status)
        _tf().TF_DeleteStatus(status)

    def _end(self) -> None:
        self.inputs.clear()
        self._outputs.clear()
        for tensor in self._held:
            _tf().TF_DeleteTensor(tensor)
        self._done()


class _Done:
    """The function that ends an execution, moved out of the kernel's argument."""

    def __init__(self, address: int) -> None:
        self._words = (c_void_p * 4).from_buffer_copy((c_void_p * 4).from_address(address))
        (c_void_p * 4).from_address(address)[2] = None  # without a manager it is empty

    def __call__(self) -> None:
        """Call it once, without the GIL: other kernels may run inside it."""
        address = ctypes.addressof(self._words)
        _unlocked().TF_RunAsyncOpKernelDoneCallback(c_void_p(address))
        _Manager(self._words[2] or 0)(address, address, _DESTROY)


class _Status:
    """A TF_Status; an error in it is raised as a RuntimeError when the block ends."""

    def __enter__(self) -> int:
        self._status: int = _tf().TF_NewStatus()
        return self._status

    def __exit__(self, *_: object) -> None:
        code, text = _tf().TF_GetCode(self._status), _tf().TF_Message(self._status)
        _tf().TF_DeleteStatus(self._status)
        if code:
            raise RuntimeError(f"TensorFlow reported: {text.decode(errors='replace')}")


def _view(tensor: int) -> torch.Tensor:
    """Return a tensor that shares the memory of a TensorFlow tensor."""
    dtype = _DTYPES[_tf().TF_TensorType(tensor)]
    shape = [_tf().TF_Dim(tensor, i) for i in range(_tf().TF_NumDims(tensor))]
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    memory = (ctypes.c_char * num_bytes).from_address(_tf().TF_TensorData(tensor))
    return torch.frombuffer(memory, dtype=dtype).view(shape)


def _path() -> str:
    return os.path.join(tf.sysconfig.get_lib(), f"libtensorflow_framework.so.{tf.__version__.partition('.')[0]}")


@functools.cache
def _unlocked() -> Any:
    """Return TensorFlow's library, called without the GIL."""
    return ctypes.CDLL(_path())


@functools.cache
def _tf() -> Any:
    """Return TensorFlow's library. Its short functions are called with the GIL held."""
    library = ctypes.PyDLL(_path())
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library


@functools.cache
def _register() -> None:
    """Register the operation and its kernel with TensorFlow, for the life of the process."""
    library = _tf()
    definition = library.TF_NewOpDefinitionBuilder(_OPERATION.encode())
    for attribute in (b"token: int", b"Tin: list(type) >= 0", b"Tout: list(type) >= 0"):
        library.TF_OpDefinitionBuilderAddAttr(definition, attribute)
    library.TF_OpDefinitionBuilderAddInput(definition, b"inputs: Tin")
    library.TF_OpDefinitionBuilderAddOutput(definition, b"outputs: Tout")
    library.TF_OpDefinitionBuilderSetIsStateful(definition, True)  # never folded, merged or pruned
    unknown = ctypes.cast(library.TF_ShapeInferenceContextSetUnknownShape, c_void_p)
    library.TF_OpDefinitionBuilderSetShapeInferenceFunction(definition, unknown)
    with _Status() as status:
        library.TF_RegisterOpDefinition(definition, status)
    kernel = library.TF_NewAsyncKernelBuilder(_OPERATION.encode(), b"CPU", _CREATE, _COMPUTE, None)
    with _Status() as status:
        library.TF_RegisterKernelBuilder(_OPERATION.encode(), kernel, status)


def _create(construction: int) -> int:
    """Create a kernel: its pointer is the token of its work."""
    token, status = c_int64(), _tf().TF_NewStatus()
    _tf().TF_OpKernelConstruction_GetAttrInt64(construction, b"token", byref(token), status)
    _tf().TF_DeleteStatus(status)
    return token.value


def _compute(token: int, context: int, done: int) -> None:
    """Start an execution, on a TensorFlow thread."""
    execution = Execution(context, _Done(done))
    try:
        kept = _works.get(token)
        if kept is None:
            raise ValueError(
                "this graph was created by another process, or read from a file: its Horovod operations are unknown "
                "here; build the graph again in this process"
            )
        execution.begin(kept)
    except BaseException as error:  # of any kind: TensorFlow waits for this execution
        execution.fail(error)


_CREATE, _COMPUTE = _Create(_create), _Compute(_compute)  # kept for the life of the process
