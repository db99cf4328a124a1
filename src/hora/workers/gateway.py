"""How other processes reach a session: workers that launch workers, and the `hora workers` command.

The gateway listens on an abstract local socket, which exists in no file system and vanishes with the session. Only
processes of the same user are answered, and only if they know the key; a client makes sure of the user as well, because
anybody can take a socket's name first. One JSON line in, one out; nothing is unpickled.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import socket
import struct
import threading
from typing import Any

from hora.workers.session import Session

__all__ = ["Gateway", "ask", "connect", "server_pid"]

_MAX_REQUEST_BYTES = 64 * 1024**2
_MAX_STRANGERS = 32  # connections that have not said the key yet
_MAX_CALLS = 256
_REQUEST_LIMIT_S = 10.0
_CONNECT_LIMIT_S = 10
_CREDENTIALS = struct.Struct("3i")
_TIME = struct.Struct("ll")


class Gateway:
    """Answers for a session, one thread per connection. Many silent connections cost one another, not the session."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self._key = key.encode()
        self._session: Session | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.bind("\0" + name)
        except OSError:
            self._socket.close()
            raise
        self._socket.listen(128)
        self._thread = threading.Thread(target=self._serve, name="hora-workers-gateway", daemon=True)
        self._lock = threading.Lock()
        self._strangers: dict[int, socket.socket] = {}  # by descriptor, in the order of their arrival
        self._num_calls = 0
        self.idle = threading.Event()

    def open(self, session: Session) -> None:
        self._session = session
        self._thread.start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # closed
                return
            if _peer(connection)[1] != os.getuid() or not self._let_in(connection):
                connection.close()

    def _let_in(self, connection: socket.socket) -> bool:
        with self._lock:
            if self._num_calls >= _MAX_CALLS:
                return False
            if len(self._strangers) >= _MAX_STRANGERS:
                # The one that has been silent for longest. Whoever means it sends a request at once.
                oldest = self._strangers.pop(next(iter(self._strangers)))
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)
            self._strangers[connection.fileno()] = connection
            self._num_calls += 1
        threading.Thread(target=self._answer, args=(connection,), name="hora-workers-call", daemon=True).start()
        return True

    def _answer(self, connection: socket.socket) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                try:
                    request = self._request(connection)
                finally:
                    self._is_known(connection)
                if request is not None:
                    connection.settimeout(None)
                    connection.sendall(json.dumps(self._reply(request, connection)).encode() + b"\n")
        finally:
            with self._lock:
                self._num_calls -= 1

    def _is_known(self, connection: socket.socket) -> None:
        with self._lock:
            if self._strangers.get(connection.fileno()) is connection:
                del self._strangers[connection.fileno()]

    def _request(self, connection: socket.socket) -> dict[str, Any] | None:
        """What the client wants, if it is one of ours."""
        connection.settimeout(_REQUEST_LIMIT_S)
        try:
            request = json.loads(_line(connection))
        except (ValueError, RecursionError):
            return None
        if not isinstance(request, dict) or not isinstance(key := request.get("key"), str):
            return None
        return request if hmac.compare_digest(key.encode(errors="replace"), self._key) else None

    def _reply(self, request: dict[str, Any], connection: socket.socket) -> dict[str, Any]:
        try:
            return {"result": self._call(request, connection)}
        except (ValueError, KeyError, TypeError, OSError) as error:
            return {"error": str(error), "user": isinstance(error, ValueError)}

    def _call(self, request: dict[str, Any], connection: socket.socket) -> Any:
        assert self._session is not None
        session = self._session
        match request["call"]:
            case "launch":
                return session.launch(int(request["n"]), request["request"])
            case "list":
                return session.workers()
            case "wait":
                return session.wait(
                    request["ids"],
                    for_completion=bool(request["for_completion"]),
                    timeout_s=float(request["timeout_s"]),
                    abandoned=lambda: _hung_up(connection),
                )
            case "stop":
                return session.stop(request["ids"])
            case "tail":
                return session.tail(str(request["id"]))
            case "end":
                self.idle.set()
                return None
            case other:
                raise ValueError(f"unknown call {other!r}")


def connect(name: str) -> socket.socket:
    """A connection to the gateway of this name. ConnectionError when there is none, or when it is not this user's."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # Not `settimeout`: a local socket that does not block fails at once where others wait in the queue.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(_CONNECT_LIMIT_S, 0))
        try:
            sock.connect("\0" + name)
        except BlockingIOError:
            raise TimeoutError(f"the session of workers took no connection within {_CONNECT_LIMIT_S} s") from None
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(0, 0))
        if (owner := _peer(sock)[1]) != os.getuid():
            raise ConnectionError(f"the socket {name} belongs to user {owner}, who must not see our requests")
    except BaseException:
        sock.close()
        raise
    return sock


def ask(name: str, key: str, *, limit_s: float | None = 60.0, **request: Any) -> Any:
    """Call the session behind a gateway. ConnectionError when there is none; ValueError with what it refused."""
    with connect(name) as sock:
        sock.settimeout(limit_s)
        sock.sendall(json.dumps({"key": key, **request}).encode() + b"\n")
        answer = _line(sock)
    if not answer:
        raise ConnectionError("the session of workers refused the connection")
    reply = json.loads(answer)
    if "error" in reply:
        if reply.get("user"):
            raise ValueError(reply["error"])
        raise RuntimeError(f"the session of workers answered: {reply['error']}")
    return reply["result"]


def server_pid(name: str) -> int:
    """The process that serves this name."""
    with connect(name) as sock:
        return _peer(sock)[0]


def _peer(sock: socket.socket) -> tuple[int, int, int]:
    """Process, user and group at the other end."""
    found: tuple[int, int, int] = _CREDENTIALS.unpack(
        sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    return found


def _hung_up(connection: socket.socket) -> bool:
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _line(sock: socket.socket) -> bytes:
    received = bytearray()
    while not received.endswith(b"\n"):
        data = sock.recv(65536)
        if not data:
            return b""
        received += data
        if len(received) > _MAX_REQUEST_BYTES:
            raise ValueError("a request is too long")
    return bytes(received)
