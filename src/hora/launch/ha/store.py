"""The store holds the state of a job that must survive its leader.

This module has the interface of stores and their common JSON over HTTP; `etcd` and `kubernetes` implement it. Values
are small and hold no secret. `AuthenticatedStore` authenticates them with the nodes' secret: each has a MAC over its
key and text. An entry with an invalid MAC is logged once, as a StoreError, and ignored. A forged `leader` cannot be
ignored, because the store itself honours it: `read` raises the error, and removes the entry if no leader restores its
own within the lease time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import http.client
import json
import logging
import ssl
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from hora.net.wire import derived_secret

LONGEST_TTL_S = 600
_ANSWER_S = 2.0  # for one server; never longer than until the next renewal, so that another can be asked


class StoreError(OSError):
    """The store cannot be reached, or refuses."""


@dataclass(frozen=True)
class LeaderTerm:
    """A leadership that was won. `term`: its number, greater than all before; `lease`: the store's id of the lease."""

    term: int
    lease: str
    name: str = ""


@dataclass(frozen=True)
class Contents:
    """State of a job in the store."""

    term: int  # the leader's, 0 without a leader
    values: Mapping[str, Mapping[str, Any]]
    leader_version: str = ""  # changes with every write of the leader's entry


class JobStore(Protocol):
    """Interface of stores. All methods raise StoreError, and may be called from several threads.

    `members`: the addresses of its servers. `ttl_s`: a leader that does not renew its lease for so long is replaced.
    """

    members: tuple[tuple[str, int], ...]
    ttl_s: int

    def read(self) -> Contents:
        """Return the leader's term, and values that are at least as recent."""

    def put(self, key: str, value: Mapping[str, Any], *, term: int, lasting_s: int = 0) -> bool:
        """Set a value as this leader; return False if a later one leads. `lasting_s`: how long it is needed."""

    def delete(self, key: str, *, term: int) -> bool:
        """Remove a value as this leader."""

    def lead(self, name: str) -> LeaderTerm | None:
        """Become the leader, unless there is one."""

    def renew(self, leader: LeaderTerm) -> bool:
        """Renew the lease; return whether this leader still leads."""

    def resign(self, leader: LeaderTerm) -> None:
        """Give up the leadership."""

    def evict(self, leader_version: str) -> None:
        """Remove the leader's entry, unless it has another version."""


def decoded(text: str | bytes) -> Mapping[str, Any]:
    """Return the value of an entry; empty for invalid bytes."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def lease_time(text: str) -> int:
    """Read the seconds after which a leader that does not renew its lease is replaced."""
    if not text.isdecimal() or not 1 <= int(text) <= LONGEST_TTL_S:
        raise ValueError(f"HORA_STORE: ttl= must lie in 1..{LONGEST_TTL_S} seconds, but it is {text!r}")
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
    """Send one request; return status and answer. OSError, HTTPException or ValueError: there is no valid answer."""
    limit_s = min(_ANSWER_S, ttl_s / 3)
    if tls is None:
        connection = http.client.HTTPConnection(*where, timeout=limit_s)
    else:
        connection = http.client.HTTPSConnection(*where, timeout=limit_s, context=tls)
    with contextlib.closing(connection):
        body = None if content is None else json.dumps(content)
        connection.request(method, path, body, {"Content-Type": "application/json", **headers})
        response = connection.getresponse()
        answer = json.loads(response.read())
        return response.status, answer if isinstance(answer, dict) else {}


_log = logging.getLogger("hora.launch")


class AuthenticatedStore:
    """A store of authenticated values: forged or stray entries are ignored. Only nodes of the job hold `secret`."""

    def __init__(self, store: JobStore, secret: bytes) -> None:
        self._store, self.members, self.ttl_s = store, store.members, store.ttl_s
        self.delete, self.renew, self.resign, self.evict = store.delete, store.renew, store.resign, store.evict
        self._key = derived_secret(secret, "values of the store")
        self._complained: set[str] = set()
        self._forged_leader: tuple[str, float] | None = None  # the version of the entry, and since when it is known

    def read(self) -> Contents:
        found, values = self._store.read(), {}
        term = found.term
        for key, sealed in found.values.items():
            try:
                values[key] = self._opened(key, sealed)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                error = StoreError(
                    f"the entry {key[:100]!r} in the store (HORA_STORE: {self._store}) was not written by a node of "
                    "this job: remove it, and let the job's nodes alone write there"
                )
                if key == "leader" and term:
                    if not self._evicted(found.leader_version):
                        raise error from None
                    _log.warning("%s; it was removed", error)
                    term = 0
                    continue
                if key not in self._complained:
                    self._complained.add(key)
                    _log.warning("%s; it is ignored", error)
        return Contents(term, values, found.leader_version)

    def put(self, key: str, value: Mapping[str, Any], *, term: int, lasting_s: int = 0) -> bool:
        text = json.dumps(value)
        return self._store.put(key, {"text": text, "mac": self._mac(key, text)}, term=term, lasting_s=lasting_s)

    def lead(self, name: str) -> LeaderTerm | None:
        return self._store.lead(f"{name}.{self._mac('leader', name)}")

    def _evicted(self, version: str) -> bool:
        """Return whether this forged entry of a leader was there for the time of a lease, and has been removed."""
        if self._forged_leader is None or self._forged_leader[0] != version:
            self._forged_leader = version, time.monotonic()
        if time.monotonic() < self._forged_leader[1] + self.ttl_s:
            return False
        self.evict(version)
        return True

    def _opened(self, key: str, sealed: Mapping[str, Any]) -> Any:
        if key == "leader":
            text, _, mac = str(sealed["name"]).rpartition(".")
        else:
            text, mac = str(sealed["text"]), str(sealed["mac"])
        if not hmac.compare_digest(self._mac(key, text).encode(), mac.encode(errors="replace")):
            raise ValueError("another MAC")
        return {"name": text} if key == "leader" else json.loads(text)

    def _mac(self, key: str, text: str) -> str:
        return hmac.new(self._key, json.dumps([key, text]).encode(), hashlib.sha256).hexdigest()
