"""Leaderships as a store tells of them, and JSON over HTTP, in which stores answer."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Contents", "Office", "StoreError", "exchange", "lease_time"]

_ANSWER_S = 2.0  # for one server; and no longer than until the next renewal of a lease, so that another can be asked


class StoreError(OSError):
    """The store cannot be reached, or refuses."""


@dataclass(frozen=True)
class Office:
    """A leadership that was won. `term`: its number, greater than those before; `lease`: the store's name for it."""

    term: int
    lease: str


@dataclass(frozen=True)
class Contents:
    """State of a job in the store. `term`: its leader's, 0 where nobody leads; `values`: by key."""

    term: int
    values: Mapping[str, Mapping[str, Any]]


def lease_time(text: str) -> int:
    """Read the seconds after which a leader that does not renew its lease is replaced."""
    if not text.isdecimal() or not 1 <= int(text) <= 600:
        raise ValueError(f"HORA_STORE: ttl= must lie in 1..600 seconds, but it is {text!r}")
    return int(text)


def exchange(
    where: tuple[str, int],
    method: str,
    path: str,
    content: Mapping[str, Any] | None,
    headers: Mapping[str, str],
    tls: ssl.SSLContext | None,
    *,
    ttl_s: int,
) -> tuple[int, dict[str, Any]]:
    """One request: the status and the answer. OSError, HTTPException or ValueError where there is no sensible one."""
    connection: http.client.HTTPConnection
    limit_s = min(_ANSWER_S, ttl_s / 3)
    if tls is None:
        connection = http.client.HTTPConnection(*where, timeout=limit_s)
    else:
        connection = http.client.HTTPSConnection(*where, timeout=limit_s, context=tls)
    try:
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status, answer if isinstance(answer, dict) else {}
    finally:
        connection.close()
