"""A job's secret in a file: one that a process of ours holds in memory, or one that the user has made.

    umask 077; openssl rand -hex 32 > ~/job.secret        HORA_SECRET_FILE=~/job.secret

Who else could read such a file could speak for the job, so a file that others can read is refused. It is read where it
is needed and kept nowhere.
"""

from __future__ import annotations

import hashlib
import os
import stat

from hora.errors import AuthenticationError

__all__ = ["HeldSecret", "read_held_secret", "read_secret_file"]

_MIN_BYTES, _MAX_BYTES = 32, 64 * 1024
_ADVICE = "make one with: umask 077; openssl rand -hex 32 > FILE"


class HeldSecret:
    """A secret in this process's memory, which processes of the same user read at `path`. It ends with `close`.

    `label`: by which others can tell it, among what this process holds.
    """

    def __init__(self, secret: bytes, *, label: str = "hora-private") -> None:
        self._descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
        os.write(self._descriptor, secret)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)


def read_held_secret(path: str) -> bytes:
    """The job's secret, from the memory of the process that holds it: a worker's agent as a rule."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise AuthenticationError(
            f"cannot read the job's secret from {path} ({error.strerror}): the process "
            "that holds it has ended, or this one runs as another user or in another container"
        ) from error


def read_secret_file(path: str, *, named: str = "HORA_SECRET_FILE") -> bytes:
    """The secret that a user's file gives: 32 bytes, made of all it contains but the white space at its ends.

    `named`: the variable or the flag that named the file, for messages. AuthenticationError says what is wrong with it.
    """
    try:
        # Not blocking: a pipe is no such file, and has to be looked at to be refused.
        descriptor = os.open(os.path.expanduser(path), os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise AuthenticationError(f"cannot read the job's secret from {named}={path} ({why}); {_ADVICE}") from error
    try:
        problem = _problem(os.fstat(descriptor))
        text = b"" if problem else os.read(descriptor, _MAX_BYTES + 1).strip()
    finally:
        os.close(descriptor)
    if not problem and not _MIN_BYTES <= len(text) <= _MAX_BYTES:
        problem = f"it has {len(text)} bytes, and a secret needs {_MIN_BYTES} to {_MAX_BYTES}"
    if problem:
        raise AuthenticationError(f"the job's secret is not taken from {named}={path}: {problem}; {_ADVICE}")
    return hashlib.sha256(text).digest()


def _problem(found: os.stat_result) -> str:
    """Why a secret in this file is none; empty where it is one."""
    mode = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
    if not stat.S_ISREG(found.st_mode):
        return "it is no regular file"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, who could change it"
    if found.st_mode & 0o027:
        return f"others can read or change it ({mode}): chmod 600"
    # Root's own may be for a group: so Kubernetes mounts a Secret for the user of a pod (defaultMode 0440).
    if found.st_mode & 0o040 and found.st_uid != 0:
        return f"the users of group {found.st_gid} can read it ({mode}): chmod 600"
    return ""
