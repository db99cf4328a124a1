"""The store: where the state of a job lives that its leader must not take along when it dies.

`HORA_STORE=etcd://user:password@host:2379,host2:2379/prefix`; `etcds://`, or `?ca=FILE&cert=FILE&key=FILE`, is TLS.
Inside Kubernetes `HORA_STORE=kubernetes://name`: a Lease and a Secret of that name. `?ttl=3` says after how many
seconds a leader that does not renew its lease is replaced. Values are small and hold no secret.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from hora.launch.ha.etcd import Etcd
from hora.launch.ha.kubernetes import LeaseStore
from hora.launch.ha.office import Contents, Office, StoreError

__all__ = ["Contents", "Office", "Store", "StoreError", "open_store"]


class Store(Protocol):
    """Interface of stores. All methods raise StoreError, and may be called from several threads."""

    @property
    def members(self) -> tuple[tuple[str, int], ...]:
        """The addresses of its servers."""

    @property
    def ttl_s(self) -> int:
        """Seconds after which a leader that does not renew its lease is replaced."""

    def below(self, name: str) -> Store:
        """The part of a job."""

    def read(self) -> Contents:
        """The leader's term, and all values that were there since."""

    def put(self, key: str, value: Mapping[str, Any], *, term: int, lasting_s: int = 0) -> bool:
        """Set a value in the name of a leader; False if a later one leads. `lasting_s`: how long it is needed."""

    def delete(self, key: str, *, term: int) -> bool:
        """Remove a value in the name of a leader."""

    def lead(self, name: str) -> Office | None:
        """Become the leader, unless there is one."""

    def renew(self, office: Office) -> bool:
        """Return whether this leader still leads; its lease then begins anew."""

    def resign(self, office: Office) -> None:
        """Lead no more."""


def open_store(url: str, environ: Mapping[str, str]) -> Store:
    """ValueError, without the password, for an address that cannot be meant."""
    return LeaseStore.from_url(url, environ) if url.startswith("kubernetes:") else Etcd.from_url(url)
