"""Peer groups between the ranks of a pool, below the engine: over plain and over encrypted streams."""

from __future__ import annotations

import itertools
import socket

from hora.engine.transport.base import Membership
from hora.engine.transport.group import PeerGroup, connect
from hora.engine.transport.stream import StreamGroup, Streams
from hora.net.noise import Records
from hora.net.wire import Stream

KINDS = ["tcp", "encrypted"]
SECRET = b"s" * 32


def make_group(kind, store, member, num_members, check_alive=lambda: None) -> PeerGroup:
    what = f"{num_members} members to connect over {kind}"
    streams = connect(lambda: _streams(store, member, num_members, kind), what, check_alive)
    return StreamGroup(streams, Membership(member, num_members, check_alive))


def _records(kind: str) -> Records | None:
    return {"tcp": None, "encrypted": Records(SECRET)}[kind]


def _streams(store, member, num_members, kind) -> Streams:
    """Connect streams as the control tree does, but without a handshake."""
    outgoing, incoming = {}, {}
    with socket.create_server(("127.0.0.1", 0)) as listener:
        store.set(f"port/{member}", str(listener.getsockname()[1]))
        for sender, receiver in itertools.permutations(range(num_members), 2):
            if sender == member:
                sock = socket.create_connection(("127.0.0.1", int(store.get(f"port/{receiver}"))))
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                sock.sendall(bytes([member]))
                outgoing[receiver] = Stream(sock, _records(kind))
            elif receiver == member:
                sock, _ = listener.accept()
                sender = sock.recv(1)[0]
                incoming[sender] = Stream(sock, _records(kind))
    return Streams(outgoing, incoming)
