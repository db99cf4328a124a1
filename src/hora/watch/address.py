"""Addresses of the page: the names it accepts, the address to print, and how this user's `hora top` finds it.

Every live page also listens on a socket in the abstract namespace, which disappears with its process. The acceptor
admits only the job's own user (and root) there, so address and token need not be in a file.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hora.net import sockets
from hora.watch.http import Access

_PREFIX = "hora-watch-"
_ANSWER_BYTES = 64 * 1024
_LIMIT_S = 2.0


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


def serve_address(facts: Mapping[str, Any]) -> socket.socket:
    """Return a listening socket under which `find_pages` finds this process."""
    return sockets.listen(f"{_PREFIX}{os.getuid()}-{os.getpid()}-{facts.get('id', '')[:16]}")


def answer_caller(sock: socket.socket, page: Page) -> None:
    """Send the address and the token to a process of this user."""
    sock.send(json.dumps(asdict(page)).encode())


def find_pages() -> list[Page]:
    """Return the live pages of this user on this machine, the newest last."""
    try:
        with open("/proc/net/unix") as table:
            names = {line.split()[-1] for line in table if f"@{_PREFIX}{os.getuid()}-" in line}
    except OSError:
        return []
    pages = [page for name in names if (page := _ask(name)) is not None]
    return sorted(pages, key=lambda page: page.pid)


def _ask(name: str) -> Page | None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(_LIMIT_S)
        try:
            sock.connect("\0" + name[1:])
            if sockets.process_at(sock).uid != os.getuid():  # another user may use a name like ours
                return None
            facts = json.loads(sock.recv(_ANSWER_BYTES))
            return Page(str(facts["url"]), str(facts["token"]), str(facts["title"]), int(facts["pid"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None


def page_from_url(url: str) -> Page:
    """Return the page at an address as the job printed it. Raises ValueError without its token."""
    parts = urlsplit(url)
    token = parse_qs(parts.fragment).get("token", [""])[0]
    if parts.scheme != "http" or not parts.hostname or not token:
        raise ValueError(f"not the address of a page: {url!r}; use the whole one, http://HOST:PORT/#token=...")
    return Page(f"http://{parts.netloc}/", token, parts.netloc, 0)


def choose_page(url: str | None) -> Page:
    """Return the page at this address, or this user's newest one on this machine.

    Raises ValueError if there is none.
    """
    if url is not None:
        return page_from_url(url)
    pages = find_pages()
    if not pages:
        raise ValueError(
            "no job of yours with a dashboard runs on this machine: start one with `hora run --dashboard ...`, "
            "or pass the address that the job printed"
        )
    return pages[-1]
