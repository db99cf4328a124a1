"""An independent client of Hora's wire protocol, written from docs/protocol.md alone: it imports nothing of Hora.

python tests/unit/another_end.py      prints the test vectors of that page
"""

from __future__ import annotations

import hashlib
import hmac
import json
import socket

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

MAGIC = b"HORA/4\r\n"


def mac(key: bytes, data: bytes) -> bytes:
    return hmac.new(key, data, hashlib.sha256).digest()


def derived(secret: bytes, purpose: str) -> bytes:
    return mac(secret, b"derived secret: " + purpose.encode())


def hkdf(key: bytes, material: bytes, count: int) -> list[bytes]:
    temporary, last, outputs = mac(key, material), b"", []
    for number in range(count):
        last = mac(temporary, last + bytes([number + 1]))
        outputs.append(last)
    return outputs


def nonce(number: int) -> bytes:
    return bytes(4) + number.to_bytes(8, "big")


class Direction:
    def __init__(self, key: bytes) -> None:
        self.first_key = self.key = key
        self.number = 0

    def next(self) -> tuple[AESGCM, bytes]:
        if self.number and self.number % 65536 == 0:
            self.key = AESGCM(self.key).encrypt(nonce(2**64 - 1), bytes(32), b"")[:32]
        self.number += 1
        return AESGCM(self.key), nonce(self.number - 1)

    def frame(self, body: bytes) -> bytes:
        cipher, number = self.next()
        return (len(body) + 16).to_bytes(2, "big") + cipher.encrypt(number, body, b"")


class Records:
    """Records of an encrypted stream."""

    def __init__(self, key: bytes, records_of_a_key: int = 65536) -> None:
        self.chain, self.number, self.most = mac(key, b"hora records\x01"), 0, records_of_a_key

    def record(self, data: bytes) -> bytes:
        if self.number == self.most:
            self.chain, self.number = mac(self.chain, b"hora next key\x01"), 0
        self.number += 1
        return AESGCM(self.chain[:16]).encrypt(nonce(self.number - 1), data, b"")


class Client:
    """Performs the handshake over a connected socket, then exchanges messages."""

    def __init__(self, psk: bytes, purpose: str, speaker: int = -1, ephemeral: X25519PrivateKey | None = None) -> None:
        begin, name = MAGIC + speaker.to_bytes(4, "big", signed=True), purpose.encode()
        self.ck = b"Noise_NNpsk0_25519_AESGCM_SHA256"
        self.h = hashlib.sha256(self.ck + begin + len(name).to_bytes(4, "big") + name).digest()
        self.ck, mixed, _ = hkdf(self.ck, psk, 3)
        self.mix_hash(mixed)
        self.private = ephemeral or X25519PrivateKey.generate()
        public = self.private.public_key().public_bytes_raw()
        self.mix_hash(public)
        self.ck, key = hkdf(self.ck, public, 2)
        tag = AESGCM(key).encrypt(nonce(0), b"", self.h)
        self.mix_hash(tag)
        self.hello = begin + public + tag

    def mix_hash(self, data: bytes) -> None:
        self.h = hashlib.sha256(self.h + data).digest()

    def finish(self, answer: bytes) -> bytes:
        public, tag = answer[:32], answer[32:]
        self.mix_hash(public)
        self.ck, _ = hkdf(self.ck, public, 2)
        self.ck, key = hkdf(self.ck, self.private.exchange(X25519PublicKey.from_public_bytes(public)), 2)
        assert AESGCM(key).decrypt(nonce(0), tag, self.h) == b""
        self.out, self.into = (Direction(key) for key in hkdf(self.ck, b"", 2))
        return self.out.frame(b"")

    def connect(self, sock: socket.socket) -> Client:
        self.sock = sock
        sock.sendall(self.hello)
        sock.sendall(self.finish(received(sock, 48)))
        return self

    def frames(self, header: dict[str, object], payload: bytes = b"") -> list[bytes]:
        text = json.dumps({**header, "_n": len(payload)}, separators=(",", ":")).encode()
        whole = len(text).to_bytes(2, "big") + text + payload
        return [self.out.frame(whole[at : at + 65519]) for at in range(0, len(whole), 65519)]

    def send(self, header: dict[str, object], payload: bytes = b"") -> None:
        self.sock.sendall(b"".join(self.frames(header, payload)))

    def body(self) -> bytes:
        sealed = received(self.sock, int.from_bytes(received(self.sock, 2), "big"))
        cipher, number = self.into.next()
        return cipher.decrypt(number, sealed, b"")

    def receive(self) -> tuple[dict[str, object], bytes]:
        body = self.body()
        end = 2 + int.from_bytes(body[:2], "big")
        header, payload = json.loads(body[2:end]), body[end:]
        num_bytes = header.pop("_n")
        while len(payload) < num_bytes:
            payload += self.body()
        return header, payload


def received(sock: socket.socket, num_bytes: int) -> bytes:
    """Read exactly `num_bytes`; MSG_WAITALL may return fewer on a socket with a timeout."""
    data = b""
    while len(data) < num_bytes:
        more = sock.recv(num_bytes - len(data))
        assert more, "the connection has ended"
        data += more
    return data


MESSAGES = [({"op": "set", "id": 1, "key": "k"}, b"value"), ({"op": "set", "id": 2, "key": "long"}, b"x" * 70000)]


def vectors() -> dict[str, str]:
    """Compute the client's side of a connection to a server with a known ephemeral key, and of a stream."""
    private = [X25519PrivateKey.from_private_bytes(bytes([number]) * 32) for number in (0x11, 0x22)]
    secret = bytes(range(32))
    psk = derived(secret, "worker 3")
    client = Client(psk, "job-1", 3, private[0])
    hello = client.hello
    # The server's answer takes the same steps with the other private key.
    public = private[1].public_key().public_bytes_raw()
    ck, h = hkdf(client.ck, public, 2)[0], hashlib.sha256(client.h + public).digest()
    key = hkdf(ck, private[1].exchange(private[0].public_key()), 2)[1]
    answer = public + AESGCM(key).encrypt(nonce(0), b"", h)
    confirmation = client.finish(answer)
    short, long = (client.frames(*message) for message in MESSAGES)
    client.out.number = 65536
    rekeyed = client.out.frame(b"after 65,536 messages")
    records = Records(client.out.first_key)
    first = [records.record(data) for data in (b"first", b"second")]
    records.number = 65536
    third = records.record(b"third")
    named = {"psk": psk, "hello": hello, "answer": answer, "client_to_server_key": client.out.first_key}
    named |= {"server_to_client_key": client.into.first_key, "confirmation": confirmation}
    named |= {"short_message": short[0], "sha256_of_long_message": hashlib.sha256(b"".join(long)).digest()}
    named |= {"frame_65536": rekeyed, "record_0": first[0], "record_1": first[1], "record_65536": third}
    return {name: value.hex() for name, value in named.items()}


if __name__ == "__main__":
    print(json.dumps(vectors(), indent=1))
