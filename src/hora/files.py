"""Files that appear under their name when they are complete and on disk. For checkpoints, commits and model files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

__all__ = ["replaced"]


@contextmanager
def replaced(path: Path, *, unfinished: str) -> Iterator[IO[bytes]]:
    """A new file, to be written, that takes the place of `path` in a single step. `unfinished`: its name until then.

    One name, so that a killed writer's remains are replaced and do not pile up. A link that another user has put there
    is not followed.
    """
    partial = path.with_name(unfinished)
    partial.unlink(missing_ok=True)
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """The rename itself must reach the disk too, or a power cut could take the new name away."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
