"""Pickling of a function call and its outcome, with clear errors for objects that cannot be pickled.

Only members of the job unpickle them.
"""

from __future__ import annotations

import io
import linecache
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle

_MAX_CELL_LINES = 2000


def pickle_call(
    function: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """Return the cloudpickle of `(function, args, kwargs)`. TypeError names what cannot be pickled, and the remedy."""
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple or a list of positional arguments, but it is {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of keyword arguments, but it is {kwargs!r}")
    try:
        call = (function, tuple(args), dict(kwargs or {}))
        pickled = _pickled(call)
        cells = _cells_in(pickled)
        return _pickled(_WithCells(call, cells)) if cells else pickled
    except Exception as error:  # a user's object may raise anything
        raise TypeError(
            f"the function and its arguments cannot be sent to the workers: {error}. What cannot be pickled (a lock, "
            "an open file, a connection) has to be made inside the function, not passed to it or used from outside"
        ) from error


def _pickled(value: object) -> bytes:
    file = io.BytesIO()
    _CallPickler(file).dump(value)
    return file.getvalue()


def _cells_in(pickled: bytes) -> dict[str, list[str]]:
    """Return the source of the notebook's cells whose functions are in this pickle: no rank finds it on a disk."""
    cached = [(name, entry[2]) for name, entry in linecache.cache.items() if len(entry) > 2]
    return {
        name: list(lines)
        for name, lines in cached
        if len(lines) <= _MAX_CELL_LINES and name.encode() in pickled and not os.path.exists(name)
    }


class _WithCells:
    """Unpickles as the call, after its cells have become known to tracebacks."""

    def __init__(self, call: tuple[Any, ...], cells: dict[str, list[str]]) -> None:
        self._parts = call, cells

    def __reduce__(self) -> tuple[Callable[..., tuple[Any, ...]], tuple[Any, ...]]:
        return _know_cells, self._parts


def _know_cells(call: tuple[Any, ...], cells: dict[str, list[str]]) -> tuple[Any, ...]:
    for name, lines in cells.items():
        linecache.cache[name] = (sum(map(len, lines)), None, lines, name)
    return call


class _CallPickler(cloudpickle.Pickler):
    """Pickles broadcast variables of Spark with their values: ranks are no Python workers of Spark, which get those."""

    def reducer_override(self, value: Any) -> Any:
        kind = type(value)
        if not kind.__module__.startswith("pyspark."):
            return super().reducer_override(value)
        if kind.__name__ == "Broadcast":
            return _broadcast, (value.value,)
        if kind.__name__ == "Accumulator":
            raise ValueError(
                "ranks cannot add to an accumulator of Spark. Return the number from the function instead, or sum it "
                "over the ranks with hvd.allreduce(…, op=hvd.Sum)"
            )
        return super().reducer_override(value)


def _broadcast(value: Any) -> Any:
    """Return a broadcast variable that has this value."""
    from pyspark import Broadcast

    made = Broadcast.__new__(Broadcast)
    vars(made).update(_value=value, _path=None, _jbroadcast=None)
    return made


def pickle_result(result: Any, *, rank: int) -> bytes:
    """Return the cloudpickle of the function's result. TypeError as above."""
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # as above
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise TypeError(
            f"the value that the function returned on rank {rank}, a {kind}, cannot be pickled ({error}); return "
            "something that can, for example numbers, arrays or a state_dict"
        ) from None


def pickle_exception(error: BaseException) -> bytes:
    """Return the cloudpickle of an exception, even if its `__init__` takes other arguments than its base's."""
    pickled = bytes(cloudpickle.dumps(error))
    try:
        cloudpickle.loads(pickled)
    except Exception:  # as above
        pickled = bytes(cloudpickle.dumps(_Exhibit(error)))
        cloudpickle.loads(pickled)
    return pickled


class _Exhibit:
    """Unpickles as the exception, without calling its `__init__`."""

    def __init__(self, error: BaseException) -> None:
        self._parts = type(error), error.args, vars(error)

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
        return _restore, self._parts


def _restore(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error
