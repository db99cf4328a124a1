"""The engine's own log lines, as `HOROVOD_LOG_LEVEL` and `HOROVOD_LOG_HIDE_TIME` want them.

Lines up to INFO go to standard output, above to standard error, each with the rank that wrote it. Set up by
`hvd.init()` and never at import; applications that give the logger `hora` a handler of their own keep it.
"""

from __future__ import annotations

import logging
import sys

__all__ = ["set_up"]

_LEVELS = {
    "trace": logging.DEBUG,
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "fatal": logging.CRITICAL,
}


class _Handler(logging.Handler):
    """Finds the stream when a line is written, so that a notebook or a test that replaces it is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = sys.stdout if record.levelno <= logging.INFO else sys.stderr
        try:
            print(self.format(record), file=stream, flush=True)
        except (OSError, ValueError):  # the stream is closed: at exit no stream may be left
            return


def set_up(level: str, *, hide_time: bool, rank: int) -> None:
    """Make the logger `hora` write; an unknown level counts as `warning`."""
    logger = logging.getLogger("hora")
    logger.setLevel(_LEVELS.get(level.lower(), logging.WARNING))
    time = "" if hide_time else "%(asctime)s "
    formatter = logging.Formatter(f"[{time}hora %(levelname)s rank {rank}] %(message)s")
    ours = [handler for handler in logger.handlers if isinstance(handler, _Handler)]
    if not logger.handlers:
        ours = [_Handler()]
        logger.addHandler(ours[0])
        logger.propagate = False
    for handler in ours:
        handler.setFormatter(formatter)
