"""`log_to_driver`: show a line of any rank where the job was started. Best effort, never an error.

It travels over the job's authenticated connection, so it also works from scripts under `horovodrun` and from processes
that a rank has started. Outside a job it prints. Re-exported as `sparkdl.horovod.log_to_driver`.
"""

from __future__ import annotations

import os
import sys
import threading

from hora.errors import HorovodInternalError
from hora.net.client import ControlClient
from hora.platforms.detect import detect_world
from hora.world import World

_MAX_CHARACTERS = 4000
_CONNECT_LIMIT_S = 10.0


_lock = threading.Lock()
_client: ControlClient | None = None  # opened with the first message, and again in a forked child


def _after_fork_in_child() -> None:
    global _lock, _client
    _lock, _client = threading.Lock(), None  # a lock that another thread held would never be released here


os.register_at_fork(after_in_child=_after_fork_in_child)


def _connected(world: World) -> ControlClient:
    global _client
    with _lock:
        if _client is None or _client.closed:
            name = f"log of rank {world.rank}"
            _client = ControlClient.connect(world.rendezvous, name=name, timeout_s=_CONNECT_LIMIT_S)
        return _client


def log_to_driver(message: object) -> None:
    """Show a message (its first 4000 characters) where the job was started: a notebook's cell, a terminal.

    Args:
        message: A line for the driver's output.
    """
    text = str(message)[:_MAX_CHARACTERS]
    world = detect_world()
    if world.rendezvous.kind != "hora":
        print(text, flush=True)
        return
    try:
        client = _connected(world)
        client.say(text)
        # The answer confirms that the driver has the line: the rank may exit now.
        client.check([])
    except (OSError, HorovodInternalError) as error:
        print(f"{text}\n(not sent to the driver: {error})", file=sys.stderr, flush=True)
