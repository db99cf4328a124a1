"""Directory in which other processes of a user find a worker session by its folder.

A published session also listens at a local socket named after the user and the folder. Its own name and its random
key are in its memory. Processes of the same user that see the session's process read them through /proc; other users,
and containers that share only the network, cannot. If another user holds the socket's name, clients search this user's
processes. Nothing is written to disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os

from hora.net.keys import HeldSecret, find_held
from hora.workers.gateway import Gateway, server_pid

log = logging.getLogger("hora")


def name_of(folder: str, whose: str = "") -> str:
    """Return the socket name of this user's session for the folder. The session answers this user only.

    `whose`: empty for the daemon's session, `script` for the session of the first script that launched workers there.
    """
    text = f"{os.getuid()}:{os.path.realpath(folder)}{whose and ':' + whose}"
    return f"hora-workers-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


def publish(gateway: Gateway, folder: str, whose: str = "") -> None:
    """Let `find` discover the gateway. OSError (EADDRINUSE) if this user has one for this folder already."""
    label = name_of(folder, whose)
    found = json.dumps([gateway.name, gateway.key]).encode()
    held = HeldSecret(found, label=label)  # first: who finds the socket shall find the key
    try:
        gateway.listen(label)
    except OSError as error:
        if error.errno != errno.EADDRINUSE or runs(label):
            held.close()
            raise
        log.warning("another user's process has the name of this folder's session of workers (%s)", label)
    gateway.published = held


def find(folder: str, whose: str = "") -> tuple[str, str] | None:
    """Return the name and key of the folder's session, if it runs and this process may read them."""
    label, pids = name_of(folder, whose), None
    try:
        pids = [server_pid(label)]
    except ConnectionRefusedError:
        return None
    except OSError:  # another user's process has the name: search all of this user's
        pass
    for _, found in find_held(label, pids):
        name, key = json.loads(found)
        if runs(name):
            return name, key
    return None


def runs(name: str) -> bool:
    """Return whether a process of this user serves a session by this name."""
    try:
        server_pid(name)
    except OSError:
        return False
    return True
