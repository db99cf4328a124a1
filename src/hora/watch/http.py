"""The page's HTTP: requests within limits, responses, the page's files, and access control. No routes.

It uses the standard library's asyncio, so a page needs no packages. Every response closes its connection; only streams
stay open, and their writer waits at most a few seconds for a slow reader.

The token (256 bits) is in the fragment of the page's address, which browsers do not send; the page sends it in a
header. There is no cookie, so another page cannot make the browser send the token (no CSRF), and other ports of this
machine never see it. Other users see the arguments of a browser's process, so programs open the page at the address of
a ticket, which leads to the page only for a process of the job's own user on this machine. The Host header must be one
of the server's names, which prevents DNS rebinding; so must the Origin, if there is one.
"""

from __future__ import annotations

import asyncio
import base64
import functools
import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from urllib.parse import unquote

_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "timeline.js", "page.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src '{style}'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors {ancestors}; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
_SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}

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
    location: str = ""

    @classmethod
    def error(cls, status: int, text: object) -> Answer:
        return cls(f"{text}\n".encode(), status=status)


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
    length = headers.get("content-length", "0")
    if "transfer-encoding" in headers or not length.isascii() or not length.isdigit():
        raise BadRequest("the length of the body is missing")
    if len(length) > 8 or int(length) > _MAX_BODY_BYTES:
        raise BadRequest("the body is too long")
    try:
        body = await reader.readexactly(int(length))
    except asyncio.IncompleteReadError:
        return None
    return HttpRequest(method, unquote(target.partition("?")[0]), headers, body)


def encoded(answer: Answer, extra: Mapping[str, str], *, endless: bool = False) -> bytes:
    """Return a response; an endless one has more of its body after it, until the connection ends."""
    headers = {"Content-Type": answer.content_type, "Connection": "close", **extra}
    if answer.location:
        headers["Location"] = answer.location
    if not endless:
        headers["Content-Length"] = str(len(answer.body))
    lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"HTTP/1.1 {answer.status} {HTTPStatus(answer.status).phrase}\r\n{lines}\r\n".encode() + answer.body


async def write(writer: asyncio.StreamWriter, data: bytes) -> None:
    """Write data; raises TimeoutError if the peer does not read."""
    writer.write(data)
    await asyncio.wait_for(writer.drain(), _WRITE_LIMIT_S)


async def finish(writer: asyncio.StreamWriter) -> None:
    """Close the connection once everything is sent. Raises TimeoutError if the peer does not read."""
    writer.close()
    await asyncio.wait_for(writer.wait_closed(), _WRITE_LIMIT_S)


@functools.cache
def site_files() -> dict[str, Answer]:
    html = _site("index.html").replace("<style></style>", f"<style>{_style()}</style>")
    script = '"use strict";\n' + "\n".join(map(_site, _SCRIPTS))
    return {
        "/": Answer(html.encode(), "text/html; charset=utf-8"),
        "/page.js": Answer(script.encode(), "text/javascript; charset=utf-8"),
    }


@functools.cache
def _style() -> str:
    return "\n".join(map(_site, _STYLES))


def _site(name: str) -> str:
    return resources.files("hora.watch").joinpath("site", name).read_text(encoding="utf-8")


@dataclass(frozen=True)
class Access:
    """The readers that the page accepts."""

    token: str
    hosts: frozenset[str]  # the accepted values of the Host header
    framed: bool = False  # a notebook embeds the page

    def headers(self) -> dict[str, str]:
        """Return the headers of every response. The security policy allows only the page's own styles."""
        ancestors = "http: https:" if self.framed else "'none'"
        style = "sha256-" + base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()
        return {**_SECURITY_HEADERS, "Content-Security-Policy": _POLICY.format(ancestors=ancestors, style=style)}

    def check_place(self, headers: Mapping[str, str]) -> Answer | None:
        """Check every request: it must name this server, and come from its own page or from no page at all."""
        if headers.get("host", "").lower() not in self.hosts:
            return Answer.error(421, "this server does not go by that name")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return Answer.error(403, "requests of other pages are refused")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and (
            headers.get("sec-fetch-mode") != "navigate"
        ):
            return Answer.error(403, "requests of other pages are refused")
        return None

    @property
    def ticket(self) -> str:
        """Return the path that opens the page."""
        return f"/open/{hmac.digest(self.token.encode(), b'open', 'sha256').hex()}"

    def opened(self, path: str, user: int | None) -> Answer:
        """Return the answer to the ticket's path: for the own user, the page with its token."""
        if user != os.geteuid() or not hmac.compare_digest(path.encode(), self.ticket.encode()):
            return Answer.error(403, "this opens the page only for its user on its machine: use the address of the job")
        return Answer(status=303, location=f"/#token={self.token}")

    def check_token(self, headers: Mapping[str, str]) -> Answer | None:
        """Check the token, which all requests for data or actions need."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return Answer.error(401, "the token is missing or wrong: use the whole address that the job printed")
        return None
