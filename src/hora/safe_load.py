"""A safe reader of pickles and of `torch.save` files: runs no code of the file, with any version of torch.

It is the pickle machine of the standard library, reduced to the opcodes that data needs: it builds tensors, arrays and
plain values, and calls nothing that a file names. A name is a value (a dtype), an object that this module creates from
checked arguments (a tensor), a class whose instances get attributes (`Vocabulary.instance_class`), or a foreign name,
which is recorded and never looked up. It uses neither torch.load nor torch's list of safe globals: torch and other
libraries put classes there whose constructors open connections. What it builds is limited in proportion to the file.
"""

from __future__ import annotations

import collections
import io
import math
import pickle
import re
import struct
import sys
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

import numpy as np
import torch

_MAX_DIMENSIONS = 64
_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_ARRAY_TYPE = re.compile(r"[<>|=]?(?:[biufc][0-9]{1,2}|[SU][0-9]{1,9})")  # no objects and no records
# A pickle can refer to one list or array again and again and have each copied: the copies of a file are limited.
_COPIES_PER_BYTE, _MIN_COPIES = 16, 1 << 20

# Errors of Python, NumPy and torch for bytes that are no pickle or archive, or a wrong one.
_MALFORMED = (
    IndexError, KeyError, TypeError, AttributeError, UnicodeError, ArithmeticError, RuntimeError, EOFError, MemoryError,
    AssertionError, struct.error, pickle.UnpicklingError,
)  # fmt: skip

Name = tuple[str, str]  # module and name in it


class ForeignError(ValueError):
    """A file contains more than data: `names` of classes and functions that it needs to be read."""

    def __init__(self, names: Iterable[str]) -> None:
        self.names = tuple(dict.fromkeys(names))
        super().__init__(", ".join(self.names))


@dataclass
class Foreign:
    """Placeholder for an unknown name in a file, or for a call of it."""

    module: str
    name: str
    args: tuple[Any, ...] = ()

    def __hash__(self) -> int:
        return id(self)

    def append(self, *items: Any) -> None:
        """Ignore the items of a container of an unknown class."""

    extend = add = __setitem__ = append


@dataclass(frozen=True)
class Vocabulary:
    """Names that a file may use besides those of plain data and tensors.

    Each function takes a module and a name and returns None for an unknown one.
    """

    # A class whose instances may occur: created without its constructor, then given their attributes
    instance_class: Callable[[str, str], type | None] = lambda module, name: None
    value: Callable[[str, str], Any] = lambda module, name: None  # an object that the file may refer to
    # A class or function of the user that the file may call
    trusted: Callable[[str, str], Any] = lambda module, name: None


@dataclass
class Loaded:
    """The object of a file."""

    value: Any  # with `Foreign` objects for foreign names
    foreign: list[Foreign] = field(default_factory=list)  # those names

    def plain(self) -> Any:
        """Return the object. Raises ForeignError if it contains foreign names."""
        if self.foreign:
            raise ForeignError(_names(self.foreign))
        return self.value

    def without(self, *keys: str) -> Loaded:
        """Return the dictionary without these keys, and the foreign names that remain in its containers."""
        if not isinstance(self.value, dict):
            raise ValueError(f"it holds a {type(self.value).__qualname__}, not a dictionary")
        kept = {key: value for key, value in self.value.items() if key not in keys}
        return Loaded(kept, _foreign_in(kept))


def load_pickle(data: bytes, vocabulary: Vocabulary | None = None, *, encoding: str = "ascii") -> Loaded:
    """Read a pickle. Raises ValueError if it is malformed. `encoding`: of Python 2's strings (`bytes`: unchanged)."""
    return _Machine(io.BytesIO(data), vocabulary, encoding=encoding).loaded()


def load_torch(file: bytes | IO[bytes]) -> Loaded:
    """Read a file of `torch.save`, on the CPU. Raises ValueError if it is malformed."""
    opened: IO[bytes] = io.BytesIO(file) if isinstance(file, bytes) else file
    try:
        is_archive = zipfile.is_zipfile(opened)
        opened.seek(0)
        if not is_archive:
            return _load_legacy(opened)
        num_bytes = _left(opened)
        with zipfile.ZipFile(opened) as archive:
            return _load_archive(archive, num_bytes)
    except (*_MALFORMED, zipfile.BadZipFile) as error:
        raise ValueError(f"this is not a file of torch.save: {error!r}") from error


def _load_archive(archive: zipfile.ZipFile, num_bytes: int) -> Loaded:
    entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries.values()):
        raise ValueError("this is not a file of torch.save: it is compressed")
    # Python before 3.11.8 reads entries that overlap, each of them as long as the file.
    if sum(entry.file_size for entry in archive.infolist()) > num_bytes:
        raise ValueError("this is not a file of torch.save: its entries overlap")
    order = archive.read(entries["byteorder"]) if "byteorder" in entries else b"little"
    if order != sys.byteorder.encode():
        raise ValueError(f"it was saved on a machine with another byte order ({order!r})")
    flat: dict[str, torch.Tensor] = {}

    def storage(saved: Any) -> _Storage:
        if not isinstance(saved, tuple) or len(saved) != 5 or saved[0] != "storage":
            raise ValueError("it refers to something that is not a storage")
        _, dtype, key, _, num_elements = saved
        if key not in flat:
            flat[key] = _flat(archive.read(entries[f"data/{key}"]), dtype, num_elements)
        if flat[key].dtype != dtype:
            raise ValueError("two storages have one key")
        return _Storage(flat[key])

    return _Machine(io.BytesIO(archive.read(entries["data.pkl"])), persistent=storage).loaded()


def _load_legacy(file: IO[bytes]) -> Loaded:
    """Read the format before torch 1.6, in which pickles also contain each tensor's storage."""
    flat: dict[str, torch.Tensor] = {}

    def storage(saved: Any) -> _Storage:
        if not isinstance(saved, tuple) or len(saved) != 6 or saved[0] != "storage" or saved[5] is not None:
            raise ValueError("it refers to something that is not its own storage")
        _, dtype, key, _, num_elements, _ = saved
        if key not in flat:
            _check_storage(dtype, num_elements)
            declared = sum(one.nbytes for one in flat.values()) + num_elements * dtype.itemsize
            if declared > _left(file):
                raise ValueError("a storage has fewer bytes than it declares")
            flat[key] = torch.empty(num_elements, dtype=dtype, device="cpu")
        return _Storage(flat[key])

    def plain() -> Any:
        return _Machine(file).loaded().plain()

    if plain() != _LEGACY_MAGIC:
        raise ValueError("this is not a file of torch.save")
    plain()  # the version, then the machine
    if plain().get("little_endian") is not (sys.byteorder == "little"):
        raise ValueError("it was saved on a machine with another byte order")
    loaded = _Machine(file, persistent=storage).loaded()
    for key in plain():
        if key not in flat:
            raise ValueError("it holds a storage to which nothing refers")
        dtype, num_elements = flat[key].dtype, flat[key].numel()
        if int.from_bytes(file.read(8), "little") != num_elements:
            raise ValueError("a storage has another size than it declares")
        flat[key].copy_(_flat(file.read(num_elements * dtype.itemsize), dtype, num_elements))
    return loaded


def _left(file: IO[bytes]) -> int:
    here = file.tell()
    end = file.seek(0, io.SEEK_END)
    file.seek(here)
    return end - here


# ---- tensors ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Storage:
    flat: torch.Tensor


_STORAGES = {
    "UntypedStorage": torch.uint8,  # bytes, interpreted by the tensor
    "DoubleStorage": torch.float64, "FloatStorage": torch.float32, "HalfStorage": torch.float16,
    "BFloat16Storage": torch.bfloat16, "LongStorage": torch.int64, "IntStorage": torch.int32,
    "ShortStorage": torch.int16, "CharStorage": torch.int8, "ByteStorage": torch.uint8, "BoolStorage": torch.bool,
    "ComplexDoubleStorage": torch.complex128, "ComplexFloatStorage": torch.complex64,
}  # fmt: skip


def _check_storage(dtype: Any, num_elements: Any) -> None:
    if not isinstance(dtype, torch.dtype):
        raise ValueError("a storage has no type")
    _check_counts((num_elements,))


def _flat(data: bytes, dtype: Any, num_elements: Any) -> torch.Tensor:
    _check_storage(dtype, num_elements)
    if len(data) != num_elements * dtype.itemsize:
        raise ValueError(f"a storage of {num_elements} {dtype} has {len(data)} bytes")
    return torch.frombuffer(bytearray(data), dtype=dtype) if data else torch.empty(0, dtype=dtype, device="cpu")


def _check_counts(numbers: Any) -> None:
    if not isinstance(numbers, tuple) or len(numbers) > _MAX_DIMENSIONS:
        raise ValueError("a shape is invalid")
    if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
        raise ValueError("a shape contains something other than sizes")


def _tensor(storage: Any, offset: Any, size: Any, stride: Any, requires_grad: Any, hooks: Any, *rest: Any) -> Any:
    """Build the tensor of `torch._utils._rebuild_tensor_v2`, within the storage's bounds."""
    if not isinstance(storage, _Storage) or any(rest) or hooks:
        raise ValueError("a tensor has no storage, or hooks")
    flat = storage.flat
    for numbers in ((offset,), size, stride):
        _check_counts(numbers)
    if len(size) != len(stride):
        raise ValueError("a tensor's shape and strides differ")
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True)) if math.prod(size) else offset - 1
    if last >= flat.numel():
        raise ValueError("a tensor reaches beyond its storage")
    return flat.as_strided(size, stride, offset).requires_grad_(bool(requires_grad))


def _tensor_of_type(
    storage: Any, offset: Any, size: Any, stride: Any, grad: Any, hooks: Any, dtype: Any, *rest: Any
) -> Any:
    """Build the tensor of `torch._utils._rebuild_tensor_v3`, whose storage holds bytes."""
    if not isinstance(storage, _Storage) or not isinstance(dtype, torch.dtype):
        raise ValueError("a tensor has no storage, or no type")
    flat = storage.flat.view(torch.uint8)
    whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
    return _tensor(_Storage(whole), offset, size, stride, grad, hooks, *rest)


def _parameter(data: Any, requires_grad: Any, hooks: Any, *rest: Any) -> Any:
    if type(data) is not torch.Tensor or hooks or rest:
        raise ValueError("a parameter is not a tensor, or has hooks")
    return torch.nn.Parameter(data, requires_grad=bool(requires_grad))


def _storage_from_bytes(data: Any) -> _Storage:
    """Build the storage of `torch.storage._load_from_bytes` inside a plain pickle."""
    if not isinstance(data, bytes):
        raise ValueError("a storage is not bytes")
    found = load_torch(data).plain()
    if not isinstance(found, _Storage):
        raise ValueError("a storage is invalid")
    return found


# ---- arrays of NumPy --------------------------------------------------------------------------------------


@dataclass
class _DType:
    code: str
    order: str = "="

    def numpy(self) -> np.dtype[Any]:
        found = np.dtype(self.code) if _ARRAY_TYPE.fullmatch(self.code) else None
        if found is None or not found.itemsize:
            raise ValueError(f"an array of {self.code[:100]!r} is not plain data")
        return found.newbyteorder("<" if self.order == "<" else ">") if self.order in "<>" else found


def _dtype(code: Any, *rest: Any) -> _DType:
    if not isinstance(code, str | bytes):
        raise ValueError("a type of arrays has no name")
    made = _DType(code if isinstance(code, str) else code.decode())
    try:
        made.numpy()
    except TypeError as error:
        raise ValueError(f"a type of arrays is unknown: {error}") from error
    return made


class _PendingArray:
    """Placeholder for a NumPy array before its state is known."""

    number: int | None = None  # in the memo


def _array(dtype: Any, shape: Any, data: Any, order: str) -> Any:
    _check_counts(shape)
    if not isinstance(dtype, _DType) or not isinstance(data, bytes | bytearray):
        raise ValueError("an array contains something other than numbers")
    found, num_elements = dtype.numpy(), math.prod(shape)
    if num_elements * found.itemsize != len(data) or len(shape) > 32:
        raise ValueError("an array has another size than its data")
    flat = np.frombuffer(bytes(data), dtype=found, count=num_elements) if data else np.empty(num_elements, found)
    return flat.reshape(shape, order="F" if order == "F" else "C").copy()


def _scalar(dtype: Any, data: Any = b"") -> Any:
    return _array(dtype, (), data, "C")[()]


def _array_from_buffer(data: Any, dtype: Any, shape: Any, order: Any, axes: None = None) -> Any:
    if axes is not None or order not in ("C", "F"):
        raise ValueError("an array has another order than C's or Fortran's")
    return _array(dtype, shape, data, order)


# ---- names of plain data ----------------------------------------------------------------------------------


def _typed(make: Callable[..., Any], *kinds: tuple[type, ...]) -> Callable[..., Any]:
    """Return a constructor that takes arguments of these types, at most one of each."""

    def made(*args: Any) -> Any:
        if len(args) > len(kinds) or any(type(arg) not in kind for arg, kind in zip(args, kinds, strict=False)):
            raise ValueError(f"{make.__name__} is called with invalid arguments")
        return make(*args)

    return made


def _ordered(*args: Any) -> collections.OrderedDict[Any, Any]:
    return collections.OrderedDict(_typed(list, (list, tuple))(*args))


def _default(*args: Any) -> collections.defaultdict[Any, Any]:
    if len(args) != 1 or args[0] not in (None, list, dict, set, int, float):
        raise ValueError("a defaultdict has a factory that is none of list, dict, set, int, float")
    return collections.defaultdict(args[0])


def _size(sizes: Any = ()) -> torch.Size:
    _check_counts(sizes)
    return torch.Size(sizes)


def _reconstructed(kind: Any, *rest: Any) -> _PendingArray:
    if kind is not np.ndarray:
        raise ValueError("an array is of another class")
    return _PendingArray()


def _with_attributes(make: Any, kind: Any, args: Any, state: Any) -> Any:
    """Build the tensor of `torch._tensor._rebuild_from_type_v2`, without its attributes."""
    if make is not _TENSOR or kind is not torch.Tensor or type(args) is not tuple:
        raise ValueError("a tensor is of another class")
    return _tensor(*args)


def _from_latin(text: Any, encoding: Any) -> bytes:
    """Decode Python 3's bytes in the protocols of Python 2: `_codecs.encode(text, "latin1")`."""
    if not isinstance(text, str) or encoding != "latin1":
        raise ValueError("bytes are encoded in another way than pickle does it")
    return text.encode("latin1")


_INTEGERS, _SEQUENCE = (int, type(None)), (list, tuple, set, frozenset)

# Classes that a file may refer to, and call with these arguments.
_CLASSES: dict[type, Callable[..., Any]] = {
    list: _typed(list, _SEQUENCE),
    tuple: _typed(tuple, _SEQUENCE),
    set: _typed(set, _SEQUENCE),
    frozenset: _typed(frozenset, _SEQUENCE),
    dict: _typed(dict),
    int: _typed(int, (int,)),
    float: _typed(float, (int, float)),
    complex: _typed(complex, (int, float), (int, float)),
    slice: _typed(slice, _INTEGERS, _INTEGERS, _INTEGERS),
    range: _typed(range, (int,), (int,), (int,)),
    bytes: _typed(bytes),
    bytearray: _typed(bytearray, (bytes,)),
    collections.OrderedDict: _ordered,
    collections.defaultdict: _default,
    torch.Size: _size,
    torch.device: _typed(torch.device, (str,), (int,)),
    np.dtype: _dtype,
}


class _Function:
    """A function that a file names: this module's `make` replaces it. Nothing else can call it."""

    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make


_TENSOR = _Function(_tensor)
_NAMES: dict[Name, Any] = {
    **{(module, kind.__name__): kind for kind in _CLASSES for module in (kind.__module__, "__builtin__")},
    ("__builtin__", "xrange"): range,
    ("__builtin__", "long"): int,
    ("_codecs", "encode"): _Function(_from_latin),
    ("torch", "Tensor"): torch.Tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _TENSOR,
    ("torch._utils", "_rebuild_tensor_v3"): _Function(_tensor_of_type),
    ("torch._utils", "_rebuild_parameter"): _Function(_parameter),
    ("torch._utils", "_rebuild_parameter_with_state"): _Function(lambda *args: _parameter(*args[:3])),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_with_attributes),
    ("torch.storage", "_load_from_bytes"): _Function(_storage_from_bytes),
    **{(module, name): dtype for name, dtype in _STORAGES.items() for module in ("torch", "torch.storage")},
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype | torch.layout)},
    ("numpy", "dtype"): np.dtype,
    ("numpy", "ndarray"): np.ndarray,
    **{(f"numpy.{core}.multiarray", "_reconstruct"): _Function(_reconstructed) for core in ("core", "_core")},
    **{(f"numpy.{core}.multiarray", "scalar"): _Function(_scalar) for core in ("core", "_core")},
    **{(f"numpy.{core}.numeric", "_frombuffer"): _Function(_array_from_buffer) for core in ("core", "_core")},
}


# ---- the machine ------------------------------------------------------------------------------------------

# Opcodes that create values, and those that only move them.
_PLAIN = (
    "PROTO FRAME STOP NONE NEWTRUE NEWFALSE INT BININT BININT1 BININT2 LONG LONG1 LONG4 FLOAT BINFLOAT STRING "
    "BINSTRING SHORT_BINSTRING UNICODE BINUNICODE SHORT_BINUNICODE BINUNICODE8 BINBYTES SHORT_BINBYTES BINBYTES8 "
    "EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST LIST EMPTY_DICT DICT EMPTY_SET FROZENSET MARK POP POP_MARK DUP "
    "GET BINGET LONG_BINGET PUT BINPUT LONG_BINPUT MEMOIZE GLOBAL STACK_GLOBAL BINPERSID"
)
_DICTIONARIES = (dict, collections.OrderedDict, collections.defaultdict, Foreign)
# Opcodes that fill a container: where it is, and of which class it must be.
_FILLING: dict[str, tuple[Callable[[Any], Any], tuple[type, ...]]] = {
    "APPEND": (lambda machine: machine.stack[-2], (list, Foreign)),
    "APPENDS": (lambda machine: machine.metastack[-1][-1], (list, Foreign)),
    "SETITEM": (lambda machine: machine.stack[-3], _DICTIONARIES),
    "SETITEMS": (lambda machine: machine.metastack[-1][-1], _DICTIONARIES),
    "ADDITEMS": (lambda machine: machine.metastack[-1][-1], (set, Foreign)),
}
_Unpickler: Any = pickle._Unpickler  # in Python, with a table of its opcodes


def _code(name: str) -> int:
    return int(getattr(pickle, name)[0])


def _filling(name: str) -> Callable[[Any], None]:
    (find, classes), fill = _FILLING[name], _Unpickler.dispatch[_code(name)]

    def checked(machine: Any) -> None:
        if type(find(machine)) not in classes:
            raise ValueError("something other than a list, a dictionary or a set is filled")
        fill(machine)

    return checked


class _Memo(dict[int, Any]):
    """The objects that a pickle refers to by their numbers; an array's placeholder knows its number."""

    def __setitem__(self, number: int, value: Any) -> None:
        if isinstance(value, _PendingArray):
            value.number = number
        super().__setitem__(number, value)


class _Machine(_Unpickler):
    """The part of pickle's machine that data needs. Stack and memo hold values, which are never called."""

    dispatch = {_code(name): _Unpickler.dispatch[_code(name)] for name in _PLAIN.split()} | {
        _code(name): _filling(name) for name in _FILLING
    }

    def __init__(
        self,
        file: IO[bytes],
        vocabulary: Vocabulary | None = None,
        *,
        persistent: Callable[[Any], Any] | None = None,
        encoding: str = "ascii",
    ) -> None:
        super().__init__(file, encoding=encoding)
        self.memo = _Memo()
        self.foreign: list[Foreign] = []
        self._vocabulary, self._persistent = vocabulary or Vocabulary(), persistent
        self._room = _COPIES_PER_BYTE * _left(file) + _MIN_COPIES

    def loaded(self) -> Loaded:
        """Return the object of the pickle that begins here. Raises ValueError for anything else."""
        try:
            return Loaded(self.load(), self.foreign)
        except _MALFORMED as error:
            raise ValueError(f"this pickle is malformed, or uses what data does not need: {error!r}") from error

    def persistent_load(self, saved: Any) -> Any:
        if self._persistent is None:
            raise ValueError("this pickle refers to another file")
        return self._persistent(saved)

    def _bytearray(self) -> None:
        self.append(bytearray(self.read(int.from_bytes(self.read(8), "little"))))

    # ---- names, and what a file does with them --------------------------------------------------------------

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _NAMES:
            return _NAMES[module, name]
        for known in (self._vocabulary.trusted, self._vocabulary.value, self._vocabulary.instance_class):
            found = known(module, name)
            if found is not None:
                return found
        return self._note(Foreign(module, name))

    def _note(self, foreign: Foreign) -> Foreign:
        self.foreign.append(foreign)
        return foreign

    def _reduce(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(args) is not tuple:
            raise ValueError("arguments are not a tuple")
        self.append(self._copied(self._called(function, args)))

    def _copied(self, value: Any) -> Any:
        """Count the memory of a value that a call has made, so that a small file cannot take much."""
        self._room -= _num_bytes(value)
        if self._room < 0:
            raise ValueError("it has the same data copied again and again, which needs far more memory than the file")
        return value

    def _called(self, function: Any, args: tuple[Any, ...]) -> Any:
        if any(isinstance(one, Foreign) for one in (function, *args)):
            whole = function if isinstance(function, Foreign) else Foreign("", "")
            return self._note(Foreign(whole.module, whole.name, args))
        if isinstance(function, _Function):
            return function.make(*args)
        if isinstance(function, type) and function in _CLASSES:
            return _CLASSES[function](*args)
        if _is(function, self._vocabulary.trusted):
            return function(*args)
        raise ValueError(f"it calls {getattr(function, '__qualname__', function)!r}, which data does not need")

    def _newobj(self) -> None:
        args, cls = self.stack.pop(), self.stack.pop()
        if _is(cls, self._vocabulary.trusted):
            self.append(cls.__new__(cls, *args))
        elif args == () and _is(cls, self._vocabulary.instance_class):
            self.append(cls.__new__(cls))
        else:
            self.append(self._copied(self._called(cls, args)))

    def _newobj_ex(self) -> None:
        if self.stack.pop() != {}:
            raise ValueError("an instance is created with keyword arguments, which data does not need")
        self._newobj()

    def _build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, Foreign):
            return
        if isinstance(target, _PendingArray):
            self.stack[-1] = made = self._copied(_array_of_state(state))
            if target.number is not None:
                self.memo[target.number] = made
        elif isinstance(target, _DType):
            if type(state) is not tuple or len(state) < 2 or state[1] not in ("<", ">", "=", "|"):
                raise ValueError("a type of arrays has another state")
            if any(one not in (None, -1, 0) for one in state[2:7]) and np.dtype(target.code).kind not in "SU":
                raise ValueError("a type of arrays has fields")
            target.order = state[1]
        elif type(target) is collections.OrderedDict:
            # The versions of a state_dict's modules. No other attributes are needed.
            if type(state) is dict and type(state.get("_metadata")) is collections.OrderedDict:
                target._metadata = state["_metadata"]  # type: ignore[attr-defined]
        elif _is(type(target), self._vocabulary.trusted):
            _set_attributes(target, state)
        elif _is(type(target), self._vocabulary.instance_class):
            _check_state(target, state)
            _set_attributes(target, state)
        else:
            raise ValueError(f"a {type(target).__qualname__} has a state, which data does not need")

    dispatch |= {_code("BYTEARRAY8"): _bytearray, _code("REDUCE"): _reduce, _code("BUILD"): _build}
    dispatch |= {_code("NEWOBJ"): _newobj, _code("NEWOBJ_EX"): _newobj_ex}


def _num_bytes(value: Any) -> int:
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, _Storage):
        return value.flat.nbytes
    if isinstance(value, bytes | bytearray):
        return len(value)
    return 8 * len(value) if isinstance(value, list | tuple | set | frozenset | dict) else 0


def _is(value: Any, known: Callable[[str, str], Any]) -> bool:
    """Return whether a value is what is known under its name."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    return isinstance(module, str) and isinstance(name, str) and known(module, name) is value


def _array_of_state(state: Any) -> Any:
    if type(state) is not tuple or len(state) != 5:
        raise ValueError("an array has another state")
    _, shape, dtype, fortran, data = state
    return _array(dtype, shape, data, "F" if fortran else "C")


def _check_state(target: Any, state: Any) -> None:
    """Raise ValueError for a state that is more than attributes of an instance."""
    kind = type(target).__qualname__
    if not isinstance(state, Mapping) or any(type(name) is not str for name in state):
        raise ValueError(f"the state of a {kind} is not a dictionary")
    if any(callable(getattr(type(target), name, None)) for name in state):
        raise ValueError(f"a {kind} of this file has other methods than its class")
    if any(name.endswith("_hooks") and value for name, value in state.items()):
        raise ValueError(f"a {kind} of this file has hooks")


def _set_attributes(target: Any, state: Any) -> None:
    """Set the attributes as pickle does. `__setstate__` is the class's own."""
    if hasattr(type(target), "__setstate__"):
        target.__setstate__(state)
    else:
        target.__dict__.update(state)


def _foreign_in(value: Any) -> list[Foreign]:
    found, seen, left = [], set(), [value]
    while left:
        one = left.pop()
        if isinstance(one, Foreign):
            found.append(one)
        elif isinstance(one, dict | list | tuple | set | frozenset) and id(one) not in seen:
            seen.add(id(one))
            left.extend((*one, *one.values()) if isinstance(one, dict) else one)
    return found


# Helpers by which cloudpickle rebuilds a notebook's definitions, and the position of the name in their arguments.
_BY_VALUE: dict[str, Callable[..., tuple[Any, Any]]] = {
    "_make_skeleton_class": lambda kind, name, bases, members, *rest: (members.get("__module__", "__main__"), name),
    "_make_skeleton_enum": lambda bases, name, qualname, members, module, *rest: (module, name),
    "_make_function": lambda code, namespace, name, *rest: (
        namespace.get("__name__", "__main__"),
        name or code.args[11],
    ),
}


def _names(foreign: list[Foreign]) -> list[str]:
    """Return the names to report: first those that cloudpickle hides in arguments."""
    for one in foreign:
        if "cloudpickle" in one.module.split(".") and one.name in _BY_VALUE and one.args:
            try:
                module, name = _BY_VALUE[one.name](*one.args)
            except (TypeError, AttributeError, IndexError):
                break
            if isinstance(module, str) and isinstance(name, str):
                return [f"{module}.{name}"]
    if any("cloudpickle" in one.module.split(".") for one in foreign):
        return ["a class or function of its own"]
    return [f"{one.module}.{one.name}" for one in foreign if one.module]
