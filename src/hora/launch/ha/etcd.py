"""An etcd cluster as the store of a job's state: its v3 API as JSON (its gRPC gateway), with the standard library.

The leader holds the key `leader` under a lease that it renews. The revision that created the key is the leader's term.
A write of a term succeeds only while that leader leads.
"""

from __future__ import annotations

import base64
import http.client
import json
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from hora.launch.ha.store import Contents, LeaderTerm, StoreError, decoded, exchange, lease_time

_PORT = 2379
_BAD_PASSWORD, _BAD_TOKEN = "authentication failed", "invalid auth token"


@dataclass(kw_only=True)
class Etcd:
    """A cluster and the prefix of a job's keys: see `store.JobStore`."""

    members: tuple[tuple[str, int], ...]
    prefix: str
    user: str = ""
    password: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    ttl_s: int = 3
    _member: int = 0  # the one that answered last
    _token: str = field(default="", repr=False)

    @classmethod
    def from_url(cls, url: str) -> Etcd:
        """Parse an address. Raises ValueError, without the password, if it is invalid."""
        parts = urlsplit(url)
        options = dict(parse_qsl(parts.query))
        if parts.scheme not in ("etcd", "etcds") or not parts.netloc:
            raise ValueError(
                "HORA_STORE must look like etcd://user:password@host:2379,host2:2379/prefix or kubernetes://name"
            )
        unknown = sorted(options.keys() - {"ca", "cert", "key", "ttl"})
        if unknown:
            raise ValueError(f"HORA_STORE knows ?ca=, cert=, key= and ttl=, but not {', '.join(unknown)}")
        ttl_s = lease_time(options.pop("ttl", "3"))
        login, _, hosts = parts.netloc.rpartition("@")
        user, _, password = login.partition(":")
        members = []
        for text in hosts.split(","):
            host, colon, port = text.rpartition(":") if not text.endswith("]") else (text, "", "")
            if (colon and not port.isdecimal()) or not (host if colon else text):
                raise ValueError(f"HORA_STORE names a member {text!r}: host or host:port is expected")
            members.append(((host if colon else text).strip("[]"), int(port) if colon else _PORT))
        prefix = f"/{parts.path.strip('/') or 'hora'}/"
        tls = _tls(options) if parts.scheme == "etcds" or options else None
        user, password = unquote(user), unquote(password)
        return cls(members=tuple(members), prefix=prefix, user=user, password=password, tls=tls, ttl_s=ttl_s)

    def below(self, name: str) -> Etcd:
        """The same with a prefix below this one."""
        return replace(self, prefix=f"{self.prefix}{name}/")

    def __str__(self) -> str:
        return f"etcd, keys below {self.prefix}"

    def read(self) -> Contents:
        """Return a consistent snapshot of the leader's term and all values."""
        end = base64.b64encode(f"{self.prefix[:-1]}0".encode()).decode()  # '0' follows '/'
        found = self._request("kv/range", {"key": self._key(""), "range_end": end}).get("kvs", [])
        names = [base64.b64decode(one["key"]).decode(errors="replace").removeprefix(self.prefix) for one in found]
        leaders = [one for name, one in zip(names, found, strict=True) if name == "leader"]
        values = {
            name: decoded(base64.b64decode(one.get("value", "")))
            for name, one in zip(names, found, strict=True)
            if "/" not in name
        }
        if not leaders:
            return Contents(0, values)
        return Contents(int(leaders[0]["create_revision"]), values, str(leaders[0]["mod_revision"]))

    def put(self, key: str, value: Mapping[str, Any], *, term: int, lasting_s: int = 0) -> bool:
        lease = self._grant(lasting_s) if lasting_s else "0"
        return bool(self._led(term, {"requestPut": {"key": self._key(key), "value": _encode(value), "lease": lease}}))

    def delete(self, key: str, *, term: int) -> bool:
        return bool(self._led(term, {"requestDeleteRange": {"key": self._key(key)}}))

    def lead(self, name: str) -> LeaderTerm | None:
        lease = self._grant(self.ttl_s)
        answer = self._led(0, self._leader_entry(name, lease))
        if not answer:
            self.resign(LeaderTerm(0, lease))
            return None
        return LeaderTerm(answer, lease, name)

    def renew(self, leader: LeaderTerm) -> bool:
        """Renew the lease; return whether this leader still leads. If another client's write detached the entry from
        the lease, it would outlive this leader: restore it.
        """
        answer = self._request("lease/keepalive", {"ID": leader.lease})
        if int(answer.get("result", {}).get("TTL", 0)) <= 0:
            return False
        if self._conditionally("MOD", "mod_revision", leader.term, []):
            return True
        return bool(self._led(leader.term, self._leader_entry(leader.name, leader.lease)))

    def resign(self, leader: LeaderTerm) -> None:
        self._request("lease/revoke", {"ID": leader.lease})

    def evict(self, leader_version: str) -> None:
        remove = {"requestDeleteRange": {"key": self._key("leader")}}
        self._conditionally("MOD", "mod_revision", int(leader_version), [remove])

    def _leader_entry(self, name: str, lease: str) -> Mapping[str, Any]:
        return {"requestPut": {"key": self._key("leader"), "value": _encode({"name": name}), "lease": lease}}

    def _grant(self, ttl_s: int) -> str:
        return str(self._request("lease/grant", {"TTL": str(ttl_s)})["ID"])

    def _led(self, term: int, then: Mapping[str, Any]) -> int:
        """Do this if the leader of that term leads (0: no leader); return the revision, or 0 if it was not done."""
        return self._conditionally("CREATE", "create_revision", term, [then])

    def _conditionally(self, target: str, field: str, revision: int, then: Sequence[Mapping[str, Any]]) -> int:
        """Do this if that revision of the leader's entry matches; return the new revision, or 0 if it was not done."""
        condition = {"key": self._key("leader"), "target": target, "result": "EQUAL", field: str(revision)}
        answer = self._request("kv/txn", {"compare": [condition], "success": list(then)})
        return int(answer["header"]["revision"]) if answer.get("succeeded") else 0

    # ---- the wire -------------------------------------------------------------------------------------------

    def _key(self, name: str) -> str:
        return base64.b64encode((self.prefix + name).encode()).decode()

    def _request(self, path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        """Send one request to the member that answered last, then to the others. StoreError lists all replies."""
        first, problems = self._member, []
        for number in range(len(self.members)):
            member = (first + number) % len(self.members)
            try:
                answer = self._authorized(self.members[member], path, question)
            except (OSError, http.client.HTTPException, ValueError) as error:
                if isinstance(error, StoreError):
                    raise
                problems.append(f"{self.members[member][0]}:{self.members[member][1]}: {error or type(error).__name__}")
                continue
            self._member = member
            return answer
        raise StoreError(f"no member of the store (HORA_STORE) answers: {'; '.join(problems)}")

    def _authorized(self, member: tuple[str, int], path: str, question: Mapping[str, Any]) -> dict[str, Any]:
        for attempt in (1, 2):
            token = self._token
            if self.user and not token:
                login = {"name": self.user, "password": self.password}
                status, answer = self._post(member, "auth/authenticate", login, "")
                self._raise_for(status, answer)
                self._token = token = str(answer["token"])
            status, answer = self._post(member, path, question, token)
            if _BAD_TOKEN in str(answer.get("error", "")) and attempt == 1:  # it has expired, or the member is new
                self._token = ""
                continue
            self._raise_for(status, answer)
            return answer
        raise AssertionError("unreachable")

    def _raise_for(self, status: int, answer: Mapping[str, Any]) -> None:
        if status == 200 and "error" not in answer:
            return
        text = str(answer.get("message") or answer.get("error") or f"status {status}")
        if _BAD_PASSWORD in text or "user name is empty" in text or "permission denied" in text:
            who = f"user {self.user!r}" if self.user else "a client without a user"
            raise StoreError(
                f"the store (HORA_STORE) refuses {who}: {text}; check the user, the password and the user's "
                f"role for {self.prefix}"
            )
        if "lease not found" in text:
            raise StoreError(text)
        raise OSError(text)  # such as a member without a leader: try the next one

    def _post(
        self, member: tuple[str, int], path: str, question: Mapping[str, Any], token: str
    ) -> tuple[int, dict[str, Any]]:
        headers = {"Authorization": token} if token else {}
        return exchange(member, "POST", f"/v3/{path}", question, headers, self.tls, ttl_s=self.ttl_s)


def _encode(value: Mapping[str, Any]) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def _tls(options: Mapping[str, str]) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=options.get("ca"))
        if "cert" in options:
            context.load_cert_chain(options["cert"], options.get("key"))
    except OSError as error:
        raise ValueError(f"HORA_STORE: its ca=, cert= and key= cannot be used ({error})") from None
    return context
