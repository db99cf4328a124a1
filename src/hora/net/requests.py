"""Requests of a worker to the rendezvous, by their names on the wire.

`data` is a message's payload; the other fields are its header, beside `id`.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from hora.net.messages import Pong


class Hello(NamedTuple):
    """Introduces a connection. `worker`: the connection belongs to this worker, which is lost if it ends."""

    name: str
    worker: int = -1


class Bye(NamedTuple):
    """The connection ends in order."""


class Set(NamedTuple):
    """Set a key."""

    key: str
    data: bytes


class Get(NamedTuple):
    """Return the value of a key once it is set."""

    key: str
    timeout_s: float


class Add(NamedTuple):
    """Add to a counter."""

    key: str
    amount: int


class Delete(NamedTuple):
    """Delete a key."""

    key: str


class Check(NamedTuple):
    """Return whether all keys are set."""

    keys: list[str]


class Gather(NamedTuple):
    """Contribute to an all-gather. `fanout`: children of a group in the tree of groups; 0: no tree."""

    key: str
    rank: int
    size: int
    timeout_s: float
    data: bytes
    group: str = ""
    fanout: int = 0


class Keys(NamedTuple):
    """Return this rank's keys towards the ranks in `data`."""

    rank: int
    generation: int
    epoch: str
    data: bytes


class Returned(NamedTuple):
    """The worker's function returned."""

    data: bytes


class Raised(NamedTuple):
    """The function raised an error."""

    type: str
    message: str
    traceback: str
    consequence: bool  # it only reports that a rank was lost
    data: bytes  # the cloudpickled error, or empty

    @property
    def headline(self) -> str:
        return f"{self.type}: {self.message}".partition("\n")[0][:200]


class LogLine(NamedTuple):
    """Print a line where the job was started."""

    data: bytes


class Telemetry(NamedTuple):
    """A worker's telemetry (`hora.telemetry`), or its answer to a question."""

    kind: str
    worker: int
    data: bytes


class NextWorld(NamedTuple):
    """Return the worker's world in the first generation after this one."""

    generation: int
    timeout_s: float


Request = (
    Hello | Bye | Pong | Set | Get | Add | Delete | Check | Gather
    | Keys | Returned | Raised | LogLine | Telemetry | NextWorld
)  # fmt: skip
NAMES = {kind: re.sub("(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower() for kind in Request.__args__}
REQUESTS: dict[str, type[Request]] = {name: kind for kind, name in NAMES.items()}
