"""Noise_NNpsk0_25519_AESGCM_SHA256 against the public test vectors, and its rekeying."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from hora.errors import AuthenticationError
from hora.net import noise
from hora.net.noise import Cipher, Handshake

# The vectors of cacophony, which snow and others use as well.
(VECTOR,) = (
    vector
    for vector in json.loads(Path(__file__).with_name("noise_vectors.json").read_text())["vectors"]
    if vector["protocol_name"] == "Noise_NNpsk0_25519_AESGCM_SHA256"
)


def end(name: str) -> Handshake:
    (psk,), prologue, ephemeral = (VECTOR[f"{name}_{field}"] for field in ("psks", "prologue", "ephemeral"))
    private = X25519PrivateKey.from_private_bytes(bytes.fromhex(ephemeral))
    return Handshake(bytes.fromhex(psk), bytes.fromhex(prologue), initiator=name == "init", ephemeral=private)


def test_the_public_vectors():
    initiator, responder = end("init"), end("resp")
    first, second, *rest = [
        (bytes.fromhex(message["payload"]), bytes.fromhex(message["ciphertext"])) for message in VECTOR["messages"]
    ]
    assert initiator.write(first[0]) == first[1]
    assert responder.read(first[1]) == first[0]
    assert responder.write(second[0]) == second[1]
    assert initiator.read(second[1]) == second[0]
    assert initiator.hash == responder.hash == bytes.fromhex(VECTOR["handshake_hash"])
    assert initiator.split() == responder.split()
    seals, opens = ([Cipher(key) for key in one.split()] for one in (initiator, responder))
    assert len(rest) >= 4
    for number, (payload, ciphertext) in enumerate(rest):
        assert seals[number % 2].seal(payload) == ciphertext
        assert opens[number % 2].open(ciphertext) == payload


def test_both_ends_rekey_after_a_fixed_number_of_messages(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(noise, "_MESSAGES_OF_A_KEY", 3)
    key = bytes(range(32))
    sealer, opener = Cipher(key), Cipher(key)
    sealed = [sealer.seal(b"message") for _ in range(8)]
    for number, one in enumerate(sealed):
        if number in (3, 6):  # REKEY(k) of the specification, which leaves the nonces alone
            key = AESGCM(key).encrypt(bytes(4) + b"\xff" * 8, bytes(32), None)[:32]
        assert AESGCM(key).decrypt(bytes(4) + number.to_bytes(8, "big"), one, None) == b"message"
        assert opener.open(one) == b"message"


@pytest.mark.parametrize("theirs", [bytes(32), b"\x01" + bytes(31)], ids=["zero", "one"])
def test_a_public_key_without_a_shared_secret_is_rejected(theirs: bytes):
    """Only a holder of the key can send one; anyone who learns the key later could then read the connection."""
    initiator, responder = end("init"), end("resp")
    initiator._mix_hash(theirs)
    initiator._chaining_key, key = noise.hkdf(initiator._chaining_key, theirs, 2)
    responder.read(theirs + Cipher(key).seal(b"", initiator.hash))
    with pytest.raises(AuthenticationError, match="yields no shared key"):
        responder.write()


def test_a_missing_curve_of_openssl_is_named(monkeypatch: pytest.MonkeyPatch):
    class Fips:
        @staticmethod
        def generate() -> None:
            raise UnsupportedAlgorithm("X25519 is not supported by this version of OpenSSL.")

    monkeypatch.setattr(noise, "X25519PrivateKey", Fips)
    with pytest.raises(AuthenticationError, match=r"OpenSSL of this host lacks.*X25519 is not supported"):
        Handshake(bytes(32), b"", initiator=True).write()
