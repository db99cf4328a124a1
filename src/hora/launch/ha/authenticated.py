"""A job's store whose values are authenticated with the nodes' secret: a stray or forged entry is named and ignored.

Each value carries a MAC over its key and its text. An entry without a right one is logged once, as the StoreError that
it is, and the job goes on as if it were not there. A `leader` that no node of the job wrote cannot be ignored, because
the store itself honours it: `read` then raises the error.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
from collections.abc import Mapping
from typing import Any

from hora.launch.ha.store import Contents, LeaderTerm, Store, StoreError
from hora.net.wire import derived_secret

__all__ = ["AuthenticatedStore"]

_log = logging.getLogger("hora.launch")


class AuthenticatedStore:
    """A store of one job. `secret`: held by its nodes alone. See `Store`."""

    def __init__(self, store: Store, secret: bytes) -> None:
        self._store, self._secret = store, secret
        self._key = derived_secret(secret, "values of the store")
        self._complained: set[str] = set()

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        return self._store.members

    @property
    def ttl_s(self) -> int:
        return self._store.ttl_s

    def below(self, name: str) -> AuthenticatedStore:
        return AuthenticatedStore(self._store.below(name), self._secret)

    def read(self) -> Contents:
        found, values = self._store.read(), {}
        for key, sealed in found.values.items():
            try:
                values[key] = self._opened(key, sealed)
            except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
                error = self._forged(key)
                if key == "leader" and found.term:
                    raise error from None
                if key not in self._complained:
                    self._complained.add(key)
                    _log.warning("%s; it is ignored", error)
        return Contents(found.term, values)

    def put(self, key: str, value: Mapping[str, Any], *, term: int, lasting_s: int = 0) -> bool:
        text = json.dumps(value)
        return self._store.put(key, {"text": text, "mac": self._mac(key, text)}, term=term, lasting_s=lasting_s)

    def delete(self, key: str, *, term: int) -> bool:
        return self._store.delete(key, term=term)

    def lead(self, name: str) -> LeaderTerm | None:
        return self._store.lead(f"{name}.{self._mac('leader', name)}")

    def renew(self, office: LeaderTerm) -> bool:
        return self._store.renew(office)

    def resign(self, office: LeaderTerm) -> None:
        self._store.resign(office)

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

    def _forged(self, key: str) -> StoreError:
        return StoreError(
            f"the entry {key[:100]!r} in the store (HORA_STORE: {self._store}) was not written by a node of this job: "
            "remove it, and let the job's nodes alone write there"
        )
