"""A request: what one rank asks of the engine, and the part of it that all members must agree on.

`Signature` is that part. It is what travels to the peers (once; repeats travel as a number), and `plan` compares the
signatures of all members. A grouped call is one request with several tensors, which makes it all-or-nothing by itself.
Validation of a user's arguments lives in `validation.py`; nothing here communicates.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from enum import IntEnum
from typing import Any, NamedTuple

import torch

from hora.errors import HorovodInternalError

__all__ = [
    "DTYPES",
    "KINDS",
    "ITEM_BYTES",
    "Key",
    "Kind",
    "Reduce",
    "ReduceOp",
    "Request",
    "Signature",
    "dtype_name",
    "full_names",
]


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
    """A reduction: times `prescale`, combined by `op`, times `postscale`. `code`: see `Signature`."""

    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    code: str = ""


# Unnamed requests are told apart by a running number, which begins anew after this many.
NUM_INSTANCES = 2**32

# Requests match by operation name and either the user's name or the running number of unnamed ones.
Key = tuple[str, "str | int"]


class Signature(NamedTuple):
    """The properties of a request that members must agree on. Dimension 0 may differ for gathers.

    `device`: see `Validator.device_label`. `extra`: an alltoall's splits; what a request for the process sets is about
    (`process_sets.py`). `bound`: a persistent reduction, executed by what the members have bound to the name
    (`OperationQueue.bound`). `code`: how float32 travels between hosts in fewer bytes (`transport.codes`), with a
    "+" if what it loses is kept and added the next time.
    """

    kind: int
    operation: str  # "allreduce", "grouped_allreduce", "barrier", …
    name: str | None
    dtypes: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    op: int = ReduceOp.SUM
    prescale: float = 1.0
    postscale: float = 1.0
    root: int = -1
    device: str = "cpu"
    extra: tuple[int, ...] = ()
    bound: bool = False
    code: str = ""

    @property
    def device_type(self) -> str:
        return self.device.partition("/")[0]

    @property
    def reduce(self) -> Reduce:
        return Reduce(self.op, self.prescale, self.postscale, self.code)

    def key(self, instance: int) -> Key:
        """The key of the request with this running number, which counts only if it has no name."""
        return (self.operation, instance if self.name is None else self.name)

    @property
    def kind_name(self) -> str:
        """Return the operation's name in errors and the timeline."""
        return "ADASUM" if self.op == ReduceOp.ADASUM else KINDS[self.kind].name

    def encode(self) -> bytes:
        return json.dumps(self, separators=(",", ":")).encode()

    def digest(self) -> bytes:
        """Sixteen bytes that no other signature has."""
        return hashlib.blake2b(self.encode(), digest_size=16).digest()

    @classmethod
    def decode(cls, data: bytes) -> Signature:
        values: list[Any] = json.loads(data)
        values[3] = tuple(values[3])
        values[4] = tuple(tuple(shape) for shape in values[4])
        values[10] = tuple(values[10])
        return cls(*values)


def full_names(operation: str, name: str | int, num_tensors: int) -> list[str]:
    """The names users see in the timeline, stall reports and errors, one per tensor."""
    base = f"{operation}.{name}" if isinstance(name, str) else f"{operation}.noname.{name}"
    if operation.startswith("grouped_"):
        return [f"{base}_{i + 1}of{num_tensors}" for i in range(num_tensors)]
    return [base]


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_NAMES = ("uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}
ITEM_BYTES = {name: dtype.itemsize for name, dtype in DTYPES.items()}


class Request:
    """One submitted operation of this rank, from `submit` to `synchronize`."""

    __slots__ = (
        "answer",
        "copy_back",
        "device_event",
        "done",
        "error",
        "key",
        "outputs",
        "parts_left",
        "residuals",
        "results",
        "signature",
        "tensors",
    )

    def __init__(
        self, signature: Signature, tensors: Sequence[torch.Tensor] = (), outputs: Sequence[torch.Tensor] | None = None
    ) -> None:
        self.signature = signature
        self.key = signature.key(0)  # the queue numbers requests without a name
        self.tensors = list(tensors)
        self.outputs: list[torch.Tensor] | None = None if outputs is None else list(outputs)
        self.copy_back: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.residuals: Sequence[torch.Tensor] = ()  # what a code has lost of each tensor
        self.parts_left = 0
        self.results: list[torch.Tensor] | None = None  # the caller's own tensors, where the outputs are copies of them
        self.answer: Any = None  # of a request without tensors: the last rank to join, a new set, memory
        self.error: HorovodInternalError | None = None
        self.device_event: torch.cuda.Event | None = None
        self.done = False
