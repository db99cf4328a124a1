"""Directory in which other processes of a user find a session of workers: by its folder.

A session that wants to be found listens at a local socket named after the user and the folder. A random key for it lies
in its memory, where processes of the same user read it through /proc if they can see the session's process: no other
user, and nothing in another container that shares the network alone. Where another user sits on the name, the session
takes a random one and is looked for among this user's processes. Nothing is written to a disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets

from hora.net.secret_file import HeldSecret
from hora.workers.gateway import Gateway, server_pid

__all__ = ["Published", "find", "name_of", "publish", "runs"]

log = logging.getLogger("hora")


def name_of(folder: str, whose: str = "") -> str:
    """The socket of the session of this user and folder, which answers to this user only.

    `whose`: empty for the daemon's, `script` for that of the first script that has launched workers there.
    """
    text = f"{os.getuid()}:{os.path.realpath(folder)}{whose and ':' + whose}"
    return f"hora-workers-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class Published:
    """A gateway, still to be opened, that `find` finds."""

    def __init__(self, gateway: Gateway, key: str, held: HeldSecret) -> None:
        self.gateway, self.key, self._held = gateway, key, held

    def close(self) -> None:
        self.gateway.close()
        self._held.close()


def publish(folder: str, whose: str = "") -> Published:
    """A gateway for this folder's session. OSError (EADDRINUSE) if another process of this user has one already."""
    label = name_of(folder, whose)
    try:
        return _publish(label, label)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or runs(label):
            raise
    log.warning(
        "another user's process sits on the name of this folder's session of workers (%s): it has another", label
    )
    return _publish(label, f"hora-workers-{secrets.token_hex(16)}")


def _publish(label: str, name: str) -> Published:
    key = secrets.token_hex(32)
    held = HeldSecret(json.dumps([name, key]).encode(), label=label)  # first: who finds the socket shall find the key
    try:
        return Published(Gateway(name, key), key, held)
    except OSError:
        held.close()
        raise


def find(folder: str, whose: str = "") -> tuple[str, str] | None:
    """Name and key of the folder's session, if it runs and this process may know them."""
    label = name_of(folder, whose)
    try:
        pids = [server_pid(label)]
    except ConnectionRefusedError:
        return None
    except OSError:  # another user's process has the name
        pids = _own_processes()
    for pid in pids:
        found = _published(pid, label)
        if found is not None and runs(found[0]):
            return found
    return None


def runs(name: str) -> bool:
    """Return whether a process of this user serves a session by this name."""
    try:
        server_pid(name)
    except OSError:
        return False
    return True


def _own_processes() -> list[int]:
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{name}").st_uid == os.geteuid():
                found.append(int(name))
        except OSError:  # it ended just now
            continue
    return sorted(found)


def _published(pid: int, label: str) -> tuple[str, str] | None:
    """Return what a process has published under this label."""
    folder = f"/proc/{pid}/fd"
    try:
        for number in os.listdir(folder):
            if os.readlink(f"{folder}/{number}") == f"/memfd:{label} (deleted)":
                with open(f"{folder}/{number}", "rb") as file:
                    name, key = json.loads(file.read())
                return str(name), str(key)
    except (OSError, ValueError):  # it ended just now, or is not for us to see
        return None
    return None
