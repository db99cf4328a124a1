"""Addresses of the page: the names it accepts, the address to print, and how this user's `hora top` finds it.

The process that serves a live page holds its address and token in its memory, where processes of the same user find
them, so they need not be in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hora.net import sockets
from hora.net.keys import HeldSecret, find_held
from hora.watch.http import Access

_LABEL = "hora-watch"


@dataclass(frozen=True)
class Page:
    """A live page of this user."""

    url: str
    token: str
    title: str
    pid: int

    @property
    def full_url(self) -> str:
        return f"{self.url}#token={self.token}"


def show_in_browser(page: Page) -> None:
    """Open the page in the user's browser. Other users see its arguments, so the address holds no token."""
    import webbrowser

    webbrowser.open(page.url.removesuffix("/") + Access(page.token, frozenset()).ticket)


def parse_address(text: str) -> tuple[str, int]:
    """Parse `host:port`, `host`, `:port` or `port`; defaults are loopback and a free port. Raises ValueError."""
    host, _, port = text.rpartition(":") if ":" in text else (("", "", text) if text.isdigit() else (text, "", ""))
    if port and not (port.isdigit() and int(port) < 65536):
        raise ValueError(f"the dashboard's address must be HOST:PORT, but it is {text!r}")
    return host.strip("[]") or "127.0.0.1", int(port or 0)


def _urls_of(host: str, port: int) -> tuple[str, frozenset[str]]:
    """Return the address to print, and the accepted values of the Host header."""
    names = {"127.0.0.1", "localhost"} if host in ("127.0.0.1", "localhost", "0.0.0.0") else {_bracketed(host)}
    if host in ("0.0.0.0", "::"):
        machine = socket.gethostname()
        names |= {machine, socket.getfqdn(), "[::1]", "127.0.0.1", "localhost"}
        with contextlib.suppress(OSError):  # the names are enough
            names |= {_bracketed(str(info[4][0])) for info in socket.getaddrinfo(machine, None)}
        return f"http://{machine}:{port}/", frozenset(f"{name.lower()}:{port}" for name in names)
    return f"http://{_bracketed(host)}:{port}/", frozenset(f"{name.lower()}:{port}" for name in names)


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def is_private(stream: Any) -> bool:
    """Return whether only this user sees a stream: a terminal, or a file that no one else may read."""
    try:
        if stream.isatty():
            return True
        mode = os.fstat(stream.fileno()).st_mode
    except (AttributeError, OSError, ValueError):
        return False
    return stat.S_ISREG(mode) and not mode & 0o077


def open_page(listen: str, title: str, *, framed: bool = False) -> tuple[socket.socket, Access, Page]:
    """Return a socket that listens at `host:port`, the access control of the page there, and its address."""
    host, port = parse_address(listen)
    try:
        sock = sockets.listen((host, port))
    except OSError as error:
        raise OSError(f"the dashboard cannot listen on {host}:{port}: {error.strerror}; use another one") from None
    url, hosts = _urls_of(host, sock.getsockname()[1])
    access = Access(secrets.token_urlsafe(32), hosts, framed=framed)
    return sock, access, Page(url, access.token, title, os.getpid())


def publish_page(page: Page) -> HeldSecret:
    """Let `find_pages` find this process's page until the result is closed."""
    return HeldSecret(json.dumps(asdict(page)).encode(), label=_LABEL)


def find_pages() -> list[Page]:
    """Return the live pages of this user on this machine, the newest last."""
    pages = [(pid, Page(**json.loads(found))) for pid, found in find_held(_LABEL)]
    # A forked child has the pages of its parent, too.
    return sorted((page for pid, page in pages if page.pid == pid), key=lambda page: page.pid)


def page_from_url(url: str) -> Page:
    """Return the page at an address as the job printed it. Raises ValueError without its token."""
    parts = urlsplit(url)
    token = parse_qs(parts.fragment).get("token", [""])[0]
    if parts.scheme != "http" or not parts.hostname or not token:
        raise ValueError(f"not the address of a page: {url!r}; use the whole one, http://HOST:PORT/#token=...")
    return Page(f"http://{parts.netloc}/", token, parts.netloc, 0)


def choose_page(url: str | None, *, ask_token: Callable[[], str] = str) -> Page:
    """Return the page at this address, or this user's newest one on this machine. ValueError: there is none.

    `ask_token` is called for an address without one.
    """
    if url is not None and "#" not in url:
        url += f"#token={ask_token()}"
    pages = find_pages() if url is None else [page_from_url(url)]
    if not pages:
        raise ValueError(
            "no job of yours with a dashboard runs on this machine: start one with `hora run --dashboard ...`, "
            "or pass the address that the job printed"
        )
    return pages[-1]
