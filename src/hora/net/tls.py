"""Encryption between hosts: TLS 1.3, with a certificate that both ends make from the secret they share.

The key of the certificate is derived from the secret, so nothing has to travel or to be kept in a file, and who cannot
make it does not hold the secret. Both ends show it and accept no other. The keys of a connection come from a fresh exchange
(TLS 1.3 has no other way), so who learns the secret later cannot read what was recorded.

Needs the package `cryptography`, which only makes the certificate; the rest is Python's own `ssl`.
"""

from __future__ import annotations

import datetime
import os
import socket
import ssl

from hora.errors import AuthenticationError
from hora.net.wire import derived_secret

__all__ = ["Tls"]


class Tls:
    """Protects connections between those who hold the same secret."""

    def __init__(self, secret: bytes) -> None:
        certificate, key = _certificate(derived_secret(secret, "certificate"))
        self._certificate = ssl.PEM_cert_to_DER_cert(certificate)
        self._client = _context(ssl.PROTOCOL_TLS_CLIENT, certificate, key)
        self._server = _context(ssl.PROTOCOL_TLS_SERVER, certificate, key)
        self._server.num_tickets = 0  # nothing is resumed; and the server's end never has to write

    def wrap_client(self, sock: socket.socket) -> ssl.SSLSocket:
        """The end that opened the connection. Takes the time that the socket's own limit allows."""
        return self._checked(self._client.wrap_socket(sock))

    def wrap_server(self, sock: socket.socket) -> ssl.SSLSocket:
        """The end that accepted the connection."""
        return self._checked(self._server.wrap_socket(sock, server_side=True))

    def _checked(self, sock: ssl.SSLSocket) -> ssl.SSLSocket:
        if sock.getpeercert(binary_form=True) != self._certificate:
            sock.close()
            raise AuthenticationError("the other end showed another certificate than that of this world")
        return sock


def _certificate(seed: bytes) -> tuple[str, str]:
    """The certificate and its private key as PEM text: the same ones wherever they are made from this seed."""
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "hora")])
    # Valid at any time: hosts' clocks differ, and the secret does not outlive its world anyway.
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(datetime.datetime(2000, 1, 1))
        .not_valid_after(datetime.datetime(2999, 1, 1))
        .sign(key, algorithm=None)
    )
    pem = serialization.Encoding.PEM
    private = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return certificate.public_bytes(pem).decode(), private.decode()


def _context(protocol: ssl._SSLMethod, certificate: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate belongs to the world, not to a host
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    if hasattr(ssl, "OP_ENABLE_KTLS"):  # from Python 3.12 on, and where the kernel can
        context.options |= ssl.OP_ENABLE_KTLS
    descriptor = os.memfd_create("certificate")  # `ssl` reads files only, and this one is never on a disk
    try:
        os.write(descriptor, (key + certificate).encode())
        context.load_cert_chain(f"/proc/self/fd/{descriptor}")
    finally:
        os.close(descriptor)
    return context
