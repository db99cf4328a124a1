"""The protocol between a job's controller and the agents on its nodes: typed messages.

A message is a named tuple. On an authenticated session (`hora.net.session`) its name, and the other fields of one that
carries `data`, are the header; the data, or else the fields as JSON, are the payload. On the socket between a
controller and an agent of its own machine a message is a frame: two lengths, header, payload. Anything else is a
ValueError.

    agent:       Join -> Started, Output, Exited … -> Finished
    controller:  Welcome or Refused -> Start, Terminate … -> Finish -> Bye

Local agents import this module at start, so it only uses modules that Python has already loaded: no dataclasses.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

VERSION = 4

_LENGTHS = struct.Struct(">II")
_MAX_HEADER_BYTES, _MAX_PAYLOAD_BYTES = 60 * 1024, 16 * 1024 * 1024


class Join(NamedTuple):
    """An agent introduces its node. `run`, `workers`: of a job that has lost its leader, the workers that are here."""

    node: int
    name: str
    slots: int
    version: str
    workers: list[int]
    gpus: list[str]
    run: str = ""
    protocol: int = VERSION


class Welcome(NamedTuple):
    """The node is part of the job's run. `executable`: the controller's Python. `silence_s`: of the controller, after
    which the agent ends; `return_s`: how long to come back after the connection broke. `meeting`: the rendezvous' port.
    """

    name: str
    run: str
    executable: str
    silence_s: float
    return_s: float
    elastic: bool = False
    term: int = 0
    meeting: int = 0


class Refused(NamedTuple):
    """The node may not join."""

    why: str


class Start(NamedTuple):
    """Start a worker. `private_files`: content in hexadecimal, by the variable that names the file.

    `inherit_env`: `env` is added to the agent's own environment. `preload`: the worker may be forked from a process
    that has loaded these modules; None: execute it.
    """

    worker: int
    argv: list[str]
    env: dict[str, str]
    inherit_env: bool
    cwd: str | None
    private_files: dict[str, str]
    preload: list[str] | None


class Terminate(NamedTuple):
    """End these workers and their descendants: SIGTERM, SIGKILL after the grace time."""

    workers: list[int]
    grace_s: float


class Finish(NamedTuple):
    """End everything that is left."""

    grace_s: float


class Bye(NamedTuple):
    """The job is over, with this exit status."""

    status: int


class MeetAt(NamedTuple):
    """The rendezvous of the workers has this port."""

    port: int


class Taken(NamedTuple):
    """This many bytes of output were delivered. An agent that is far ahead stops reading its workers' pipes."""

    num_bytes: int


class Ping(NamedTuple):
    """A heartbeat of the controller."""


class Pong(NamedTuple):
    """The answer to a heartbeat."""


class Started(NamedTuple):
    """A worker's process runs."""

    worker: int
    pid: int


class Output(NamedTuple):
    """Some bytes of a worker's `stdout` or `stderr`."""

    worker: int
    stream: str
    data: bytes


class Exited(NamedTuple):
    """A worker's process has ended, and all its output was sent. Death by signal s is code 128 + s. `reason`: why it
    never ran, if so.
    """

    worker: int
    code: int
    reason: str = ""


class Leaving(NamedTuple):
    """The agent was asked to end: its workers shall commit and leave."""


class Finished(NamedTuple):
    """No process is left on the node. The agent waits for `Bye`."""


Order = Welcome | Refused | Start | Terminate | Finish | Bye | MeetAt | Taken | Ping  # of a controller
Report = Join | Pong | Started | Output | Exited | Leaving | Finished  # of an agent
Message = Order | Report
_KINDS: tuple[type[Message], ...] = Message.__args__
_BY_NAME = {kind.__name__: kind for kind in _KINDS}
_TYPES = {
    kind.__name__: {name: str(getattr(one, "__forward_arg__", one)) for name, one in kind.__annotations__.items()}
    for kind in _KINDS
}


def _all(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, list) and all(type(one) is kind for one in value)


_HAS_TYPE: dict[str, Callable[[Any], bool]] = {
    "int": lambda value: type(value) is int and abs(value) < 2**62,
    "float": lambda value: type(value) in (int, float) and abs(value) < 1e9,
    "bool": lambda value: type(value) is bool,
    "str": lambda value: type(value) is str,
    "bytes": lambda value: type(value) is bytes,
    "str | None": lambda value: value is None or type(value) is str,
    "list[int]": _all(int),
    "list[str]": _all(str),
    "list[str] | None": lambda value: value is None or _all(str)(value),
    "dict[str, str]": lambda value: isinstance(value, dict) and all(type(one) is str for one in value.values()),
}


def pack(message: Message) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload of a message."""
    fields, name = message._asdict(), type(message).__name__
    if "data" in fields:
        data = fields.pop("data")
        return {"op": name, **fields}, data
    return {"op": name}, json.dumps(fields).encode() if fields else b""


def unpack(header: Mapping[str, Any], payload: bytes) -> Message:
    """Return the message of a header and a payload. Raises ValueError if they are invalid."""
    kind = _BY_NAME.get(str(header.get("op")))
    if kind is None:
        raise ValueError(f"no message is called {str(header.get('op'))[:100]!r}")
    types = _TYPES[kind.__name__]
    if "data" in types:
        fields: Any = {name: header[name] for name in types if name in header} | {"data": payload}
    else:
        fields = json.loads(payload) if payload else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{kind.__name__} with {str(fields)[:100]!r} in the place of its fields")
    fields = {name: value for name, value in fields.items() if name in types}
    for name, value in fields.items():
        if not _HAS_TYPE[types[name]](value):
            raise ValueError(f"{kind.__name__}.{name} is no {types[name]}: {str(value)[:100]!r}")
    try:
        return kind(**fields)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def frame(message: Message) -> bytes:
    """Return a message as a frame, for a socket within this machine."""
    header, payload = pack(message)
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Frames:
    """Parses frames from a stream of bytes."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that are complete now."""
        self._buffer += data
        found = []
        while len(self._buffer) >= _LENGTHS.size:
            num_text, num_payload = _LENGTHS.unpack_from(self._buffer)
            if num_text > _MAX_HEADER_BYTES or num_payload > _MAX_PAYLOAD_BYTES:
                raise ValueError(f"a frame of {num_text} and {num_payload} bytes")
            begin, end = _LENGTHS.size + num_text, _LENGTHS.size + num_text + num_payload
            if len(self._buffer) < end:
                break
            text, payload = bytes(self._buffer[_LENGTHS.size : begin]), bytes(self._buffer[begin:end])
            del self._buffer[:end]
            header = json.loads(text)
            if not isinstance(header, dict):
                raise ValueError("a frame whose header is no object")
            found.append(unpack(header, payload))
        return found
