"""Typed messages: a message is a named tuple; its fields are checked when it arrives.

On an authenticated connection (`hora.net.wire`) a message is a header and a payload. On a socket within one machine it
is a frame: two lengths, header, payload. Anything that is not a message raises ValueError.

Local agents import this module at start, so it uses only modules that Python has already loaded: no dataclasses.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Callable, Mapping
from typing import Any, Generic, NamedTuple, TypeVar

_LENGTHS = struct.Struct(">II")
_MAX_HEADER_BYTES, _MAX_PAYLOAD_BYTES = 60 * 1024, 16 * 1024 * 1024

M = TypeVar("M")


class Pong(NamedTuple):
    """The answer to a heartbeat, of an agent or a worker."""


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


@functools.cache
def _types(kind: type) -> dict[str, str]:
    """Return the names of the fields' types."""
    return {name: str(getattr(one, "__forward_arg__", one)) for name, one in kind.__annotations__.items()}


def checked(kind: type[M], fields: Mapping[str, Any]) -> M:
    """Return a message with these fields; other fields are ignored. Raises ValueError if a field is invalid."""
    types = _types(kind)  # type: ignore[arg-type]  # mypy does not see that a class is hashable
    given = {name: fields[name] for name in types if name in fields}
    for name, value in given.items():
        if not _HAS_TYPE[types[name]](value):
            raise ValueError(f"{kind.__name__}.{name} is no {types[name]}: {str(value)[:100]!r}")
    try:
        return kind(**given)
    except TypeError as error:  # a field is missing
        raise ValueError(str(error)) from None


def pack(message: NamedTuple) -> tuple[dict[str, Any], bytes]:
    """Return the header and the payload: the `data` of a message that has some, or else its fields as JSON."""
    fields, name = message._asdict(), type(message).__name__
    if "data" in fields:
        data = fields.pop("data")
        return {"op": name, **fields}, data
    return {"op": name}, json.dumps(fields).encode() if fields else b""


def unpack(kinds: Mapping[str, type[M]], header: Mapping[str, Any], payload: bytes) -> M:
    """Return the message of a header and a payload. Raises ValueError if they are invalid."""
    kind = kinds.get(str(header.get("op")))
    if kind is None:
        raise ValueError(f"no message is called {str(header.get('op'))[:100]!r}")
    if "data" in kind.__annotations__:
        return checked(kind, {**header, "data": payload})
    fields = json.loads(payload) if payload else {}
    if not isinstance(fields, dict):
        raise ValueError(f"{kind.__name__} with {str(fields)[:100]!r} in the place of its fields")
    return checked(kind, fields)


def frame(message: NamedTuple) -> bytes:
    """Return a message as a frame, for a socket within this machine."""
    header, payload = pack(message)
    text = json.dumps(header).encode()
    return _LENGTHS.pack(len(text), len(payload)) + text + payload


class Frames(Generic[M]):
    """Parses frames from a stream of bytes."""

    def __init__(self, kinds: Mapping[str, type[M]]) -> None:
        self._kinds = kinds
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[M]:
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
            found.append(unpack(self._kinds, header, payload))
        return found
