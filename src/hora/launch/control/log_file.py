"""A worker's log file, for `output` and for the worker API. A full disk costs the rest of the log, not the job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

__all__ = ["LogFile"]

_log = logging.getLogger("hora.launch")


class LogFile:
    """A file that is written as the output comes. Raises OSError if it cannot be made."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[bytes] | None = path.open("wb", buffering=0)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            _log.error("cannot write %s: %s. The rest of this output is not kept.", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """The worker was never started."""
        self.close()
        self.path.unlink(missing_ok=True)
