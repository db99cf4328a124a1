"""The wire protocol without sockets: handshakes, frames, limits."""

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
    Opener,
    Sealer,
    ServerHandshake,
    Session,
    new_secret,
)


def shake_hands(one: Credentials, other: Credentials) -> tuple[Session, Session]:
    client, server = ClientHandshake(one), ServerHandshake(other)
    session, confirmation = client.finish(server.feed(client.hello))
    assert server.session is None
    server.feed(confirmation)
    assert server.session is not None
    return session, server.session


def sent(sealer: Sealer, text: bytes = b"text") -> bytes:
    return b"".join(sealer.frames({}, text))


def test_both_ends_can_send_and_the_directions_have_different_keys():
    client, server = shake_hands(*[Credentials(new_secret(), "job")] * 2)
    assert list(server.opener.feed(sent(client.sealer))) == [({}, b"text")]
    assert list(client.opener.feed(sent(server.sealer))) == [({}, b"text")]
    with pytest.raises(AuthenticationError):  # a reflection
        list(client.opener.feed(sent(client.sealer)))


def test_every_connection_has_its_own_keys():
    credentials = Credentials(new_secret(), "job")
    one, other = (shake_hands(credentials, credentials) for _ in range(2))
    with pytest.raises(AuthenticationError):
        list(other[1].opener.feed(sent(one[0].sealer)))


@pytest.mark.parametrize("differs", ["secret", "purpose", "speaker"])
def test_a_client_with_other_credentials_is_rejected_at_its_first_message(differs: str):
    secret = new_secret()
    ours = Credentials(secret, "job", 1)
    theirs = {
        "secret": Credentials(new_secret(), "job", 1),
        "purpose": Credentials(secret, "another job", 1),
        "speaker": Credentials(secret, "job", 2),
    }[differs]
    server = ServerHandshake(ours)
    with pytest.raises(AuthenticationError, match=r"hold the job's secret|number 2, which has no key here"):
        server.feed(ClientHandshake(theirs).hello)
    assert server.refuses
    assert server.session is None


def test_a_server_without_the_secret_is_detected():
    client = ClientHandshake(Credentials(new_secret(), "job"))
    impostor = ServerHandshake(Credentials(new_secret(), "job"))
    answer = impostor.feed(ClientHandshake(impostor._credentials).hello)
    for said in (answer, os.urandom(len(answer)), client.hello[-len(answer) :], b"refused\n", b""):
        with pytest.raises(AuthenticationError, match="server does not hold"):
            client.finish(said)


def test_a_client_is_identified_by_the_number_of_its_key():
    keys = {1: new_secret(), 2: new_secret()}

    def of(number: int) -> Credentials:
        return Credentials(keys[number], "job", number) if number in keys else Credentials(keys[1], "job", 1)

    for number in keys:
        client, server = ClientHandshake(of(number)), ServerHandshake(of)
        server.feed(client.finish(server.feed(client.hello))[1])
        assert server.session is not None
        assert server.speaker == number
    for secret, number in ((keys[1], 2), (keys[2], 1)):
        with pytest.raises(AuthenticationError, match="does not hold the job's secret"):
            ServerHandshake(of).feed(ClientHandshake(Credentials(secret, "job", number)).hello)
    for number in (-1, 3):
        with pytest.raises(AuthenticationError, match=f"number {number}, which has no key here"):
            ServerHandshake(of).feed(ClientHandshake(Credentials(keys[1], "job", number)).hello)


def test_a_number_changed_in_transit_is_detected():
    """This holds even where all clients have the same key."""
    secret = new_secret()
    hello = bytearray(ClientHandshake(Credentials(secret, "job", 1)).hello)
    hello[11] ^= 3
    with pytest.raises(AuthenticationError, match="does not hold the job's secret"):
        ServerHandshake(lambda number: Credentials(secret, "job", number)).feed(bytes(hello))


def test_a_recorded_handshake_cannot_be_replayed():
    """A replayed hello gets an answer, but no session."""
    credentials = Credentials(new_secret(), "job")
    client, server = ClientHandshake(credentials), ServerHandshake(credentials)
    _, confirmation = client.finish(server.feed(client.hello))
    again = ServerHandshake(credentials)
    again.feed(client.hello)
    with pytest.raises(AuthenticationError):
        again.feed(confirmation)
    assert again.session is None


@pytest.mark.parametrize("position", [0, 1, 2, 17])
def test_a_modified_confirmation_is_rejected(position: int):
    credentials = Credentials(new_secret(), "job")
    client, server = ClientHandshake(credentials), ServerHandshake(credentials)
    changed = bytearray(client.finish(server.feed(client.hello))[1])
    changed[position] ^= 1
    with pytest.raises(AuthenticationError):
        server.feed(bytes(changed))
    assert server.session is None


@pytest.mark.parametrize("garbage", [b"GET / HTTP/1.1\r\n", b"\x80\x04K*.", b"\xff" * 64, b"HORA/2\r\n"])
def test_garbage_is_rejected_at_its_first_wrong_byte(garbage: bytes):
    server = ServerHandshake(Credentials(new_secret(), "job"))
    with pytest.raises(AuthenticationError, match="does not speak"):
        server.feed(garbage[: server.wanted_bytes])
    assert not server.refuses


def test_the_handshake_reads_only_a_few_bytes():
    credentials = Credentials(new_secret(), "job")
    server = ServerHandshake(credentials)
    assert server.wanted_bytes == 60
    server.feed(ClientHandshake(credentials).hello)
    assert server.wanted_bytes == 18


@pytest.mark.parametrize("secret", [b"short", b"l" * 33])
def test_a_secret_of_another_length_is_rejected(secret: bytes):
    with pytest.raises(ValueError, match="32 bytes"):
        Credentials(secret, "job")


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.dictionaries(st.text(), st.integers() | st.text()), st.binary(max_size=2000)), max_size=5),
    st.integers(1, 700),
)
def test_messages_survive_fragmentation(messages, step: int):
    messages = [({k: v for k, v in header.items() if k != "_n"}, payload) for header, payload in messages]
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32)
    stream = b"".join(frame for header, payload in messages for frame in sealer.frames(header, payload))
    got = [m for i in range(0, len(stream), step) for m in opener.feed(stream[i : i + step])]
    assert got == messages


@pytest.mark.parametrize("size", [0, 1, MAX_FRAME_BYTES - 20, MAX_FRAME_BYTES, 3 * MAX_FRAME_BYTES + 5])
def test_large_payloads_are_sent_in_bounded_frames(size: int):
    payload = os.urandom(size)
    frames = list(Sealer(b"k" * 32).frames({"op": "x"}, payload))
    assert all(len(frame) <= MAX_FRAME_BYTES + 18 for frame in frames)
    opener = Opener(b"k" * 32)
    assert [m for frame in frames for m in opener.feed(frame)] == [({"op": "x"}, payload)]


def frames_of(*payloads: bytes) -> list[bytes]:
    sealer = Sealer(b"k" * 32)
    return [frame for payload in payloads for frame in sealer.frames({}, payload)]


@pytest.mark.parametrize("position", [0, 1, 2, 10, 25, -1])
def test_a_flipped_bit_is_detected(position: int):
    frame = bytearray(frames_of(b"payload")[0])
    frame[position] ^= 1
    opener = Opener(b"k" * 32)
    with pytest.raises(AuthenticationError):
        # A longer announced length makes the receiver wait for more bytes, so supply some.
        list(opener.feed(bytes(frame) + b"\0" * MAX_FRAME_BYTES))


def test_a_replayed_frame_is_detected():
    first, _ = frames_of(b"one", b"two")
    opener = Opener(b"k" * 32)
    list(opener.feed(first))
    with pytest.raises(AuthenticationError, match="modified in transit"):
        list(opener.feed(first))


def test_reordered_and_dropped_frames_are_detected():
    _, second = frames_of(b"one", b"two")
    with pytest.raises(AuthenticationError, match="modified in transit"):
        list(Opener(b"k" * 32).feed(second))


@pytest.mark.parametrize("length", [0, 15])
def test_a_frame_too_short_for_a_tag_is_rejected_before_anything_is_kept(length: int):
    with pytest.raises(AuthenticationError, match="which is too short"):
        list(Opener(b"k" * 32).feed(length.to_bytes(2, "big")))


def test_an_oversized_header_is_the_senders_error():
    with pytest.raises(ValueError, match="header"):
        list(Sealer(b"k" * 32).frames({"x": "y" * 70000}))


def test_frames_hide_their_contents():
    text = b"what nobody reads"
    sealer, opener = Sealer(b"k" * 32), Opener(b"k" * 32)
    frames = [frame for _ in range(2) for frame in sealer.frames({"op": text.decode()}, text * 20)]
    assert frames[0] != frames[1]
    assert text not in b"".join(frames)
    assert list(opener.feed(frames[0])) == [({"op": text.decode()}, text * 20)]
