"""How other processes reach a session: workers that launch workers, and the `hora workers` command.

The gateway listens on an abstract local socket, which exists in no file system and vanishes with the session. Only
processes of the same user are answered, and only if they know the key. One JSON line in, one out; nothing is unpickled.
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

from hora.launch.workers.session import Session

__all__ = ["Gateway", "ask"]

_MAX_REQUEST_BYTES = 64 * 1024**2
_CREDENTIALS = struct.Struct("3i")


class Gateway:
    """Answers for a session, one thread per connection."""

    def __init__(self, name: str, key: str) -> None:
        self.name = name
        self._key = key
        self._session: Session | None = None
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind("\0" + name)
        self._socket.listen(64)
        self._thread = threading.Thread(target=self._serve, name="hora-workers-gateway", daemon=True)
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
            threading.Thread(target=self._answer, args=(connection,), name="hora-workers-call", daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError, ValueError, KeyError):
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            if _CREDENTIALS.unpack(credentials)[1] != os.getuid():
                return
            request = json.loads(_line(connection))
            if not hmac.compare_digest(str(request["key"]), self._key):
                return
            connection.sendall(json.dumps(self._call(request)).encode() + b"\n")

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        session = self._session
        match request["call"]:
            case "launch":
                return {"result": session.launch(int(request["n"]), request["request"])}
            case "list":
                return {"result": session.workers()}
            case "wait":
                found = session.wait(
                    request["ids"],
                    for_completion=bool(request["for_completion"]),
                    timeout_s=float(request["timeout_s"]),
                )
                return {"result": found}
            case "stop":
                return {"result": session.stop(request["ids"])}
            case "tail":
                return {"result": session.tail(str(request["id"]))}
            case "end":
                self.idle.set()
                return {"result": None}
            case other:
                return {"error": f"unknown call {other!r}"}


def ask(name: str, key: str, *, limit_s: float | None = 60.0, **request: Any) -> Any:
    """Call the session behind a gateway. ConnectionError when there is none; RuntimeError with what it refused."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(limit_s)
        sock.connect("\0" + name)
        sock.sendall(json.dumps({"key": key, **request}).encode() + b"\n")
        answer = _line(sock)
    if not answer:
        raise ConnectionError("the session of workers refused the connection")
    reply = json.loads(answer)
    if "error" in reply:
        raise RuntimeError(f"the session of workers answered: {reply['error']}")
    return reply["result"]


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
