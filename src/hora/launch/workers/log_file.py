"""A worker's own log file. A full disk costs the rest of the log, not the worker."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import IO

__all__ = ["LogFile"]

_log = logging.getLogger("hora.launch")


class LogFile:
    """`<folder>/<worker>.log`, written as the output comes. Raises OSError if it cannot be made."""

    def __init__(self, folder: str, worker: str) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.path = Path(folder) / f"{worker}.log"
        self._file: IO[bytes] | None = open(self.path, "wb", buffering=0)  # noqa: SIM115 - open while the worker runs

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
