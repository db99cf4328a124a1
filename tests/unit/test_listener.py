"""What a listener tells its handler, and when."""

from __future__ import annotations

import queue
import socket
import struct
import threading

from hora.net.server import Listener, Peer
from hora.net.wire import Connection, new_secret

LIMIT_S = 20.0


def test_the_handler_is_not_told_of_a_dead_peer_in_the_middle_of_its_work():
    """It may be walking through what the dead peer's end would change."""
    came, dead, told = threading.Event(), threading.Event(), queue.SimpleQueue()

    class Handler:
        at_work = False
        first: Peer | None = None

        def message(self, peer: Peer, header: dict, payload: bytes) -> None:
            if self.first is None:
                self.first = peer
                came.set()
                return
            self.at_work = True
            assert dead.wait(LIMIT_S)
            for _ in range(3):
                self.first.send({"notice": "too late"})
            self.at_work = False

        def closed(self, peer: Peer) -> None:
            told.put((peer is self.first, self.at_work))

    secret = new_secret()
    server = Listener("127.0.0.1", secret=secret, job="job", handler=Handler())
    server.start()
    first, second = (
        Connection.connect("127.0.0.1", server.port, secret=secret, job="job", timeout_s=LIMIT_S) for _ in range(2)
    )
    try:
        first.send({"op": "here"})
        assert came.wait(LIMIT_S)
        second.send({"op": "here"})
        first._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # its end is a reset
        first.close()
        dead.set()
        assert told.get(timeout=LIMIT_S) == (True, False)
    finally:
        second.close()
        server.close()
