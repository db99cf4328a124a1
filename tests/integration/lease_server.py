"""Minimal Kubernetes API server over TLS: Leases, Secrets, the bearer token of a service account, and a Role.

Updating an object requires its current `resourceVersion` (409 otherwise). A missing object is answered with 404, a
wrong token with 401, a request that the Role does not allow with 403. Nothing else is implemented.
"""

from __future__ import annotations

import copy
import datetime
import ipaddress
import json
import re
import ssl
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from kubeflow_controller import serving

Manifest = dict[str, Any]

_GROUPS = {"/api/v1": "", "/apis/coordination.k8s.io/v1": "coordination.k8s.io"}
_PATH = re.compile(r"(/api/v1|/apis/coordination.k8s.io/v1)/namespaces/([\w-]+)/(leases|secrets)/([\w.-]+)")


class LeaseServer(ThreadingHTTPServer):
    """`folder`: contains `server.crt`, `server.key` and `ca.crt`; the account's folder is created there."""

    daemon_threads = True

    def __init__(self, folder: Path, manifests: Sequence[Manifest]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.crt", folder / "server.key")
        self.socket = context.wrap_socket(self.socket, server_side=True, do_handshake_on_connect=False)
        self.account = folder / "account"
        self.account.mkdir()
        self.token = "a token"
        (self.account / "token").write_text(self.token)
        (self.account / "namespace").write_text("default")
        (self.account / "ca.crt").write_text((folder / "ca.crt").read_text())
        self.lock = threading.Lock()
        self.version = 1000
        self.asked: list[str] = []
        kinds = {"Lease": "leases", "Secret": "secrets"}
        self.objects: dict[tuple[str, str], Manifest] = {}
        for made in copy.deepcopy([manifest for manifest in manifests if manifest["kind"] in kinds]):
            made["metadata"]["resourceVersion"] = self.next_version()
            self.objects[kinds[made["kind"]], made["metadata"]["name"]] = made
        self.rules = [rule for manifest in manifests if manifest["kind"] == "Role" for rule in manifest["rules"]]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the kubelet sets in a container."""
        host, port = self.server_address[:2]
        return {"KUBERNETES_SERVICE_HOST": str(host), "KUBERNETES_SERVICE_PORT": str(port)}

    def url(self, name: str, *options: str) -> str:
        return f"kubernetes://{name}?{'&'.join([f'account={self.account}', *options])}"

    def next_version(self) -> str:
        self.version += 1
        return str(self.version)

    def allows(self, verb: str, group: str, kind: str, name: str) -> bool:
        return any(
            verb in rule["verbs"]
            and group in rule["apiGroups"]
            and kind in rule["resources"]
            and name in rule.get("resourceNames", [name])
            for rule in self.rules
        )

    def get_request(self) -> tuple[Any, Any]:
        sock, address = super().get_request()
        sock.settimeout(10)
        return sock, address

    def handle_error(self, request: Any, client_address: Any) -> None: ...  # killed clients are expected


class _Handler(BaseHTTPRequestHandler):
    server: LeaseServer

    def do_GET(self) -> None:
        self._answer("get")

    def do_PUT(self) -> None:
        self._answer("update", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def _answer(self, verb: str, content: Manifest | None = None) -> None:
        with self.server.lock:
            code, answer = self._handled(verb, content)
        if code != 200:
            answer = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "message": answer["why"]}
        data = json.dumps(answer).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _handled(self, verb: str, content: Manifest | None) -> tuple[int, Mapping[str, Any]]:
        found = _PATH.fullmatch(self.path)
        if self.headers.get("Authorization") != f"Bearer {self.server.token}":
            return 401, {"why": "Unauthorized"}
        if found is None or found[2] != "default":
            return 404, {"why": "the server could not find the requested resource"}
        kind, name = found[3], found[4]
        self.server.asked.append(f"{verb} {kind}")
        if not self.server.allows(verb, _GROUPS[found[1]], kind, name):
            return 403, {"why": f'{kind} "{name}" is forbidden: User cannot {verb} resource "{kind}"'}
        there = self.server.objects.get((kind, name))
        if there is None:
            return 404, {"why": f'{kind} "{name}" not found'}
        if content is not None:
            if content["metadata"].get("resourceVersion") != there["metadata"]["resourceVersion"]:
                return 409, {"why": f'Operation cannot be fulfilled on {kind} "{name}": the object has been modified'}
            there = {**content, "metadata": {**content["metadata"], "resourceVersion": self.server.next_version()}}
            self.server.objects[kind, name] = there
        return 200, there

    def log_message(self, format: str, *args: Any) -> None: ...


def certificates(folder: Path) -> None:
    """Write the certificates of an authority and of a server and a client signed by it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    now = datetime.datetime.now(datetime.timezone.utc)
    keys = {name: ec.generate_private_key(ec.SECP256R1()) for name in ("ca", "server", "client")}
    names = {name: x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]) for name in keys}
    for name, key in keys.items():
        builder = x509.CertificateBuilder().subject_name(names[name]).issuer_name(names["ca"])
        builder = builder.public_key(key.public_key()).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - datetime.timedelta(days=1)).not_valid_after(
            now + datetime.timedelta(1)
        )
        builder = builder.add_extension(x509.BasicConstraints(ca=name == "ca", path_length=None), critical=True)
        own = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
        builder = builder.add_extension(x509.SubjectAlternativeName([own]), critical=False)
        certificate = builder.sign(keys["ca"], hashes.SHA256())
        (folder / f"{name}.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{name}.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


@contextmanager
def lease_server(folder: Path, manifests: Sequence[Manifest]) -> Iterator[LeaseServer]:
    server = LeaseServer(folder, manifests)
    with serving(server):
        yield server
