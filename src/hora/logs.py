"""Logging of the engine, configured by `HOROVOD_LOG_LEVEL` and `HOROVOD_LOG_HIDE_TIME`.

Lines up to INFO go to standard output, others to standard error, each with the rank that wrote it. `hvd.init()` sets it
up, never an import. Applications that give the logger `hora` their own handler keep it.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from hora.errors import HorovodInternalError

_NAMES = ("debug", "info", "warning", "error", "fatal")
_LEVELS = {"trace": logging.DEBUG} | {name: getattr(logging, name.upper()) for name in _NAMES}
_OWN_FILES = os.path.dirname(os.path.abspath(__file__)) + os.sep


def printable(text: str) -> str:
    """Replace control characters: text of others must not move the cursor, rename the window or set the clipboard."""
    return text if text.isprintable() else "".join(letter if letter.isprintable() else " " for letter in text)


class _Handler(logging.Handler):
    """Looks up the stream for every line, so that a notebook or a test can replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout if record.levelno <= logging.INFO else sys.stderr
        try:
            print(self.format(record), file=stream, flush=True)
        except (OSError, ValueError):  # closed: at exit there may be no stream
            return


def set_up(level: str, *, hide_time: bool, rank: int) -> None:
    """Make the logger `hora` write; an unknown level counts as `warning`, and is named."""
    logger = logging.getLogger("hora")
    logger.setLevel(_LEVELS.get(level.lower(), logging.WARNING))
    time = "" if hide_time else "%(asctime)s "
    formatter = logging.Formatter(f"[{time}hora %(levelname)s rank {rank}] %(message)s")
    if not logger.handlers:
        logger.addHandler(_Handler())
        logger.propagate = False
    for handler in logger.handlers:
        if isinstance(handler, _Handler):
            handler.setFormatter(formatter)
    if level.lower() not in _LEVELS:
        from hora.spelling import did_you_mean  # here: agents import this module, and must start fast

        hint = did_you_mean(level.lower(), _LEVELS) or f"; the levels are {', '.join(_LEVELS)}"
        logger.warning("HOROVOD_LOG_LEVEL=%s is no level%s", level, hint)


def shorten_tracebacks(advice: Callable[[], str]) -> None:
    """Omit Hora's own frames from the traceback of a HorovodInternalError that ends the script, and add the advice.

    When a rank fails, the others end with this error: the user's own lines are useful, Hora's are not.
    """
    if getattr(sys.excepthook, "is_shortened", False):
        return
    plain = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, HorovodInternalError):
            plain(kind, error, trace)
            return
        short = traceback.TracebackException(kind, error, trace)
        frames = [frame for frame in short.stack if not frame.filename.startswith(_OWN_FILES)]
        short.stack = traceback.StackSummary.from_list(frames or short.stack)
        print("".join(short.format(chain=False)), end=advice(), file=sys.stderr, flush=True)

    hook.is_shortened = True  # type: ignore[attr-defined]
    sys.excepthook = hook
