"""Errors of a collective under TensorFlow: each is of the class that Horovod documents and of TensorFlow's own.

TensorFlow turns what an operation of a function raises into an exception of its own, which it makes from a status
(`tensorflow.python.eager.core`). `translate_statuses` has it make these, so that `except hvd.HorovodInternalError` means
the same in eager mode, around a `tf.function` and around `model.fit`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import core

from hora.errors import HorovodInternalError

__all__ = ["ArgumentError", "CollectiveError", "own_errors", "translate_statuses"]


class CollectiveError(HorovodInternalError, tf.errors.FailedPreconditionError, tf.errors.UnknownError):
    """A collective could not complete; pickled as the plain HorovodInternalError, which needs no TensorFlow to be read."""

    def __init__(self, message: str) -> None:
        tf.errors.OpError.__init__(self, None, None, message, tf.errors.UNKNOWN)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return HorovodInternalError, (self.message,)


class ArgumentError(ValueError, tf.errors.InvalidArgumentError):
    """A collective was called with what it cannot take; pickled as a plain ValueError."""

    def __init__(self, message: str) -> None:
        tf.errors.OpError.__init__(self, None, None, message, tf.errors.INVALID_ARGUMENT)

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return ValueError, (self.message,)


@contextlib.contextmanager
def own_errors() -> Iterator[None]:
    """Raise the errors of the torch front as these."""
    try:
        yield
    except HorovodInternalError as error:
        raise CollectiveError(str(error)) from error
    except ValueError as error:
        raise ArgumentError(str(error)) from error


def translate_statuses() -> None:
    """Have TensorFlow raise a `CollectiveError` where an operation of a function raised a HorovodInternalError."""
    original: Callable[[Any], Exception] = core._status_to_exception
    if getattr(original, "of_hora", False):
        return

    def status_to_exception(status: Any) -> Exception:
        if f"{HorovodInternalError.__name__}: " in status.message:
            return CollectiveError(status.message)
        return original(status)

    status_to_exception.of_hora = True  # type: ignore[attr-defined]
    core._status_to_exception = status_to_exception
