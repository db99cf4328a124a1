"""The wire protocol, without sockets: proofs, signatures, limits."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.errors import AuthenticationError
from hora.net.cipher import Encryption
from hora.net.wire import (
    MAX_FRAME_BYTES,
    ClientHandshake,
    Credentials,
    Keys,
    Opener,
    Sealer,
    ServerHandshake,
    mask,
    new_secret,
)


def shake_hands(client_secret: bytes, server_secret: bytes, *, jobs: tuple[str, str] = ("job", "job")):
    client, server = (
        ClientHandshake(Credentials(client_secret, jobs[0])),
        ServerHandshake(Credentials(server_secret, jobs[1])),
    )
    challenge = server.feed(client.hello)
    client_keys, proof = client.answer(challenge)
    server.feed(proof)
    assert server.done
    return client_keys, server.keys


def test_both_sides_derive_the_same_keys_and_the_directions_differ():
    secret = new_secret()
    client, server = shake_hands(secret, secret)
    assert client.to_server == server.to_server
    assert client.to_client == server.to_client
    assert client.to_server != client.to_client


def test_every_connection_has_keys_of_its_own():
    secret = new_secret()
    assert shake_hands(secret, secret)[0].to_server != shake_hands(secret, secret)[0].to_server


def test_a_server_without_the_secret_is_recognised():
    with pytest.raises(AuthenticationError, match="server does not hold"):
        shake_hands(new_secret(), new_secret())


def test_a_server_of_another_job_with_the_same_secret_is_recognised():
    secret = new_secret()
    with pytest.raises(AuthenticationError, match="server does not hold"):
        shake_hands(secret, secret, jobs=("one", "other"))


def test_a_client_without_the_secret_is_recognised():
    server = ServerHandshake(Credentials(new_secret(), "job"))
    server.feed(ClientHandshake(Credentials(new_secret(), "job")).hello)
    with pytest.raises(AuthenticationError, match="does not hold the job's secret"):
        server.feed(b"\0" * 32)


def test_each_speaks_for_the_number_whose_key_it_holds():
    keys = {1: new_secret(), 2: new_secret()}

    def of(number: int) -> Credentials:
        return Credentials(keys[number], "job", number) if number in keys else Credentials(keys[1], "job", 1)

    for number in keys:
        client, server = ClientHandshake(of(number)), ServerHandshake(of)
        server.feed(client.answer(server.feed(client.hello))[1])
        assert (server.done, server.speaker) == (True, number)
    for secret, number in ((keys[1], 2), (keys[2], 1)):
        client, server = ClientHandshake(Credentials(secret, "job", number)), ServerHandshake(of)
        challenge = server.feed(client.hello)
        with pytest.raises(AuthenticationError, match="server does not hold"):
            client.answer(challenge)
        with pytest.raises(AuthenticationError, match="does not hold the job's secret"):
            server.feed(Keys(Credentials(secret, "job", number), client.hello[-32:], challenge[1:33]).client_proof)
    for number in (-1, 3):
        with pytest.raises(AuthenticationError, match=f"number {number}, which has no key here"):
            ServerHandshake(of).feed(ClientHandshake(Credentials(keys[1], "job", number)).hello)


def test_what_is_masked_is_itself_again_under_the_same_key_and_nonce_only():
    secret, nonce, data = new_secret(), os.urandom(32), os.urandom(100)
    masked = mask(secret, nonce, data)
    assert mask(secret, nonce, masked) == data != masked
    assert data not in (mask(secret, os.urandom(32), masked), mask(new_secret(), nonce, masked))
    assert mask(secret, nonce, b"") == b""


def test_a_client_cannot_reflect_the_servers_proof():
    server = ServerHandshake(Credentials(new_secret(), "job"))
    challenge = server.feed(ClientHandshake(Credentials(new_secret(), "job")).hello)
    with pytest.raises(AuthenticationError):
        server.feed(challenge[33:])


def test_a_recorded_handshake_cannot_be_replayed():
    secret = new_secret()
    client, server = ClientHandshake(Credentials(secret, "job")), ServerHandshake(Credentials(secret, "job"))
    _, proof = client.answer(server.feed(client.hello))
    again = ServerHandshake(Credentials(secret, "job"))
    again.feed(client.hello)
    with pytest.raises(AuthenticationError):
        again.feed(proof)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\x80\x04K*.", b"\xff" * 64, b"HORA/1\r\n"])
def test_garbage_is_refused_at_its_first_wrong_byte(garbage: bytes):
    server = ServerHandshake(Credentials(new_secret(), "job"))
    with pytest.raises(AuthenticationError, match="does not speak"):
        server.feed(garbage[: server.wanted_bytes])


def test_a_stranger_is_never_asked_for_more_than_a_few_bytes():
    server = ServerHandshake(Credentials(new_secret(), "job"))
    assert server.wanted_bytes == 45
    server.feed(ClientHandshake(Credentials(new_secret(), "job")).hello)
    assert server.wanted_bytes == 32


def test_a_short_secret_is_refused():
    with pytest.raises(ValueError, match="32 bytes"):
        Credentials(b"short", "job")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary(max_size=2000)), max_size=5),
    st.integers(1, 700),
)
def test_messages_survive_being_cut_anywhere(messages, step: int):
    messages = [({k: v for k, v in header.items() if k != "_n"}, payload) for header, payload in messages]
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32)
    stream = b"".join(frame for header, payload in messages for frame in sealer.frames(header, payload))
    got = [m for i in range(0, len(stream), step) for m in opener.feed(stream[i : i + step])]
    assert got == messages


@pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES - 20, MAX_FRAME_BYTES, 3 * MAX_FRAME_BYTES + 5])
def test_large_payloads_travel_in_bounded_frames(size: int):
    payload = os.urandom(size)
    frames = list(Sealer(b"k" * 32).frames({"op": "x"}, payload))
    assert all(len(frame) <= MAX_FRAME_BYTES + 36 for frame in frames)
    opener = Opener(b"k" * 32)
    assert [m for frame in frames for m in opener.feed(frame)] == [({"op": "x"}, payload)]


def frames_of(*payloads: bytes) -> list[bytes]:
    sealer = Sealer(b"k" * 32)
    return [frame for payload in payloads for frame in sealer.frames({}, payload)]


@pytest.mark.parametrize("position", [0, 3, 10, 40, -1])
def test_one_changed_bit_is_noticed(position: int):
    frame = bytearray(frames_of(b"payload")[0])
    frame[position] ^= 1
    opener = Opener(b"k" * 32)
    with pytest.raises(AuthenticationError):
        # A longer announced length makes the receiver wait for more: give it some.
        list(opener.feed(bytes(frame) + b"\0" * MAX_FRAME_BYTES))


def test_a_replayed_frame_is_noticed():
    first, _ = frames_of(b"one", b"two")
    opener = Opener(b"k" * 32)
    list(opener.feed(first))
    with pytest.raises(AuthenticationError, match="signature"):
        list(opener.feed(first))


def test_reordered_and_dropped_frames_are_noticed():
    _, second = frames_of(b"one", b"two")
    with pytest.raises(AuthenticationError, match="signature"):
        list(Opener(b"k" * 32).feed(second))


def test_a_frame_of_the_other_direction_is_noticed():
    keys = Keys(Credentials(new_secret(), "job"), b"c" * 32, b"s" * 32)
    frame = next(Sealer(keys.to_server).frames({}, b""))
    with pytest.raises(AuthenticationError):
        list(Opener(keys.to_client).feed(frame))


def test_a_huge_announced_length_is_refused_before_anything_is_kept():
    with pytest.raises(AuthenticationError, match="limit"):
        list(Opener(b"k" * 32).feed(b"\xff\xff\xff\xff" + b"\0" * 32))


def test_a_header_that_is_too_large_is_the_senders_mistake():
    with pytest.raises(ValueError, match="header"):
        list(Sealer(b"k" * 32).frames({"x": "y" * 70000}))


def encrypted(client: Encryption, server: Encryption) -> tuple[Keys, Keys | None]:
    secret = new_secret()
    one, other = (
        ClientHandshake(Credentials(secret, "job"), client),
        ServerHandshake(Credentials(secret, "job"), server),
    )
    keys, proof = one.answer(other.feed(one.hello))
    other.feed(proof)
    assert other.done
    return keys, other.keys


def test_a_connection_is_encrypted_where_both_ends_want_it():
    for client in Encryption:
        for server in Encryption:
            if Encryption.REQUIRED in (client, server) and Encryption.NONE in (client, server):
                with pytest.raises(AuthenticationError, match="encrypt, which HORA_ENCRYPT=always asks for"):
                    encrypted(client, server)
                continue
            keys, theirs = encrypted(client, server)
            assert keys.encrypted == theirs.encrypted == bool(client and server)
            assert (keys.to_server, keys.to_client) == (theirs.to_server, theirs.to_client)


@pytest.mark.parametrize("at", [8, 20])
def test_who_stands_between_cannot_talk_the_ends_out_of_encryption(at: int):
    """Nor change a half of their exchange: what was said is part of the proofs."""
    secret = new_secret()
    client = ClientHandshake(Credentials(secret, "job"), Encryption.OFFERED)
    server = ServerHandshake(Credentials(secret, "job"), Encryption.OFFERED)
    hello = bytearray(client.hello)
    hello[at] ^= 1
    with pytest.raises(AuthenticationError, match="server does not hold"):
        client.answer(server.feed(bytes(hello)))
    challenge = bytearray(ServerHandshake(Credentials(secret, "job"), Encryption.OFFERED).feed(client.hello))
    challenge[0] ^= 1
    with pytest.raises(AuthenticationError, match="server does not hold"):
        client.answer(bytes(challenge))


def test_halves_that_give_no_key_are_refused():
    hello = bytearray(ClientHandshake(Credentials(new_secret(), "job"), Encryption.OFFERED).hello)
    hello[-32:] = bytes(32)
    with pytest.raises(AuthenticationError, match="gives no key"):
        ServerHandshake(Credentials(new_secret(), "job"), Encryption.OFFERED).feed(bytes(hello))


def test_encrypted_frames_hide_what_they_carry_and_notice_every_change():
    key, text = new_secret(), b"what nobody reads"
    sealer, opener = Sealer(key, encrypted=True), Opener(key, encrypted=True)
    frames = [frame for _ in range(2) for frame in sealer.frames({"op": text.decode()}, text * 20)]
    assert frames[0] != frames[1]
    assert text not in b"".join(frames)
    assert list(opener.feed(frames[0])) == [({"op": text.decode()}, text * 20)]
    with pytest.raises(AuthenticationError, match="signature"):
        list(opener.feed(frames[0]))
    for position in (0, 3, 10, 40, -1):
        changed = bytearray(frames[0])
        changed[position] ^= 1
        with pytest.raises(AuthenticationError):
            list(Opener(key, encrypted=True).feed(bytes(changed) + b"\0" * MAX_FRAME_BYTES))
    large = os.urandom(3 * MAX_FRAME_BYTES + 5)
    many = list(Sealer(key, encrypted=True).frames({}, large))
    opener = Opener(key, encrypted=True)
    assert [message for frame in many for message in opener.feed(frame)] == [({}, large)]
