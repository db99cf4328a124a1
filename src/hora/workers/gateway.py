"""Gateway through which other processes call a session: workers that launch workers, and the `hora workers` command.

The gateway listens on an abstract local socket, which is in no file system and disappears with the session. It answers
processes of the same user (or root) that prove possession of the session's key. Clients check both too, because any
process can bind the name first. Requests and responses are JSON; nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import threading
from typing import Any

from hora.errors import AuthenticationError
from hora.launch.job import OutputOptions
from hora.launch.processes import variables
from hora.net import sockets
from hora.net.keys import HeldSecret
from hora.net.server import Peer, Server
from hora.net.wire import Connection, Credentials, Header, connect
from hora.workers.capacity import measure
from hora.workers.session import WorkerSession

_MAX_REQUEST_BYTES = 64 * 1024**2
_MAX_CALLS = 256
_CONNECT_LIMIT_S = 10.0


def _credentials(key: str) -> Credentials:
    # A key is a text of any length: users find it in CDSW_API_KEY.
    return Credentials(hashlib.sha256(key.encode(errors="replace")).digest(), "workers")


def new_name() -> tuple[str, str]:
    """Return a random name and a random key for a gateway."""
    return f"hora-workers-{secrets.token_hex(8)}", secrets.token_hex(32)


class Gateway:
    """Serves a new session, each call in its own thread. OSError if another process has bound the name."""

    def __init__(self, name: str, key: str, *, output: OutputOptions | None = None) -> None:
        self.name, self.key = name, key
        self.idle = threading.Event()  # a caller has requested the end of the session
        self.published: HeldSecret | None = None  # see `directory.publish`
        self._lock = threading.Lock()
        self._num_calls = 0
        self._server = Server(self, name="hora-workers-gateway", max_payload_bytes=_MAX_REQUEST_BYTES)
        try:
            self._server.listen(name)
        except OSError:
            self._server.close()
            raise
        environ = variables()
        self.session = WorkerSession(measure(environ), environ, address=name, key=key, output=output)
        self._server.start(_credentials(key))

    def listen(self, name: str) -> None:
        """Also listen under this name. OSError if another process has bound it."""
        self._server.listen(name)

    def close(self) -> None:
        """End the session with its workers."""
        self._server.close()
        if self.published is not None:
            self.published.close()
        self.session.close()

    # ---- in the server's thread ---------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        call = str(header["call"])
        with self._lock:
            if self._num_calls >= _MAX_CALLS:
                peer.close()
                return
            self._num_calls += 1
        threading.Thread(target=self._answer, args=(peer, call, payload), name="hora-workers-call", daemon=True).start()

    def closed(self, peer: Peer) -> None:
        self.session.release(peer)  # a call that waits sees it by itself

    # ---- in a call's thread -------------------------------------------------------------------------------

    def _answer(self, peer: Peer, call: str, payload: bytes) -> None:
        try:
            peer.send({}, json.dumps(self._reply(peer, call, payload)).encode())
            if call == "end":
                self.idle.set()
        finally:
            with self._lock:
                self._num_calls -= 1

    def _reply(self, peer: Peer, call: str, payload: bytes) -> dict[str, Any]:
        try:
            return {"result": self._call(peer, call, json.loads(payload))}
        except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
            return {"error": str(error), "user": isinstance(error, ValueError)}

    def _call(self, peer: Peer, call: str, request: dict[str, Any]) -> Any:
        session, waiting = self.session, {"abandoned": lambda: not peer.open}
        match call:
            case "launch" | "workers" | "stop" | "tail":
                return getattr(session, call)(**request)
            case "wait":
                return getattr(session, call)(**request, **waiting)
            case "hold":
                return getattr(session, call)(**request, holder=peer, **waiting)
            case "end":
                return None
            case other:
                raise ValueError(f"unknown call {other!r}")


def ask(name: str, key: str, *, call: str, limit_s: float | None = 60.0, **request: Any) -> Any:
    """Call the session behind a gateway. ConnectionError if there is none; ValueError if it rejects the call."""
    with open_connection(name, key) as connection:
        return exchange(connection, call, limit_s=limit_s, **request)


def exchange(connection: Connection, call: str, *, limit_s: float | None = 60.0, **request: Any) -> Any:
    """Make one of several calls over a connection. ConnectionError if the session has ended."""
    try:
        connection.send({"call": call}, json.dumps(request).encode())
        connection.sock.settimeout(limit_s)  # None too: an earlier call has had another
        _, answer = connection.receive()
    except EOFError:
        raise ConnectionError("the session of workers refused the connection") from None
    reply = json.loads(answer)
    if "error" in reply:
        if reply.get("user"):
            raise ValueError(reply["error"])
        raise RuntimeError(f"the session of workers answered: {reply['error']}")
    return reply["result"]


def open_connection(name: str, key: str) -> Connection:
    """Open a connection to the session behind a gateway, for several calls."""
    try:
        return connect(name, _credentials(key), timeout_s=_CONNECT_LIMIT_S)
    except (AuthenticationError, EOFError):
        raise ConnectionError("the session of workers refused the connection") from None
    except TimeoutError:
        raise TimeoutError(f"the session of workers took no connection within {_CONNECT_LIMIT_S:g} s") from None


def server_pid(name: str) -> int:
    """Return the pid that serves this name. OSError if there is none, or if it belongs to another user."""
    with sockets.open_socket(name, limit_s=_CONNECT_LIMIT_S) as sock:
        return sockets.process_at(sock).pid
