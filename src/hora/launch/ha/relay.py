"""The relay: the local socket at which a node's workers reach the current leader of their job.

It copies bytes in both directions and interprets none of them: a worker and the leader authenticate each other. While
no process leads, workers that return wait here. A connection to which the leader has not answered is a stranger's.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Callable

from hora.net import sockets
from hora.net.acceptor import Acceptor, Arrival

__all__ = ["Relay"]

_WAIT_S = 2.0
_COPY_BYTES = 256 * 1024
_CUT_LIMIT_S = 30
_CLOSE_LIMIT_S = 5.0

_Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Relay:
    """Listens at the abstract local socket `name`, in a thread of its own, until closed."""

    def __init__(self) -> None:
        self.name = f"hora-relay-{secrets.token_hex(16)}"
        self._listener = sockets.listen(self.name)
        self._target: tuple[str, int] | None = None
        self._has_target = asyncio.Event()
        self._connections: dict[socket.socket, asyncio.Task[None]] = {}
        self._connected: set[socket.socket] = set()  # to the target, or about to be
        self._loop = asyncio.new_event_loop()
        self._acceptor: Acceptor[socket.socket] = Acceptor(self._loop, turn_away=lambda sock, _: self._end(sock))
        self._thread = threading.Thread(target=self._run, name="hora-relay", daemon=True)
        self._thread.start()

    def set_target(self, target: tuple[str, int] | None) -> None:
        """Connect to this address from now on (None: wait), and end the connections to any other one."""
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._set_target, target)

    def answer(self, listener: socket.socket) -> None:
        """Accept connections there, too, and end them: they ask the kernel for this process, and for nothing else."""
        with contextlib.suppress(RuntimeError):  # closed
            self._loop.call_soon_threadsafe(self._acceptor.watch, listener, lambda arrival: arrival.sock.close())

    def close(self) -> None:
        """End all connections and the thread."""
        with contextlib.suppress(RuntimeError):  # closed before
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_CLOSE_LIMIT_S)

    # ---- in the relay's thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._acceptor.watch(self._listener, self._arrived)
        try:
            self._loop.run_forever()
        finally:
            self._acceptor.close()
            for sock in self._connections:
                self._end(sock)
            self._loop.run_until_complete(asyncio.gather(*self._connections.values(), return_exceptions=True))
            self._loop.close()

    def _set_target(self, target: tuple[str, int] | None) -> None:
        if target == self._target:
            return
        self._target = target
        for sock in self._connected:
            self._end(sock)
        if target is None:
            self._has_target.clear()
        else:
            self._has_target.set()

    def _arrived(self, arrival: Arrival) -> socket.socket:
        sock = arrival.sock
        self._connections[sock] = self._loop.create_task(self._connect(sock))
        self._connections[sock].add_done_callback(lambda _: self._ended(sock))
        return sock

    def _end(self, sock: socket.socket) -> None:
        """End this connection. Before Python 3.12 `wait_for` may swallow the cancellation, but not the end of file."""
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        self._connections[sock].cancel()

    def _ended(self, sock: socket.socket) -> None:
        del self._connections[sock]
        self._connected.discard(sock)
        self._acceptor.gone(sock)
        sock.close()

    async def _connect(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError, TimeoutError, asyncio.TimeoutError):  # the worker comes again
            await asyncio.wait_for(self._has_target.wait(), _WAIT_S)
            if self._target is None:
                return
            self._connected.add(sock)
            leader = await asyncio.wait_for(asyncio.open_connection(*self._target, limit=_COPY_BYTES), _WAIT_S)
            try:
                sockets.tune(leader[1].get_extra_info("socket"), silence_limit_s=_CUT_LIMIT_S)
                worker = await asyncio.open_connection(sock=sock, limit=_COPY_BYTES)
                try:
                    await self._copy_both(worker, leader, sock)
                finally:
                    worker[1].transport.abort()
            finally:
                leader[1].transport.abort()

    async def _copy_both(self, worker: _Stream, leader: _Stream, sock: socket.socket) -> None:
        there = asyncio.ensure_future(_copy(worker[0], leader[1], lambda: None))
        back = asyncio.ensure_future(_copy(leader[0], worker[1], lambda: self._acceptor.identified(sock)))
        try:
            await asyncio.wait({there, back}, return_when="FIRST_COMPLETED")
        finally:
            for one in (there, back):
                one.cancel()
            await asyncio.gather(there, back, return_exceptions=True)


async def _copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, copied: Callable[[], None]) -> None:
    target.transport.set_write_buffer_limits(high=0)  # `drain` then returns when everything is sent
    while data := await source.read(_COPY_BYTES):
        target.write(data)
        await target.drain()
        copied()
