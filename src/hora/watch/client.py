"""A reader of a live page: what `hora top` and programs use. Only the standard library."""

from __future__ import annotations

import http.client
import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlsplit

from hora.watch.address import Page, find_pages

__all__ = ["choose_page", "page_from_url", "post", "snapshots"]

_CONNECT_LIMIT_S = 10.0
_SILENCE_LIMIT_S = 40.0  # the page sends at least a heartbeat every 15 s


def page_from_url(url: str) -> Page:
    """The page at an address as the job printed it. ValueError without its token."""
    parts = urlsplit(url)
    token = parse_qs(parts.fragment).get("token", [""])[0]
    if parts.scheme != "http" or not parts.hostname or not token:
        raise ValueError(f"not the address of a page: {url!r}; use the whole one, http://HOST:PORT/#token=...")
    return Page(f"http://{parts.netloc}/", token, parts.netloc, 0)


def choose_page(url: str | None) -> Page:
    """The page at this address, or this user's newest one on this machine. ValueError when there is none."""
    if url is not None:
        return page_from_url(url)
    pages = find_pages()
    if not pages:
        raise ValueError(
            "no job of yours with a dashboard runs on this machine: start one with `hora run --dashboard ...`, "
            "or give the address that the job printed"
        )
    return pages[-1]


def snapshots(page: Page) -> Iterator[dict[str, Any]]:
    """Yield the page's updates: everything first, then what has changed. Ends with the job. OSError, ValueError."""
    connection, answer = _request(page, "GET", "/api/stream")
    try:
        while line := answer.readline():
            if line.strip():
                yield json.loads(line)
    finally:
        connection.close()


def post(page: Page, path: str, arguments: dict[str, Any]) -> None:
    """Do something to the job."""
    _request(page, "POST", path, json.dumps(arguments).encode())[0].close()


def _request(
    page: Page, method: str, path: str, body: bytes | None = None
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    netloc = urlsplit(page.url).netloc
    connection = http.client.HTTPConnection(netloc, timeout=_CONNECT_LIMIT_S)
    connection.request(method, path, body=body, headers={"Authorization": f"Bearer {page.token}"})
    if connection.sock is not None:
        connection.sock.settimeout(_SILENCE_LIMIT_S)
    answer = connection.getresponse()
    if answer.status != 200:
        text = answer.read(1000).decode(errors="replace").strip()
        connection.close()
        raise ValueError(f"{page.url} refuses: {text}")
    return connection, answer
