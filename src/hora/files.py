"""Creation of files: atomic replacement (checkpoints, commits, model files), and files of one user alone (logs)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

_MAX_LINKS = 40


def new_file(path: str | Path, *, mode: int = 0o600) -> int:
    """Return a descriptor, for reading and writing, of a new and empty file. Raises OSError.

    An existing file is replaced, not emptied: another user may have made it, hold it open or have other names for it.
    Links of this user and of root are followed, links of others replaced. A device such as /dev/null is opened.
    """
    place, flags = _followed(Path(path)), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        if stat.S_ISCHR(place.lstat().st_mode):
            return os.open(place, flags)
        place.unlink()
    except FileNotFoundError:
        pass
    return os.open(place, flags | os.O_CREAT | os.O_EXCL, mode)


def _followed(path: Path) -> Path:
    """Follow the links at this place that this user or root has made."""
    for _ in range(_MAX_LINKS):
        try:
            descriptor = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            return path
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISLNK(found.st_mode) or found.st_uid not in (os.geteuid(), 0):
                return path
            path = path.parent / os.readlink("", dir_fd=descriptor)
        finally:
            os.close(descriptor)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


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
