"""Logging of the engine, configured by `HOROVOD_LOG_LEVEL` and `HOROVOD_LOG_HIDE_TIME`.

Lines up to INFO go to standard output, others to standard error, each with the rank that wrote it. `hvd.init()` sets it
up, never an import. Applications that give the logger `hora` their own handler keep it.
"""

from __future__ import annotations

import logging
import sys

_NAMES = ("debug", "info", "warning", "error", "fatal")
_LEVELS = {"trace": logging.DEBUG} | {name: getattr(logging, name.upper()) for name in _NAMES}


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
