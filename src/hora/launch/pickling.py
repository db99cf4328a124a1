"""A call and its outcome on their way between processes: what is pickled, and what to tell when it cannot be.

Calls are made by `run`, `HorovodRunner` and the like, outcomes by `worker`. Only members of the job read them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import cloudpickle

__all__ = ["pickle_call", "pickle_exception", "pickle_result"]


def pickle_call(
    function: Callable[..., Any], args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None
) -> bytes:
    """The cloudpickle of `(function, args, kwargs)`. TypeError says what cannot travel and what to do about it."""
    if isinstance(args, str | bytes) or not isinstance(args, Iterable):
        raise TypeError(f"args must be a tuple or a list of positional arguments, but it is {args!r}")
    if kwargs is not None and not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs must be a dict of keyword arguments, but it is {kwargs!r}")
    try:
        return bytes(cloudpickle.dumps((function, tuple(args), dict(kwargs or {}))))
    except Exception as error:  # whatever a user's object does when it is pickled
        raise TypeError(
            f"the function and its arguments cannot be sent to the workers: {error}. What cannot be pickled (a lock, "
            "an open file, a connection) has to be made inside the function, not passed to it or used from outside"
        ) from error


def pickle_result(result: Any, *, rank: int) -> bytes:
    """The cloudpickle of what the function returned. TypeError as above."""
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:  # as above
        kind = f"{type(result).__module__}.{type(result).__qualname__}"
        raise TypeError(
            f"the value that the function returned on rank {rank}, a {kind}, cannot be pickled ({error}); return "
            "something that can, for example numbers, arrays or a state_dict"
        ) from None


def pickle_exception(error: BaseException) -> bytes:
    """The cloudpickle of an exception, also of one whose `__init__` does not take what it passed on to its base."""
    pickled = bytes(cloudpickle.dumps(error))
    try:
        cloudpickle.loads(pickled)
    except Exception:  # as above
        pickled = bytes(cloudpickle.dumps(_Exhibit(error)))
        cloudpickle.loads(pickled)
    return pickled


class _Exhibit:
    """Unpickles as the exception, made without calling its `__init__`."""

    def __init__(self, error: BaseException) -> None:
        self._parts = type(error), error.args, vars(error)

    def __reduce__(self) -> tuple[Callable[..., BaseException], tuple[Any, ...]]:
        return _restore, self._parts


def _restore(kind: type[BaseException], args: tuple[Any, ...], state: dict[str, Any]) -> BaseException:
    error = kind.__new__(kind, *args)
    vars(error).update(state)
    return error
