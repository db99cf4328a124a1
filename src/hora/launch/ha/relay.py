"""The relay: the address at which a node's workers reach the leader, whoever that is.

It passes bytes on, in both directions, and understands none of them: a worker and the leader prove to one another who
they are. While nobody leads, workers that come back wait here.
"""

from __future__ import annotations

import contextlib
import socket
import threading

from hora.net import sockets

__all__ = ["Relay"]

_WAIT_S = 2.0
_COPY_BYTES = 256 * 1024
_CUT_LIMIT_S = 30


class Relay:
    """Listens at an address of this host until closed."""

    def __init__(self, address: str) -> None:
        self.address = address
        self._listener = sockets.listen((address, 0))
        self.port = int(self._listener.getsockname()[1])
        self._changed = threading.Condition()
        self._target: tuple[str, int] | None = None
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._closed = False
        threading.Thread(target=self._accept, name="hora-relay", daemon=True).start()

    def lead_to(self, target: tuple[str, int] | None) -> None:
        """From now on connections lead there (None: they wait); those that led elsewhere are ended."""
        with self._changed:
            if target == self._target:
                return
            self._target = target
            pairs, self._pairs = self._pairs, set()
            self._changed.notify_all()
        for pair in pairs:
            _end(pair)

    def close(self) -> None:
        self._closed = True
        self.lead_to(None)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                sock, _ = self._listener.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._connect, args=(sock,), name="hora-relay", daemon=True).start()

    def _connect(self, sock: socket.socket) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._target is not None, _WAIT_S)
            target = self._target
        try:
            if target is None:
                raise ConnectionError("nobody leads")  # who came comes again
            pair = sock, sockets.open_socket(target, limit_s=_WAIT_S)
        except OSError:
            sock.close()
            return
        for one in pair:
            sockets.tune(one, silence_limit_s=_CUT_LIMIT_S)
        with self._changed:
            if target != self._target:
                _end(pair)
            self._pairs.add(pair)
        back = threading.Thread(target=self._copy, args=(pair[1], pair[0], pair), name="hora-relay", daemon=True)
        back.start()
        self._copy(pair[0], pair[1], pair)
        back.join()
        for one in pair:
            one.close()
        with self._changed:
            self._pairs.discard(pair)

    def _copy(self, source: socket.socket, target: socket.socket, pair: tuple[socket.socket, socket.socket]) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_COPY_BYTES):
                target.sendall(data)
        _end(pair)


def _end(pair: tuple[socket.socket, socket.socket]) -> None:
    for one in pair:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
