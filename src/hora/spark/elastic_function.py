"""Elastic functions: those that train with `hvd.elastic.run`, and so go on when ranks come and go.

`HorovodRunner` has no argument for it (its signature is fixed), so a function says it by itself: outright, with an
attribute (`main.elastic = True`, or `False`), or by its code, which uses `hvd.elastic` and one of its states. The code
is read, never called; what stands in strings, comments and data does not count.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["is_elastic"]

_ELASTIC_ROOM = "hora.torch.elastic"


def is_elastic(main: Callable[..., Any], kwargs: Mapping[str, Any] | None = None) -> bool:
    """Return whether `main(**kwargs)`, or a function of its module that it uses, drives an elastic loop."""
    declared = getattr(main, "elastic", None)
    if isinstance(declared, bool):
        return declared
    names: set[str] = set()
    home = {function.__module__ for function in _functions(main)}
    waiting: list[object] = [main, *(kwargs or {}).values()]
    read: set[types.CodeType] = set()
    while waiting:
        value = waiting.pop()
        if _is_ours(value):
            names.add("elastic")
        for function in _functions(value):
            if function.__code__ not in read and function.__module__ in home:
                read.add(function.__code__)
                used = set(_used(function.__code__))
                names |= {part for name in used for part in name.split(".")}
                waiting += [function.__globals__[name] for name in used if name in function.__globals__]
                waiting += [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
    return "elastic" in names and any(name.endswith("State") for name in names)


def _is_ours(value: object) -> bool:
    """Return whether this is something of `hvd.elastic`, or a function that its decorator has wrapped."""
    if isinstance(value, types.FunctionType):
        defined_in = value.__globals__.get("__name__")
    elif isinstance(value, types.ModuleType):
        defined_in = value.__name__
    else:  # not asked of the object itself: it may be anything, and answer anything
        defined_in = (value if isinstance(value, type) else type(value)).__module__
    return str(defined_in).startswith(_ELASTIC_ROOM)


def _functions(value: object) -> Iterator[types.FunctionType]:
    """The Python functions that a call of this value may run: itself, what it wraps, the methods of its class."""
    if isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _functions(part)
    elif isinstance(value, types.MethodType):
        yield from _functions(value.__func__)
        yield from _functions(type(value.__self__))
    elif isinstance(value, types.FunctionType):
        yield value
        yield from _functions(getattr(value, "__wrapped__", None))
    elif callable(value):
        kind = value if isinstance(value, type) else type(value)
        yield from (method for method in vars(kind).values() if isinstance(method, types.FunctionType))


def _used(code: types.CodeType) -> Iterator[str]:
    """The names of globals, attributes and imports in a function's code and in those defined within it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _used(constant)


def _is_filled(cell: types.CellType) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:  # a variable that has no value yet
        return False
