"""Atomic file replacement, for checkpoints, commits and model files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO


@contextmanager
def replaced(path: Path, *, unfinished: str, mode: int = 0o666) -> Iterator[IO[bytes]]:
    """Yield a new file that replaces `path` atomically once it is complete and on disk.

    `unfinished` is its name until then: a fixed name, so that the leftovers of a killed writer are replaced and do not
    accumulate. A link that another user has put there is not followed.
    """
    partial = path.with_name(unfinished)
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # without it a power failure could undo the rename
    finally:
        os.close(folder)
