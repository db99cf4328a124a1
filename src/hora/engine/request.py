"""A request: what one rank asks of the engine, and the part of it that all members must agree on.

`Signature` is that part. It is sent to the peers once and then identified by a number, and `plan` compares the
signatures of all members. A grouped call is one request with several tensors, which makes it all-or-nothing. The
`Validator` builds a request from a user's arguments. This module does not communicate.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import index, is_
from typing import Any, NamedTuple

import torch

from hora.errors import HorovodInternalError


class Kind(IntEnum):
    """The kind of collective."""

    ALLREDUCE = 0
    ALLGATHER = 1
    BROADCAST = 2
    ALLTOALL = 3
    REDUCESCATTER = 4
    BARRIER = 5
    JOIN = 6
    ADD_PROCESS_SET = 7
    REMOVE_PROCESS_SET = 8
    SHARED_MEMORY = 9
    RETIRE = 10  # the last one of a process set


KINDS = tuple(Kind)  # by number: indexing is several times faster than calling the enum


class ReduceOp(IntEnum):
    """The reduction operator. The numbers are Horovod's."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


class Reduce(NamedTuple):
    """A reduction: scaled by `prescale`, combined by `op`, scaled by `postscale`."""

    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    # The encoding of float32 between hosts (`codes.h`), with a "+" if its error is kept and added the next time
    code: str = ""


class CollectiveCall(NamedTuple):
    """A collective as the caller requests it."""

    kind: Kind
    name: str | None = None
    reduce: Reduce = Reduce()
    root_rank: int = -1  # global rank
    splits: Sequence[int] | torch.Tensor | None = None
    grouped: bool = False


# Unnamed requests are distinguished by a running number, which wraps after this many.
NUM_INSTANCES = 2**32

# Requests match by operation name and either the user's name or the running number of unnamed ones.
Key = tuple[str, "str | int"]


class Signature(NamedTuple):
    """The properties of a request that members must agree on. Dimension 0 may differ for gathers."""

    kind: int
    operation: str  # "allreduce", "grouped_allreduce", "barrier", …
    name: str | None
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    reduce: Reduce = Reduce()
    root: int = -1
    device: str = "cpu"  # see `Validator.device_label`
    extra: tuple[int, ...] = ()  # an alltoall's splits, or the argument of a request about process sets (`ProcessSets`)
    # A persistent reduction: executed by what the members have bound to the name (`OperationQueue.bound`)
    bound: bool = False

    @property
    def device_type(self) -> str:
        return self.device.partition("/")[0]

    def key(self, instance: int) -> Key:
        """Return the key of the request with this running number, which matters only without a name."""
        return (self.operation, instance if self.name is None else self.name)

    @property
    def kind_name(self) -> str:
        """Return the operation's name in errors and the timeline."""
        return "ADASUM" if self.reduce.op == ReduceOp.ADASUM else KINDS[self.kind].name

    def encode(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """Return a 16-byte digest that identifies the signature."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        values: list[Any] = json.loads(data)
        values[3] = tuple(values[3])
        values[4] = tuple(tuple(shape) for shape in values[4])
        values[5] = Reduce(*values[5])
        values[8] = tuple(values[8])
        return cls(*values)


def full_names(operation: str, name: str | int, num_tensors: int) -> list[str]:
    """Return the names that users see in the timeline, stall reports and errors, one per tensor."""
    in_group = "/" in operation  # of torch.distributed: "default_pg/all_reduce", whose calls are numbered
    base = f"{operation}.{name}" if isinstance(name, str) or in_group else f"{operation}.noname.{name}"
    if operation.startswith("grouped_") or (in_group and num_tensors > 1):
        return [f"{base}_{i + 1}of{num_tensors}" for i in range(num_tensors)]
    return [base]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


_calling_back = threading.Lock()


@dataclass(slots=True, eq=False)
class Completion:
    """The end of something in flight: it is `done`, perhaps with an error.

    `last` is its last step, which takes this object and writes `targets`. The thread that completes the operation runs
    it, so the results do not depend on who waits for them, or whether anyone does.
    """

    done: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    on_done: Callable[[], None] | None = field(default=None, init=False)
    last: Callable[[Any], object] | None = field(default=None, init=False)
    targets: Sequence[torch.Tensor] = field(default=(), init=False)
    device_event: torch.cuda.Event | None = field(default=None, init=False)  # after which a GPU has the results

    @property
    def has_result(self) -> bool:
        """Return whether waiting would return at once, also to a GPU's stream."""
        return self.done and (self.device_event is None or self.error is not None or self.device_event.query())

    def raise_error(self) -> None:
        """Raise the error of the operation, a new one for everyone who asks."""
        if self.error is not None:
            raise type(self.error)(*self.error.args)

    def run_last(self) -> None:
        """Run the last step of an operation without an error; a failure becomes its error."""
        if self.last is None or self.error is not None:
            return
        try:
            with torch.inference_mode(any(target.is_inference() for target in self.targets)), torch.no_grad():
                self.last(self)
        except (ValueError, HorovodInternalError) as error:
            self.error = error.with_traceback(None)
        except Exception as problem:  # the operation must still end
            self.error = HorovodInternalError(f"the result could not be written back: {problem}")
        self.last, self.targets = None, ()

    def when_done(self, callback: Callable[[], None]) -> None:
        """Call a function once this is done, here or on the thread that completes it; it must not wait or raise."""
        self.on_done = callback
        if self.done:
            self.call_back()

    def call_back(self) -> None:
        """Call the function of `when_done`, unless another thread does."""
        with _calling_back:
            callback, self.on_done = self.on_done, None
        if callback is not None:
            callback()


# `go_on(instance, slice_ns)` continues a repeated call; returns whether all members have agreed on it, and then it is
# done, or None if that is not known yet.
GoOn = Callable[[int, int], "bool | None"]


@dataclass(slots=True, eq=False)
class Request(Completion):
    """One submitted operation of this rank."""

    signature: Signature
    tensors: Sequence[torch.Tensor] = ()
    outputs: list[torch.Tensor] | None = None
    results: list[torch.Tensor] | None = None  # the caller's own tensors, if the outputs are copies of them
    copy_back: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
    residuals: Sequence[torch.Tensor] = ()  # the encoding error of each tensor
    queue: Any = None  # where it was submitted
    key: Key = ("", 0)  # the queue sets it, and numbers requests without a name
    instance: int = 0  # its running number in that queue
    go_on: GoOn | None = None  # of a repeated call
    parts_left: int = 0
    # Of a request without tensors: the last rank to join, a new set, memory. Of an allgather: the members' sizes.
    answer: Any = None

    def result(self) -> list[torch.Tensor]:
        """Wait for the operation, drive it meanwhile, and return the outputs or raise its error."""
        return self.queue.result(self)

    @property
    def name(self) -> str:
        """Return the name that users see if the training thread is blocked in it."""
        names = full_names(*self.key, max(len(self.tensors), 1))
        return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"


_MOVED = frozenset(DTYPES.values())
_ADDED = _MOVED - {torch.bool}
_SCALED = _ADDED - {torch.uint8, torch.int8, torch.int16}
_FLOATS = frozenset(dtype for dtype in _MOVED if dtype.is_floating_point)
_REDUCED: dict[int, frozenset[torch.dtype]] = {  # by op
    **dict.fromkeys((ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX), _ADDED),
    **dict.fromkeys((ReduceOp.AVERAGE, ReduceOp.PRODUCT), _SCALED),
    ReduceOp.ADASUM: _FLOATS,
}
_KEPT_SIGNATURES = 8192
_OPERATIONS = {kind: kind.name.lower() for kind in Kind}


class Validator:
    """Turns a user's arguments into a `Request`, or raises a clear error at once, for one set with these global ranks.

    Everything that one rank can detect is rejected here, before anything is announced; `plan` finds what only a
    comparison of ranks can show. Checks that depend only on a tensor's kind run once, because training repeats itself.
    """

    def __init__(self, ranks: Sequence[int]) -> None:
        self._ranks = tuple(ranks)
        self._known: dict[object, Signature] = {}
        self._gpus: list[torch.device] = []  # used by this rank here, in the order of first use

    @property
    def home_gpu(self) -> torch.device | None:
        """The first GPU that this rank has used here; it also takes part there in operations of others."""
        return self._gpus[0] if self._gpus else None

    def set_home_gpu(self, gpu: torch.device) -> None:
        """Set the rank's GPU, unless it has already used one here."""
        if not self._gpus:
            self._gpus.append(gpu)

    def device_label(self, device: torch.device) -> str:
        """Return a device as other members see it: "cpu", "cuda", or "cuda/2" for a second GPU, of any number."""
        if device.type == "cpu":
            return "cpu"
        if device not in self._gpus:
            self._gpus.append(device)
        number = self._gpus.index(device) + 1
        return device.type if number == 1 else f"{device.type}/{number}"

    def request(
        self, call: CollectiveCall, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None
    ) -> Request:
        """Return the request for a collective on tensors."""
        key, signature = None, None
        if call.splits is None and len(tensors) == 1 and isinstance(tensors[0], torch.Tensor):
            key = _key(call, tensors[0])
            signature = self._known.get(key)
        if signature is None:
            signature = self._check(call, tensors)
            if key is not None:
                if len(self._known) >= _KEPT_SIGNATURES:
                    self._known.clear()
                self._known[key] = signature
        if torch.is_inference_mode_enabled() or any(tensor.is_inference() for tensor in tensors):
            with torch.inference_mode(False):
                return _request(signature, call.kind, tensors, outputs)
        return _request(signature, call.kind, tensors, outputs)

    def known_allreduce(self, tensor: torch.Tensor, name: str | None, reduce: Reduce) -> Signature | None:
        """Return the signature of an allreduce of one tensor, if there has been one like it."""
        return self._known.get(_key(CollectiveCall(Kind.ALLREDUCE, name, reduce), tensor))

    def _check(self, call: CollectiveCall, tensors: Sequence[torch.Tensor]) -> Signature:
        kind, reduce = call.kind, call.reduce
        operation, op = _OPERATIONS[kind], int(reduce.op)
        reduces = kind in (Kind.ALLREDUCE, Kind.REDUCESCATTER)
        if not tensors:
            raise ValueError(f"{operation} needs at least one tensor, but the list is empty")
        if reduces:
            _check_op(kind, op)
        for tensor in tensors:
            _check_tensor(kind, tensor, op if reduces else None)
        device = self.device_label(_device(tensors))
        extra = _check_kind(call, tensors, self._ranks)
        return Signature(
            int(kind),
            f"grouped_{operation}" if call.grouped else operation,
            call.name,
            tuple([dtype_name(tensor.dtype) for tensor in tensors]),
            tuple([tuple(tensor.shape) for tensor in tensors]),
            Reduce(op if reduces else int(ReduceOp.SUM), float(reduce.prescale), float(reduce.postscale), reduce.code),
            call.root_rank if kind is Kind.BROADCAST else -1,
            device,
            extra,
        )


def _key(call: CollectiveCall, tensor: torch.Tensor) -> object:
    return call, tensor.dtype, tensor.shape, tensor.device, tensor.layout


def _check_tensor(kind: Kind, tensor: torch.Tensor, op: int | None) -> None:
    if not isinstance(tensor, torch.Tensor):
        raise ValueError(f"{_OPERATIONS[kind]} takes torch tensors, but it got {type(tensor).__name__}")
    if tensor.layout != torch.strided:
        raise ValueError(
            f"{_OPERATIONS[kind]} takes dense tensors, but it got {tensor.layout}; use sparse_allreduce_async"
        )
    if tensor.dtype not in (_MOVED if op is None else _REDUCED[op]):
        what = _OPERATIONS[kind] if op is None else f"{_OPERATIONS[kind]} with {ReduceOp(op).name}"
        raise ValueError(f"Tensor type {tensor.dtype} is not supported by {what}; convert the tensor first")


def _check_op(kind: Kind, op: int) -> None:
    if op not in _REDUCED:
        raise ValueError(f"unknown reduce op {op}; use one of hvd.Average, Sum, Adasum, Min, Max, Product")
    if kind is Kind.REDUCESCATTER and op not in (ReduceOp.SUM, ReduceOp.AVERAGE):
        raise HorovodInternalError(f"reducescatter only supports AVERAGE and SUM, but it got {ReduceOp(op).name}")


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same memory as a tensor that any thread may write to; an inference tensor is not one."""
    if not tensor.is_inference():
        return tensor
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return alias.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _is_flat(tensor: torch.Tensor) -> bool:
    """Return whether the memory holds the elements in order; a lazily negated tensor (`z.conj().imag`) has others."""
    return tensor.is_contiguous() and not tensor.is_neg()


def _request(
    signature: Signature, kind: Kind, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor] | None
) -> Request:
    inputs = [
        _ordinary(
            tensor if not tensor.requires_grad and _is_flat(tensor) else tensor.detach().resolve_neg().contiguous()
        )
        for tensor in tensors
    ]
    if outputs is None:
        if kind in (Kind.ALLREDUCE, Kind.BROADCAST):
            return Request(signature, inputs, [torch.empty_like(tensor) for tensor in inputs])
        return Request(signature, inputs)
    if outputs is tensors or all(map(is_, outputs, tensors)):
        results = list(inputs)
    else:
        results = [
            _ordinary(output.detach()) if _is_flat(output) else torch.empty_like(output).contiguous()
            for output in outputs
        ]
    # A non-contiguous tensor is processed in a copy, which is copied back at the end.
    copies = zip(outputs, results, strict=True)
    copy_back = [(output, copy) for output, copy in copies if output is not copy and not _is_flat(output)]
    for output, _ in copy_back:
        if any(stride == 0 and length > 1 for stride, length in zip(output.stride(), output.shape, strict=True)):
            raise ValueError(
                f"{_OPERATIONS[kind]} cannot work in place on a tensor whose elements share memory (shape "
                f"{list(output.shape)}, strides {list(output.stride())}, from expand()); clone() it first"
            )
    return Request(signature, inputs, results, list(outputs), copy_back)


def _device(tensors: Sequence[torch.Tensor]) -> torch.device:
    first = tensors[0].device
    if first.type not in ("cpu", "cuda"):
        raise ValueError(
            f"tensors must be on the CPU or on a CUDA device, but this one is on {first}; move it with .cpu()"
        )
    for tensor in tensors:
        if tensor.device != first:
            raise HorovodInternalError(
                f"all tensors of a group must be on the same device, but {first} and {tensor.device} were given"
            )
    return first


def _check_kind(call: CollectiveCall, tensors: Sequence[torch.Tensor], ranks: Sequence[int]) -> tuple[int, ...]:
    kind = call.kind
    if kind is Kind.BROADCAST and call.root_rank not in ranks:
        raise ValueError(
            f"broadcast got an invalid root rank: {call.root_rank}; the process set has the ranks {list(ranks)}"
        )
    if kind is Kind.REDUCESCATTER and any(tensor.dim() == 0 for tensor in tensors):
        raise ValueError("reducescatter does not support scalar tensors; use at least one dimension")
    if kind is Kind.ALLTOALL:
        return _check_splits(tensors[0], call.splits, len(ranks))
    return ()


def _check_splits(tensor: torch.Tensor, splits: Sequence[int] | torch.Tensor | None, size: int) -> tuple[int, ...]:
    if tensor.dim() == 0:
        raise ValueError("alltoall does not support scalar tensors; use at least one dimension")
    rows = tensor.shape[0]
    if splits is None:
        if rows % size:
            raise ValueError(
                "alltoall without splits needs a first dimension that is an even multiple of the number of workers: "
                f"{rows} rows, {size} workers"
            )
        return (rows // size,) * size
    if not isinstance(splits, torch.Tensor):
        values = list(splits)
        try:
            splits = torch.tensor([index(value) for value in values], dtype=torch.int32, device="cpu")
        except (TypeError, RuntimeError):  # not integers (numpy's are accepted), or too large
            raise ValueError(f"alltoall splits must be 32-bit integers, but they are {values}") from None
    if splits.dim() != 1:
        raise ValueError(f"alltoall expects a 1-D tensor of splits, but it has {splits.dim()} dimensions")
    if splits.dtype != torch.int32:
        raise ValueError(f"alltoall splits must be 32-bit integer values, but they are {splits.dtype}")
    if splits.numel() != size:
        raise ValueError(
            f"alltoall needs as many splits as the number of workers, which is {size}, but there are {splits.numel()}"
        )
    counts = tuple(splits.tolist())
    if any(value < 0 for value in counts):
        raise ValueError(f"alltoall splits must not be negative, but they are {list(counts)}")
    if sum(counts) > rows:
        raise ValueError(f"the sum of the alltoall splits, {sum(counts)}, is greater than the first dimension, {rows}")
    return counts
