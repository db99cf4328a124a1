"""A minimal HTTP/1.1 server part: read a request within limits and write a response. No routes, no secrets.

It uses the standard library's asyncio, so a page needs no packages. Every response closes its connection; only streams
stay open, and their writer waits at most a few seconds for a slow reader.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from urllib.parse import unquote

__all__ = [
    "MAX_HEAD_BYTES",
    "Answer",
    "BadRequest",
    "HttpRequest",
    "finish",
    "head_of",
    "read_request",
    "write",
    "write_answer",
]

MAX_HEAD_BYTES = 16 * 1024
_MAX_BODY_BYTES = 64 * 1024
_READ_LIMIT_S = 10.0
_WRITE_LIMIT_S = 10.0
_SINGLE = frozenset({"host", "origin", "authorization", "content-length"})


class BadRequest(Exception):  # noqa: N818 - it is the name of status 400
    """Raised for bytes that are not an acceptable request."""


@dataclass(frozen=True)
class HttpRequest:
    method: str
    path: str
    headers: Mapping[str, str]  # names in lower case
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    body: bytes = b""
    content_type: str = "text/plain; charset=utf-8"
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)


async def read_request(reader: asyncio.StreamReader) -> HttpRequest | None:
    """Return the request; None if the peer closed without one. Raises BadRequest, TimeoutError."""
    return await asyncio.wait_for(_read(reader), _READ_LIMIT_S)


async def _read(reader: asyncio.StreamReader) -> HttpRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("the request's head is too long") from None
    request = _parse(head)
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isascii() or not length.isdigit():
        raise BadRequest("the length of the body is missing")
    if len(length) > 8 or int(length) > _MAX_BODY_BYTES:
        raise BadRequest("the body is too long")
    try:
        body = await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        return None
    return HttpRequest(request.method, request.path, request.headers, body)


def _parse(head: bytes) -> HttpRequest:
    try:
        first, *rest = head.decode("ascii").split("\r\n")[:-2]
        method, target, version = first.split(" ")
    except ValueError:
        raise BadRequest("this is not HTTP") from None
    if not version.startswith("HTTP/1.") or not target.startswith("/"):
        raise BadRequest("this is not HTTP/1.1")
    headers: dict[str, str] = {}
    for line in rest:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip() or (name in headers and name in _SINGLE):
            raise BadRequest("a header is invalid")
        headers[name] = value.strip()
    return HttpRequest(method, unquote(target.partition("?")[0]), headers)


def head_of(answer: Answer, extra: Mapping[str, str], *, length: int | None) -> bytes:
    phrase = HTTPStatus(answer.status).phrase
    headers = {"Content-Type": answer.content_type, "Connection": "close", **extra, **answer.headers}
    if length is not None:
        headers["Content-Length"] = str(length)
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} {phrase}\r\n{lines}\r\n".encode()


async def write_answer(writer: asyncio.StreamWriter, answer: Answer, extra: Mapping[str, str]) -> None:
    await write(writer, head_of(answer, extra, length=len(answer.body)) + answer.body)


async def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write data; raises TimeoutError if the peer does not read."""
    writer.write(data)
    await asyncio.wait_for(writer.drain(), _WRITE_LIMIT_S)


async def finish(writer: asyncio.StreamWriter) -> None:
    """Close the connection once everything is sent. Raises TimeoutError if the peer does not read."""
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), _WRITE_LIMIT_S)
