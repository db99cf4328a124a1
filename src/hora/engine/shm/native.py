"""The native part: `calls.c` as a library, built by a C compiler at installation or contained in the wheel.

`ctypes` loads it and calls its functions; long calls release the GIL. The functions that the library itself makes for
Python (`Library.function`) save what `ctypes` takes; they use Python's stable ABI, so one library is for every version.
`library` returns None with HORA_NATIVE=0, without a compiler, on an unsupported processor, and if it was built from
other sources. Then ranks share no memory: all data goes over sockets, slowly, with the same bits. `absence` returns the
reason, for `hora doctor` and `--check-build`.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch

from hora.config import EngineConfig

NOTHING, MULTIPLY, DIVIDE = range(3)  # enum finish of sums.h
_PATH = Path(__file__).with_name("libhora.so")
# A call this short keeps the GIL: reacquiring it from a busy thread would take longer than the work.
SHORT_BYTES = 32768

DTYPE_NUMBERS = {
    torch.float32: 0,
    torch.float64: 1,
    torch.float16: 2,
    torch.bfloat16: 3,
    torch.uint8: 4,  # sums wrap, signed or not
    torch.int8: 4,
    torch.int16: 5,
    torch.int32: 6,
    torch.int64: 7,
}


_TYPES = {
    "pointer": ctypes.c_void_p,
    "int64": ctypes.c_int64,
    "uint64": ctypes.c_uint64,
    "int32": ctypes.c_int32,
    "uint8": ctypes.c_uint8,
    "char": ctypes.c_uint8,
    "double": ctypes.c_double,
    "object": ctypes.py_object,
}
_FUNCTIONS = ("carry_out", "known", "again")  # of Python (calls.c), in the order of `hora_function`


def _function(library: ctypes.CDLL, name: str, arguments: str, result: str = "") -> Any:
    """Return a function in C; without a result by default."""
    found = getattr(library, f"hora_{name}")
    found.argtypes, found.restype = [_TYPES[kind] for kind in arguments.split()], _TYPES[result] if result else None
    return found


def _sources() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(_PATH.parent.glob("*.[ch]")))


_SOURCE = re.sub(r"/\*.*?\*/", "", _sources().decode(), flags=re.DOTALL)
_DECLARATION = re.compile(r"\s*(?:const |unsigned )*(?:struct )?(\w+?)(?:_t)? (.*)", re.DOTALL)
_structures: dict[str, type[ctypes.Structure]] = {}  # by name in C
Structure = TypeVar("Structure", bound=ctypes.Structure)


def described(name: str) -> Callable[[type[Structure]], type[Structure]]:
    """Give a class the fields of `struct name` of the C sources."""

    def describe(kind: type[Structure]) -> type[Structure]:
        kind._fields_ = list(_fields(name))
        _structures[name] = kind
        return kind

    return describe


def _fields(name: str) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a structure in C. One without a class is a part of those that contain it."""
    (body,) = re.findall(rf"^struct {name} {{(.*?)^}};", _SOURCE, re.DOTALL | re.MULTILINE)
    for declaration in re.sub(r"int \(\*(\w+)\)\([^)]*\)", r"void *\1", body).split(";")[:-1]:
        kind, declarators = _DECLARATION.fullmatch(declaration).groups()  # type: ignore[union-attr]
        for declarator in declarators.split(","):
            ((field, length),) = re.findall(r"(\w+)(?:\[(\w+)\])?$", declarator)
            found: Any = _structures.get(kind) or _TYPES.get(kind)
            if "*" in declarator:
                found = ctypes.POINTER(found) if kind in _structures else ctypes.c_void_p
            elif found is None:
                yield from _fields(kind)
                continue
            if length and not length.isdigit():
                (length,) = re.findall(rf"\b{length} = (\d+)", _SOURCE)
            yield field, found * int(length) if length else found


@described("spin_policy")
class SpinPolicy(ctypes.Structure):
    """Time to spin before sleeping."""


# Spins of about 50 ns each before a thread sleeps, if spinning has paid off: waking takes about as long.
# With a free core for every member, spinning takes no time from others.
_MANY_LOOKS = 600
_MANY_LOOKS_TO_SPARE = 4000


def new_spin_policy(num_members: int = 0) -> SpinPolicy:
    """Return the policy for one of this many members on this host; 0: unknown."""
    spare = 0 < 2 * num_members <= len(os.sched_getaffinity(0))
    return SpinPolicy(many=_MANY_LOOKS_TO_SPARE if spare else _MANY_LOOKS)


@described("group")
class GroupStruct(ctypes.Structure):
    """The counters of a group's members (`counters`)."""


@described("ring")
class RingStruct(ctypes.Structure):
    """The slots and counters of a ring."""


@described("numbers")
class Sum(ctypes.Structure):
    """Arithmetic of a sum: times `prescale` (half precision only), summed, finished.

    `finish`: not at all, times the factor, or divided by it.
    """


@described("job")
class CollectiveStruct(ctypes.Structure):
    """A collective through a ring, and its progress."""


@described("call")
class CallStruct(ctypes.Structure):
    """A signature as its caller keeps it: pointers to structures that are described below, and facts."""


@described("turns")
class Turns(ctypes.Structure):
    """The number of rings that a group of members has had, and the steps of the present one."""


@described("spec")
class Spec(ctypes.Structure):
    """The common part of all collectives with one signature."""


@described("repeated")
class Repeated(ctypes.Structure):
    """Repeated collectives of one tensor, one after the other."""


@described("pipe")
class PipeStruct(ctypes.Structure):
    """One direction between two ranks."""


@described("message")
class MessageCall(ctypes.Structure):
    """A message that a thread waits for."""


class Library:
    """The functions of native.c and calls.c."""

    def __init__(self, path: Path) -> None:
        long, short = ctypes.CDLL(str(path)), ctypes.PyDLL(str(path))
        if int(long.hora_source_checksum()) & 0xFFFFFFFF != zlib.crc32(_sources()):  # as in hatch_build.py
            raise OSError(f"{path.name} was built from another source: build it anew with `pip install -e .`")
        self.has_float16 = bool(long.hora_has_f16())
        # Functions that wait release the GIL (`long`). What only takes a moment keeps it (`short`).
        reduce = "pointer int32 pointer pointer int64"
        self._long_reduce, self._short_reduce = (_function(kind, "reduce", reduce) for kind in (long, short))
        self._everywhere = _function(long, "reduce_everywhere", "pointer int32 pointer int64 int64")
        # 0 after a slice of time without completion: call again.
        self.collective = _function(long, "collective", "pointer int64", "int32")
        self.between_hosts = _function(long, "between_hosts", "pointer int64", "int32")
        # 1: all members have arrived, 2: and one has joined, 0: a member is missing.
        self.meet, self.wait_for = (
            _function(long, name, "pointer int64 pointer int64", "int32") for name in ("meet", "wait_for")
        )
        self.publish, self.wake = _function(short, "publish", "pointer int64"), _function(short, "wake", "pointer")
        self.fence, self.nudge = _function(short, "fence", ""), _function(short, "nudge", "pointer")
        self.add = _function(short, "add", "pointer int64", "int64")
        # -1: the members' calls differ, 0: a member is missing, 1: done, 2: agreed, in progress.
        self.repeated = _function(long, "repeated", "pointer int64", "int32")
        self.begin = _function(short, "begin", "pointer pointer pointer pointer int64")
        self.settle = _function(short, "settle", "pointer pointer", "int32")
        self._function = _function(short, "function", "int32 object", "object")
        self.pipe_move = _function(long, "pipe_move", "pointer pointer int64 int32", "int64")
        self.message = _function(long, "message", "pointer int64", "int32")
        self.try_send, self.short_try_send = (_function(kind, "try_send", "pointer", "int32") for kind in (long, short))
        self.try_receive = _function(long, "try_receive", "pointer", "int32")

    def function(self, name: str, known: tuple[Any, ...] = ()) -> Any:
        """Return a function of calls.c, with what it knows from the start."""
        return self._function(_FUNCTIONS.index(name), known)

    def sums(self, dtype: torch.dtype) -> bool:
        """Return whether the library can sum this dtype on this processor."""
        return dtype in DTYPE_NUMBERS and (dtype is not torch.float16 or self.has_float16)

    def reduction(self, what: Sum, operands: Sequence[torch.Tensor], out: torch.Tensor) -> Callable[[], None]:
        """Return a function that sums flat tensors in order into `out`, which may be one of them.

        The caller keeps the tensors.
        """
        num_operands, pointers = len(operands), addresses(operands)
        call = self._short_reduce if out.nbytes <= SHORT_BYTES else self._long_reduce
        return partial(call, ctypes.pointer(what), num_operands, pointers, out.data_ptr(), out.numel())

    def reduction_everywhere(
        self, what: Sum, members: Sequence[torch.Tensor], begin: int, end: int
    ) -> Callable[[], None]:
        """Return a function that sums elements `begin` to `end` of all members' flat tensors into all of them."""
        pointers = addresses(members)
        return partial(self._everywhere, ctypes.pointer(what), len(members), pointers, begin, end - begin)


def addresses(tensors: Sequence[torch.Tensor]) -> ctypes.Array[ctypes.c_void_p]:
    """Return the addresses of the tensors' data, for a native call."""
    return (ctypes.c_void_p * len(tensors))(*[tensor.data_ptr() for tensor in tensors])


@lru_cache(maxsize=1)
def load() -> Library | str:
    """Return the library, or why there is none; it is loaded once."""
    if not EngineConfig.from_env().native:
        return "HORA_NATIVE=0"
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "aarch64"):
        return f"it is for Linux on x86_64 and aarch64, and this is {platform.machine()} with {sys.platform}"
    if not _PATH.exists():
        return "there was no C compiler when Hora was installed, or it was told not to use one"
    try:
        return Library(_PATH)
    except (OSError, AttributeError) as error:
        return str(error)


def library() -> Library | None:
    """Return the library of this process, if there is one."""
    found = load()
    return found if isinstance(found, Library) else None


def native_part() -> Library:
    """Return the same where the ranks have agreed that all of them have it."""
    found = library()
    assert found is not None, absence()
    return found


def absence() -> str | None:
    """Return why there is no library; None if there is one."""
    found = load()
    return found if isinstance(found, str) else None
