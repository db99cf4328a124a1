"""Gateway through which other processes call a session: workers that launch workers, and the `hora workers` command.

The gateway listens on an abstract local socket, which is in no file system and disappears with the session. It answers
processes of the same user (or root) that prove possession of the session's key. Clients check both too, because any
process can bind the name first. Requests and responses are JSON; nothing is unpickled.

A published session also listens at a socket named after the user and the folder. Its own name and its random key are in
its memory. Processes of the same user that see the session's process find them there (`find`); other users, and
containers that share only the network, cannot. If another user holds the folder's name, clients search all of this
user's processes. Nothing is written to disk.
"""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import threading
from typing import Any

from hora.errors import AuthenticationError
from hora.launch.environment import variables
from hora.launch.job import OutputOptions
from hora.net import sockets
from hora.net.keys import HeldSecret, find_held
from hora.net.server import Peer, Server
from hora.net.wire import Connection, Credentials, Header, connect
from hora.workers.session import WorkerSession

_MAX_REQUEST_BYTES = 64 * 1024**2
_MAX_CALLS = 256
_CONNECT_LIMIT_S = 10.0
log = logging.getLogger("hora")


def _credentials(key: str) -> Credentials:
    # A key is a text of any length: users find it in CDSW_API_KEY.
    return Credentials(hashlib.sha256(key.encode(errors="replace")).digest(), "workers")


def new_name() -> tuple[str, str]:
    return f"hora-workers-{secrets.token_hex(8)}", secrets.token_hex(32)


def name_of(folder: str, whose: str = "") -> str:
    """Return the socket name of this user's session for the folder. The session answers this user only.

    `whose`: empty for the daemon's session, `script` for the session of the first script that launched workers there.
    """
    text = f"{os.getuid()}:{os.path.realpath(folder)}{whose and ':' + whose}"
    return f"hora-workers-{hashlib.sha256(text.encode()).hexdigest()[:32]}"


class Gateway:
    """Serves a new session, each call in its own thread. OSError if another process has bound the name."""

    def __init__(self, name: str, key: str, *, output: OutputOptions | None = None) -> None:
        self.name, self.key = name, key
        self.idle = threading.Event()  # a caller has requested the end of the session
        self.published: HeldSecret | None = None
        self._calls = threading.Semaphore(_MAX_CALLS)
        self._server = Server(self, name="hora-workers-gateway", max_payload_bytes=_MAX_REQUEST_BYTES)
        self._server.listen(name)
        self.session = WorkerSession(variables(), address=name, key=key, output=output)
        self._server.start(_credentials(key))

    def publish(self, folder: str, whose: str = "") -> None:
        """Let `find` discover this session. OSError (EADDRINUSE) if this user has one for this folder already."""
        label = name_of(folder, whose)
        found = json.dumps([self.name, self.key]).encode()
        held = HeldSecret(found, label=label)  # first: a client that finds the socket also finds the key
        try:
            self._server.listen(label)
        except OSError as error:
            if error.errno != errno.EADDRINUSE or runs(label):
                held.close()
                raise
            log.warning("another user's process has the name of this folder's session of workers (%s)", label)
        self.published = held

    def close(self) -> None:
        """End the session with its workers."""
        self._server.close()
        if self.published is not None:
            self.published.close()
        self.session.close()

    # ---- in the server's thread ---------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        call = str(header["call"])
        if not self._calls.acquire(blocking=False):
            peer.close()
            return
        threading.Thread(target=self._answer, args=(peer, call, payload), name="hora-workers-call", daemon=True).start()

    def closed(self, peer: Peer) -> None:
        self.session.release(peer)  # a call that waits sees it by itself

    # ---- in a call's thread -------------------------------------------------------------------------------

    def _answer(self, peer: Peer, call: str, payload: bytes) -> None:
        try:
            try:
                reply = {"result": self._call(peer, call, json.loads(payload))}
            except (ValueError, KeyError, TypeError, OSError, RecursionError) as error:
                reply = {"error": str(error), "user": isinstance(error, ValueError)}
            peer.send({}, json.dumps(reply).encode())
            if call == "end":
                self.idle.set()
        finally:
            self._calls.release()

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


def call_session(name: str, key: str, *, call: str, limit_s: float | None = 60.0, **request: Any) -> Any:
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


def find(folder: str, whose: str = "") -> tuple[str, str] | None:
    """Return the name and key of the folder's session, if it runs and this process may read them."""
    label, pids = name_of(folder, whose), None
    try:
        pids = [server_pid(label)]
    except ConnectionRefusedError:
        return None
    except OSError:  # another user's process has the name: search all of this user's
        pass
    for _, found in find_held(label, pids):
        name, key = json.loads(found)
        if runs(name):
            return name, key
    return None


def named() -> tuple[str, str] | None:
    """Return the name and key of the session that the environment names, if Hora serves it."""
    environ = variables()
    url, key = environ.get("CDSW_API_URL", ""), environ.get("CDSW_API_KEY", "")
    return (url.removeprefix("unix:"), key) if url.startswith("unix:hora-") else None


def runs(name: str) -> bool:
    """Return whether a process of this user serves a session by this name."""
    try:
        server_pid(name)
    except OSError:
        return False
    return True
