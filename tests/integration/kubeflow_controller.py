"""Stand-in for Kubeflow's controller: an HTTPS server with a self-signed certificate that accepts status reports with
the right bearer token.
"""

from __future__ import annotations

import datetime
import ipaddress
import json
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

TOKEN = "token-of-the-pod"


class Controller(ThreadingHTTPServer):
    """`statuses`: the reports received. `variables`: the environment of a TrainJob's pods."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.statuses: list[dict[str, Any]] = []
        self.answer = 200
        certificate, key = _certificate()
        (folder / "ca.crt").write_bytes(certificate)
        (folder / "server.pem").write_bytes(certificate + key)
        (folder / "token").write_text(TOKEN + "\n")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(folder / "server.pem")
        self.socket = context.wrap_socket(self.socket, server_side=True)
        self.variables = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{self.server_port}/apis/lab/trainjobs/train/status",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(folder / "ca.crt"),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(folder / "token"),
        }


class _Handler(BaseHTTPRequestHandler):
    server: Controller

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        trusted = self.headers["Authorization"] == f"Bearer {TOKEN}" and self.path.endswith("/train/status")
        if trusted and self.server.answer == 200:
            self.server.statuses.append(json.loads(body)["trainerStatus"])
        self.send_response(self.server.answer if trusted else 401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None: ...


@contextmanager
def controller(folder: Path) -> Iterator[Controller]:
    server = Controller(folder)
    with serving(server):
        yield server


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[None]:
    """Serve requests in a thread until the block ends."""
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)


def _certificate() -> tuple[bytes, bytes]:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "trainer")])
    address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2999, 1, 1))
        .add_extension(address, critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem), private
