"""Live log lines of a running job for a Connect client, sent by the job's first task if it can reach the client.

The client listens only at the address from which it connects to the Connect server. It accepts only text, from senders
with the key that travelled with the query, and shows it without interpreting it. A task that cannot reach the client
keeps the lines for the end.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO, Any

from hora.launch.job import OutputOptions
from hora.net.server import Peer, Server
from hora.net.sockets import resolve, source_address
from hora.net.wire import Connection, Credentials, Header, connect, new_secret

_CONNECT_LIMIT_S = 2.0
_KEPT_BYTES = 8 * 2**20  # of each stream, for the end


@dataclass(frozen=True)
class Invitation:
    """Address at which the client listens; empty if it does not."""

    address: str
    port: int
    job: str
    key: bytes = field(repr=False)


class LiveLog:
    """The client's side. `calls`: how often a first task has connected; a second call means that Spark repeated the
    stage.

    In the server's thread, `write` gets the bytes of the streams `stdout` and `stderr`, and `on_call` the address from
    which a task connects.
    """

    def __init__(
        self, server_host: str, write: Callable[[str, bytes], None], on_call: Callable[[str], None] = lambda host: None
    ) -> None:
        self.calls, self._write, self._on_call = 0, write, on_call
        self._server = Server(self, name="hora-connect-log")
        address, port = "", 0
        with contextlib.suppress(OSError):
            own = source_address((resolve(server_host) or [server_host])[0])
            address, port = own, self._server.listen((own, 0))
        self.invitation = Invitation(address, port, f"log-{secrets.token_hex(8)}", new_secret())

    def __enter__(self) -> LiveLog:
        self._server.start(Credentials(self.invitation.key, self.invitation.job))
        return self

    def __exit__(self, *_: object) -> None:
        self._server.close()

    def show(self, rows: Mapping[str, bytes]) -> None:
        """Lines that came with the rows."""
        for name in ("stdout", "stderr"):
            if rows.get(name):
                self._write(name, rows[name])

    # ---- in the server's thread -------------------------------------------------------------------------

    def message(self, peer: Peer, header: Header, payload: bytes) -> None:
        if header["kind"] == "here":
            self.calls += 1
            self._on_call(peer.host)
        elif header["kind"] == "output":
            self._write("stderr" if header["stream"] == "stderr" else "stdout", payload)

    def closed(self, peer: Peer) -> None:
        return None


def to_streams(output: OutputOptions) -> Callable[[str, bytes], None]:
    """Return a function that writes bytes of `stdout` and `stderr` to these streams."""
    streams: dict[str, IO[Any]] = {
        "stdout": output.stdout if output.stdout is not None else sys.stdout,
        "stderr": output.stderr if output.stderr is not None else sys.stderr,
    }

    def write(name: str, data: bytes) -> None:
        stream = streams[name]
        with contextlib.suppress(OSError, ValueError):  # a closed stream does not end the training
            binary = isinstance(stream, io.RawIOBase | io.BufferedIOBase)
            stream.write(data if binary else data.decode(errors="replace"))
            stream.flush()

    return write


class ClientLogSink:
    """The first task's side: sends lines to the client, or keeps them."""

    def __init__(self, invitation: Invitation) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
        self._connection: Connection | None = None
        if invitation.address:
            with contextlib.suppress(OSError):
                where = (invitation.address, invitation.port)
                self._connection = connect(
                    where, Credentials(invitation.key, invitation.job), timeout_s=_CONNECT_LIMIT_S
                )
                self._connection.send({"kind": "here"})

    def write(self, stream: str, data: bytes) -> None:
        with self._lock:
            if self._connection is not None:
                try:
                    self._connection.send({"kind": "output", "stream": stream}, data)
                    return
                except OSError:
                    self._connection = None
            self._kept[stream] += data
            del self._kept[stream][:-_KEPT_BYTES]

    def close(self) -> dict[str, bytes]:
        """Close the log and return the lines that the client has not received."""
        with self._lock:
            if self._connection is not None:
                self._connection.close()
            return {stream: bytes(data) for stream, data in self._kept.items() if data}


class LogStream(io.RawIOBase):
    """One of its streams, as a file."""

    def __init__(self, sink: ClientLogSink, name: str) -> None:
        super().__init__()
        self._sink, self._name = sink, name

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._sink.write(self._name, bytes(data))
        return len(data)
