"""The wire protocol, without sockets: proofs, signatures, limits."""

from __future__ import annotations

import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.errors import AuthenticationError
from hora.net.wire import (
    MAX_FRAME_BYTES,
    ClientHandshake,
    Credentials,
    Keys,
    Opener,
    Sealer,
    ServerHandshake,
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


def test_a_client_cannot_reflect_the_servers_proof():
    server = ServerHandshake(Credentials(new_secret(), "job"))
    challenge = server.feed(ClientHandshake(Credentials(new_secret(), "job")).hello)
    with pytest.raises(AuthenticationError):
        server.feed(challenge[32:])


def test_a_recorded_handshake_cannot_be_replayed():
    secret = new_secret()
    client, server = ClientHandshake(Credentials(secret, "job")), ServerHandshake(Credentials(secret, "job"))
    _, proof = client.answer(server.feed(client.hello))
    again = ServerHandshake(Credentials(secret, "job"))
    again.feed(client.hello)
    with pytest.raises(AuthenticationError):
        again.feed(proof)


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\x80\x04K*.", b"\xff" * 64, b"HORA/2\r\n"])
def test_garbage_is_refused_at_its_first_wrong_byte(garbage: bytes):
    server = ServerHandshake(Credentials(new_secret(), "job"))
    with pytest.raises(AuthenticationError, match="does not speak"):
        server.feed(garbage[: server.wanted_bytes])


def test_a_stranger_is_never_asked_for_more_than_a_few_bytes():
    server = ServerHandshake(Credentials(new_secret(), "job"))
    assert server.wanted_bytes == 40
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
