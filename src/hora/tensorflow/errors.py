"""Errors of a collective under TensorFlow: each is of the class that Horovod documents and of TensorFlow's own.

TensorFlow turns what an operation of a function raises into an exception of its own, and makes an `UnknownError` of
errors that it does not know. `translate_errors` has it make these, so that `except hvd.HorovodInternalError` means the
same in eager mode, around a `tf.function` and around `model.fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from hora.errors import HorovodInternalError

__all__ = ["ArgumentError", "CollectiveError", "own_errors", "translate_errors"]


class CollectiveError(HorovodInternalError, tf.errors.FailedPreconditionError, tf.errors.UnknownError):
    """A collective failed; pickled as the plain HorovodInternalError, which can be read without TensorFlow."""

    def __init__(self, node_def: Any, op: Any, message: str, *details: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, tf.errors.UNKNOWN, *details)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return HorovodInternalError, (self.message,)


class ArgumentError(ValueError, tf.errors.InvalidArgumentError):
    """A collective was called with what it cannot take; pickled as a plain ValueError."""

    def __init__(self, node_def: Any, op: Any, message: str, *details: Any) -> None:
        tf.errors.OpError.__init__(self, node_def, op, message, tf.errors.INVALID_ARGUMENT, *details)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ValueError, (self.message,)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise the errors of the torch front as these."""
    try:
        yield
    except HorovodInternalError as error:
        raise CollectiveError(None, None, str(error)) from error
    except ValueError as error:
        raise ArgumentError(None, None, str(error)) from error


def translate_errors() -> None:
    """Have TensorFlow raise a `CollectiveError` where an operation of a function raised a HorovodInternalError.

    Its native part calls the class of an error, so a subclass can take its place there and nowhere else.
    """
    tf.errors.UnknownError.__new__ = _new_unknown_error


def _new_unknown_error(cls: type, node_def: Any = None, op: Any = None, message: Any = "", *details: Any) -> Any:
    ours = cls is tf.errors.UnknownError and f"{HorovodInternalError.__name__}: " in str(message)
    return Exception.__new__(CollectiveError if ours else cls, node_def, op, message, *details)
