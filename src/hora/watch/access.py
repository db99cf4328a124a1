"""Access control of the live page. Pure: takes a request's headers and returns a refusal or None.

The token (256 bits) is in the fragment of the page's address, which browsers do not send; the page sends it in a
header. There is no cookie, so another page cannot make the browser send the token (no CSRF), and other ports of this
machine never see it. The Host header must be one of the server's names, which prevents DNS rebinding; so must the
Origin, if there is one.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import NamedTuple

__all__ = ["Access", "File", "Refusal", "SECURITY_HEADERS", "new_token", "site_files", "style_hash"]

_STYLES = ("uPlot.min.css", "page.css")
_SCRIPTS = ("uPlot.iife.min.js", "charts.js", "timeline.js", "page.js")
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src '{style}'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'none'; base-uri 'none'; frame-ancestors {ancestors}; require-trusted-types-for 'script'; "
    "trusted-types 'none'"
)
SECURITY_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class File(NamedTuple):
    """Content served at a path."""

    body: bytes
    content_type: str


@functools.cache
def site_files() -> dict[str, File]:
    """By path."""
    html = _read("index.html").replace("<style></style>", f"<style>{_style()}</style>")
    script = '"use strict";\n' + "\n".join(map(_read, _SCRIPTS))
    return {
        "/": File(html.encode(), "text/html; charset=utf-8"),
        "/page.js": File(script.encode(), "text/javascript; charset=utf-8"),
    }


@functools.cache
def style_hash() -> str:
    """Return the source for the page's content security policy, which allows only these styles."""
    return "sha256-" + base64.b64encode(hashlib.sha256(_style().encode()).digest()).decode()


@functools.cache
def _style() -> str:
    return "\n".join(map(_read, _STYLES))


def _read(name: str) -> str:
    return resources.files("hora.watch").joinpath("site", name).read_text(encoding="utf-8")


def new_token() -> str:
    """Return 256 random bits."""
    return secrets.token_urlsafe(32)


@dataclass(frozen=True)
class Refusal:
    """Response to an unauthorized request."""

    status: int
    text: str


@dataclass(frozen=True)
class Access:
    """`hosts`: the accepted values of the Host header. `framed`: a notebook embeds the page."""

    token: str
    hosts: frozenset[str]
    framed: bool = False

    def headers(self) -> dict[str, str]:
        """Return the headers of every response."""
        ancestors = "http: https:" if self.framed else "'none'"
        return {**SECURITY_HEADERS, "Content-Security-Policy": _POLICY.format(ancestors=ancestors, style=style_hash())}

    def check_place(self, headers: Mapping[str, str]) -> Refusal | None:
        """Check every request: it must name this server, and come from its own page or from no page at all."""
        if headers.get("host", "").lower() not in self.hosts:
            return Refusal(421, "this server does not go by that name")
        origin = headers.get("origin")
        if origin is not None and origin.lower() not in {f"http://{host}" for host in self.hosts}:
            return Refusal(403, "requests of other pages are refused")
        if headers.get("sec-fetch-site", "none") not in ("none", "same-origin") and (
            headers.get("sec-fetch-mode") != "navigate"
        ):
            return Refusal(403, "requests of other pages are refused")
        return None

    def check_token(self, headers: Mapping[str, str]) -> Refusal | None:
        """Check the token, which all requests for data or actions need."""
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token.encode()):
            return Refusal(401, "the token is missing or wrong: use the whole address that the job printed")
        return None
