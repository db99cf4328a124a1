"""A Lease and a Secret of Kubernetes' API as the store of a job's state.

The Lease names the leader; its `leaseTransitions` is the leader's term. The Secret holds the values and the greatest
term that has written to it. Both are updated with optimistic concurrency (`resourceVersion`): a leader raises the
Secret's term before it reads anything, and from then on leaders of earlier terms are refused. Clocks of different
machines are not compared: a Lease expires if this process sees no change for its duration.

The API server and the service account are the pod's. Both objects must exist; they are not created here.
"""

from __future__ import annotations

import base64
import http.client
import json
import secrets
import ssl
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from hora.launch.ha.store import LONGEST_TTL_S, Contents, LeaderTerm, StoreError, decoded, exchange, lease_time

_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"
_LEASE, _SECRET = ("Lease", "/apis/coordination.k8s.io/v1", "leases"), ("Secret", "/api/v1", "secrets")
_ATTEMPTS = 10
_CONFLICT = 409


@dataclass(kw_only=True)
class LeaseStore:
    """See `store.JobStore`. `name`: of both objects. `account`: a folder with `token`, `ca.crt` and `namespace`."""

    name: str
    members: tuple[tuple[str, int], ...]
    account: Path
    namespace: str
    tls: ssl.SSLContext = field(repr=False)
    ttl_s: int = 3
    job: str = ""
    _seen: tuple[str, float] = ("", 0.0)  # the Lease's version, and since when

    @classmethod
    def from_url(cls, url: str, environ: Mapping[str, str]) -> LeaseStore:
        """Parse an address. Raises ValueError if it is invalid, or outside a pod."""
        parts, options = urlsplit(url), dict(parse_qsl(urlsplit(url).query))
        if not parts.netloc or parts.path.strip("/"):
            raise ValueError(f"HORA_STORE must look like kubernetes://name, but it is {url}")
        if unknown := sorted(options.keys() - {"account", "ttl"}):
            raise ValueError(f"HORA_STORE knows ?account= and ttl= of kubernetes://, but not {', '.join(unknown)}")
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        account = Path(options.get("account", _ACCOUNT))
        try:
            namespace = (account / "namespace").read_text(encoding="ascii").strip()
            tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        except OSError as error:
            raise ValueError(f"HORA_STORE={url} is for pods with a service account ({error})") from None
        if not host or not port.isdecimal():
            raise ValueError(f"HORA_STORE={url} is for pods, but KUBERNETES_SERVICE_HOST and _PORT are not set")
        return cls(
            name=parts.netloc,
            members=((host, int(port)),),
            account=account,
            namespace=namespace,
            tls=tls,
            ttl_s=lease_time(options.get("ttl", "3")),
        )

    def below(self, name: str) -> LeaseStore:
        """Return the store of a job. Refused if another job is using it."""
        return replace(self, job=name)

    def __str__(self) -> str:
        return f"the Lease and the Secret {self.name} in {self.namespace}"

    def read(self) -> Contents:
        lease = self._get(_LEASE)
        term, values = self._leader(lease), self._values(self._get(_SECRET))
        values.pop("leader", None)
        if term:
            holder = str(lease["spec"]["holderIdentity"])
            values["leader"] = {"name": holder.removeprefix(f"{self.job}.").rpartition(".")[0]}
        return Contents(term, values, str(lease["metadata"]["resourceVersion"]))

    def put(self, key: str, value: Mapping[str, Any], *, term: int, lasting_s: int = 0) -> bool:
        """Set a value as this leader; return False if a later one leads. It lasts until the next run."""
        return self._write(term, lambda values: values.update({key: value}))

    def delete(self, key: str, *, term: int) -> bool:
        return self._write(term, lambda values: values.pop(key, None))

    def lead(self, name: str) -> LeaderTerm | None:
        lease = self._get(_LEASE)
        if self._leader(lease):
            return None
        spec = lease.get("spec") or {}
        term = 1 + max(int(spec.get("leaseTransitions") or 0), self._written_by(self._get(_SECRET)))
        leader = LeaderTerm(term, f"{self.job}.{name}.{secrets.token_hex(4)}")
        now = {"acquireTime": _now(), "renewTime": _now()}
        lease["spec"] = {"holderIdentity": leader.lease, "leaseTransitions": term, "leaseDurationSeconds": self.ttl_s}
        lease["spec"] |= now
        if not self._replace(_LEASE, lease) or not self._write(term, lambda values: None):
            return None
        return leader

    def renew(self, leader: LeaderTerm) -> bool:
        return self._hold(leader, {"renewTime": _now()})

    def resign(self, leader: LeaderTerm) -> None:
        self._hold(leader, {"holderIdentity": ""})

    def evict(self, leader_version: str) -> None:
        """Remove the leader's name from the Lease, unless the Lease has another version."""
        lease = self._get(_LEASE)
        if str(lease["metadata"]["resourceVersion"]) == leader_version:
            self._replace(_LEASE, {**lease, "spec": {**(lease.get("spec") or {}), "holderIdentity": ""}})

    # ---- the Lease ------------------------------------------------------------------------------------------

    def _leader(self, lease: Mapping[str, Any]) -> int:
        """Return the leader's term, 0 without a leader. Raises StoreError if the leader is of another job."""
        spec, version, now = lease.get("spec") or {}, str(lease["metadata"]["resourceVersion"]), time.monotonic()
        if self._seen[0] != version:
            self._seen = version, now
        _, since = self._seen
        holder = spec.get("holderIdentity") or ""
        if not holder or now >= since + min(float(spec.get("leaseDurationSeconds") or 0), LONGEST_TTL_S):
            return 0
        if self.job and not holder.startswith(f"{self.job}."):
            raise StoreError(f"another job uses the Lease {self.name}; give each job its own (HORA_STORE)")
        return int(spec.get("leaseTransitions") or 0)

    def _hold(self, leader: LeaderTerm, change: Mapping[str, Any]) -> bool:
        """Change the Lease if this leader holds it."""
        for _ in range(_ATTEMPTS):
            lease = self._get(_LEASE)
            spec = lease.get("spec") or {}
            if spec.get("holderIdentity") != leader.lease:
                return False
            if self._replace(_LEASE, {**lease, "spec": {**spec, **change}}):
                return True
        raise StoreError(f"the Lease {self.name} is changed by others all the time")

    # ---- the Secret -----------------------------------------------------------------------------------------

    def _values(self, secret: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values of this job; values of another job are ignored."""
        entries = (secret.get("data") or {}).items()
        data = {key: base64.b64decode(text).decode(errors="replace") for key, text in entries}
        if data.pop("job", "") != self.job:
            return {}
        return {key: decoded(text) for key, text in data.items() if key != "term"}

    def _written_by(self, secret: Mapping[str, Any]) -> int:
        text = (secret.get("data") or {}).get("term", "")
        try:
            return int(base64.b64decode(text) or 0)
        except ValueError:
            raise StoreError(
                f"the `term` of the Secret {self.name} is no number: somebody else has written it; delete the Secret, "
                "or set it to the `leaseTransitions` of the Lease"
            ) from None

    def _write(self, term: int, change: Callable[[dict[str, Any]], object]) -> bool:
        for _ in range(_ATTEMPTS):
            secret = self._get(_SECRET)
            if self._written_by(secret) > term:
                return False
            values = self._values(secret)
            change(values)
            texts = {**{key: json.dumps(value) for key, value in values.items()}, "job": self.job, "term": str(term)}
            secret["data"] = {key: base64.b64encode(text.encode()).decode() for key, text in texts.items()}
            if self._replace(_SECRET, secret):
                return True
        raise StoreError(f"the Secret {self.name} is changed by others all the time")

    # ---- the wire -------------------------------------------------------------------------------------------

    def _get(self, kind: tuple[str, str, str]) -> dict[str, Any]:
        return self._request("GET", kind, None)

    def _replace(self, kind: tuple[str, str, str], content: Mapping[str, Any]) -> bool:
        """Replace the object; return False if it has changed since it was read."""
        return self._request("PUT", kind, content).get("code") != _CONFLICT

    def _request(self, method: str, kind: tuple[str, str, str], content: Mapping[str, Any] | None) -> dict[str, Any]:
        path = f"{kind[1]}/namespaces/{self.namespace}/{kind[2]}/{self.name}"
        try:
            # The kubelet rotates the token file before the token expires, so read it each time.
            token = (self.account / "token").read_text(encoding="ascii").strip()
            headers = {"Authorization": f"Bearer {token}"}
            status, answer = exchange(self.members[0], method, path, content, headers, self.tls, ttl_s=self.ttl_s)
        except (OSError, http.client.HTTPException, ValueError) as error:
            where = f"{self.members[0][0]}:{self.members[0][1]}"
            raise StoreError(
                f"Kubernetes' API server (HORA_STORE) does not answer at {where}: {error or type(error).__name__}"
            ) from None
        if status == _CONFLICT and method == "PUT":
            return {"code": _CONFLICT}
        if status == 200:
            return answer
        said = str(answer.get("message") or f"status {status}")
        if status in (401, 403):
            raise StoreError(
                f"Kubernetes' API server (HORA_STORE) refuses this pod's service account: {said}; it must be allowed "
                f"to get and update the Lease and the Secret {self.name}"
            )
        if status == 404:
            said = f"there is no {kind[0]} {self.name} in {self.namespace}; apply what hora kubernetes prints"
        raise StoreError(f"Kubernetes' API server (HORA_STORE): {said}")


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
