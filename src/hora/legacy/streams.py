"""`horovod.runner.util.streams.Pipe`: what one thread writes, another reads, a piece at a time."""

from __future__ import annotations

import queue

__all__ = ["Pipe"]


class Pipe:
    """Text or bytes in the order written. `read` waits for some; after `close` it gives None once all is read."""

    def __init__(self) -> None:
        self._pieces: queue.SimpleQueue[str | bytes | None] = queue.SimpleQueue()
        self._rest: str | bytes | None = None
        self._closed = False

    def write(self, buf: str | bytes) -> int:
        if self._closed:
            raise RuntimeError("Pipe is closed")
        self._pieces.put(buf)
        return len(buf)

    def read(self, length: int = -1, timeout: float | None = None) -> str | bytes | None:
        """At most `length` characters (-1: what comes). TimeoutError after `timeout` seconds without any."""
        if not self._rest:
            try:
                self._rest = self._pieces.get(timeout=timeout)
            except queue.Empty:
                raise TimeoutError(f"nothing was written to the pipe within {timeout:g} s") from None
        if self._rest is None:
            self._pieces.put(None)  # for the next reader
            return None
        cut = len(self._rest) if length < 0 else length
        piece, self._rest = self._rest[:cut], self._rest[cut:]
        return piece

    def flush(self) -> None:
        return None

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pieces.put(None)
