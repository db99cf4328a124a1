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
from hora.world import World

_MAX_CHARACTERS = 4000
_CONNECT_LIMIT_S = 10.0


class _Line:
    """This process's connection for messages, opened with the first one (and again in a forked child)."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._owner = -1
        self._client: ControlClient | None = None

    def say(self, text: str, world: World) -> None:
        if self._owner != os.getpid():
            # A lock that another thread held while this process was forked would never be released here.
            self._lock, self._client, self._owner = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._client is None or self._client.closed:
                self._client = ControlClient.connect(
                    world.rendezvous, name=f"log of rank {world.rank}", timeout_s=_CONNECT_LIMIT_S
                )
            client = self._client
        client.say(text)
        # The answer confirms that the driver has the line: the rank may exit now.
        client.check([])


_line = _Line()


def log_to_driver(message: object) -> None:
    """Show a message (its first 4000 characters) where the job was started: a notebook's cell, a terminal."""
    text = str(message)[:_MAX_CHARACTERS]
    world = World.from_env()
    if world.rendezvous.kind != "hora":
        print(text, flush=True)
        return
    try:
        _line.say(text, world)
    except (OSError, HorovodInternalError) as error:
        print(f"{text}\n(not sent to the driver: {error})", file=sys.stderr, flush=True)
