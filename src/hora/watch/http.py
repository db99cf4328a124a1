"""Just enough HTTP/1.1 for one page: read a request within limits, write an answer. No routes, no job, no secrets.

The standard library's asyncio carries it, so that a page needs nothing installed. Every answer closes its connection;
only streams last, and their writer may wait for a slow reader no longer than a few seconds.
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
    "Request",
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
    """Raised for bytes that are no request, or not one of ours."""


@dataclass(frozen=True)
class Request:
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


async def read_request(reader: asyncio.StreamReader) -> Request | None:
    """The request, None when the other side left without one. BadRequest, TimeoutError."""
    return await asyncio.wait_for(_read(reader), _READ_LIMIT_S)


async def _read(reader: asyncio.StreamReader) -> Request | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    except asyncio.LimitOverrunError:
        raise BadRequest("the request's head is too long") from None
    request = _parse(head)
    length = request.headers.get("content-length", "0")
    if "transfer-encoding" in request.headers or not length.isascii() or not length.isdigit():
        raise BadRequest("say how long the body is")
    if len(length) > 8 or int(length) > _MAX_BODY_BYTES:
        raise BadRequest("the body is too long")
    try:
        body = await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        return None
    return Request(request.method, request.path, request.headers, body)


def _parse(head: bytes) -> Request:
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
            raise BadRequest("a header makes no sense")
        headers[name] = value.strip()
    return Request(method, unquote(target.partition("?")[0]), headers)


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
    """TimeoutError when the other side does not read."""
    writer.write(data)
    await asyncio.wait_for(writer.drain(), _WRITE_LIMIT_S)


async def finish(writer: asyncio.StreamWriter) -> None:
    """Close the connection when all has been sent. TimeoutError when the other side does not read."""
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), _WRITE_LIMIT_S)
