"""Keys of ranks: a host can speak only for its own workers and ranks.

    job's secret      known to the launcher only
    worker's key      `wire.worker_key`: one per worker, for life; its host holds it, useless under another number
    world's secret    one per generation and initialization, known to the launcher only; each rank gets from it
        shared        common to all ranks: objects are signed with it
        accepting     derives the keys of ranks that connect to this one
        towards r     the key for connecting to rank r; no other rank holds it

A rank cannot derive another rank's `towards r`, so it cannot impersonate that rank at r. A worker without a rank in a
generation gets none of its keys. If a launcher gives all ranks one secret (torchrun, mpirun, srun with a secret file),
each rank derives everything itself, and any of them could impersonate any other.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from hora.errors import AuthenticationError
from hora.net.wire import SECRET_BYTES, Credentials, derived_secret

# `(ranks) -> keys`: shared, accepting, and those towards these ranks, concatenated.
GetKeys = Callable[[Sequence[int]], bytes]


def world_secret(job_secret: bytes, epoch: str) -> bytes:
    """Return the secret from which the keys of a world derive. `epoch`: its generation and initialization."""
    return derived_secret(job_secret, f"the world {epoch}")


def rank_keys(world: bytes, rank: int, towards: Sequence[int]) -> bytes:
    """Return a rank's keys, concatenated."""
    keys = [derived_secret(world, "shared"), _accepting(world, rank)]
    return b"".join([*keys, *(_from(_accepting(world, other), rank) for other in towards)])


def _cut(keys: bytes) -> list[bytes]:
    return [keys[at : at + SECRET_BYTES] for at in range(0, len(keys), SECRET_BYTES)]


def _accepting(world: bytes, rank: int) -> bytes:
    return derived_secret(world, f"to rank {rank}")


def _from(accepting: bytes, rank: int) -> bytes:
    return derived_secret(accepting, f"from rank {rank}")


class RankKeys:
    """A rank's keys in one world. `get` fetches or derives them."""

    def __init__(self, rank: int, get: GetKeys, *, at_once: Sequence[int] = ()) -> None:
        self.rank, self._get = rank, get
        self.shared, self._accepting, *keys = _cut(get(at_once))
        self._towards = dict(zip(at_once, keys, strict=True))

    @classmethod
    def derived(cls, world: bytes, rank: int) -> RankKeys:
        """Derive the keys from the world's secret, which every rank holds."""
        return cls(rank, lambda ranks: rank_keys(world, rank, ranks))

    def fetch(self, ranks: Sequence[int]) -> None:
        """Fetch the keys towards these ranks with one request."""
        missing = [rank for rank in ranks if rank not in self._towards and rank != self.rank]
        if missing:
            self._towards.update(zip(missing, _cut(self._get(missing))[2:], strict=True))

    def towards(self, rank: int) -> Credentials:
        """Return the credentials for connecting to this rank."""
        self.fetch([rank])
        return Credentials(self._towards[rank], "control", self.rank)

    def of(self, rank: int) -> Credentials:
        """Return the credentials with which this rank connects to us."""
        return Credentials(_from(self._accepting, rank), "control", rank)


_MIN_BYTES, _MAX_BYTES = 32, 64 * 1024
_ADVICE = "create one with: umask 077; openssl rand -hex 32 > FILE"


class HeldSecret:
    """A secret in this process's memory, until `close`. Processes of the same user read it at `path`."""

    def __init__(self, secret: bytes, *, label: str = "hora-private") -> None:
        self._descriptor = os.memfd_create(label, os.MFD_CLOEXEC)
        os.write(self._descriptor, secret)
        self.path = f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def close(self) -> None:
        os.close(self._descriptor)


def find_held(label: str, pids: Iterable[int] | None = None) -> Iterator[tuple[int, bytes]]:
    """Yield the secrets with this label that these processes hold (default: all of this user's), with their pids.

    Other users cannot find them, nor can containers that share only the network.
    """
    for pid in own_processes() if pids is None else pids:
        numbers: list[str] = []
        with contextlib.suppress(OSError):  # it ended just now, or is not for us to see
            numbers = os.listdir(f"/proc/{pid}/fd")
        for path in (f"/proc/{pid}/fd/{number}" for number in numbers):
            with contextlib.suppress(OSError):  # closed just now
                if os.readlink(path) == f"/memfd:{label} (deleted)" and (secret := Path(path).read_bytes()):
                    yield pid, secret


def own_processes() -> Iterator[int]:
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it ended just now
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                yield int(name)


def read_held_secret(path: str) -> bytes:
    """Read the job's secret from the memory of the process that holds it, usually a worker's agent."""
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise AuthenticationError(
            f"cannot read the job's secret from {path} ({error.strerror}): the process "
            "that holds it has ended, or this one runs as another user or in another container"
        ) from error


def read_secret_file(path: str, *, named: str = "HORA_SECRET_FILE") -> bytes:
    """Return the secret from a user's file: 32 bytes, hashed from its content without surrounding white space.

    `named`: the variable or flag that named the file, for messages. Raises AuthenticationError with the problem.
    """
    try:
        # Non-blocking: a pipe must be opened in order to reject it.
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
        raise AuthenticationError(f"the job's secret is not read from {named}={path}: {problem}; {_ADVICE}")
    return hashlib.sha256(text).digest()


def _problem(found: os.stat_result) -> str:
    """Describe why the file cannot hold a secret; empty if it can."""
    mode = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
    if not stat.S_ISREG(found.st_mode):
        return "it is not a regular file"
    if found.st_uid not in (os.geteuid(), 0):
        return f"it belongs to user {found.st_uid}, who could change it"
    if found.st_mode & 0o027:
        return f"others can read or change it ({mode}): chmod 600"
    # Root's file may belong to a group: Kubernetes mounts a Secret for the user of a pod this way (defaultMode 0440).
    if found.st_mode & 0o040 and found.st_uid != 0:
        return f"the users of group {found.st_gid} can read it ({mode}): chmod 600"
    return ""
