"""The end of a stream, for error reports."""

from __future__ import annotations


class Tail:
    """The last `max_bytes` of a stream, kept for error reports. Memory is bounded whatever is printed."""

    def __init__(self, max_bytes: int = 16 * 1024) -> None:
        self._max_bytes = max_bytes
        self._kept = bytearray()
        self._complete = True  # nothing has been forgotten

    def add(self, data: bytes) -> None:
        self._kept += data[-self._max_bytes :]
        self._complete = self._complete and len(data) <= self._max_bytes >= len(self._kept)
        if len(self._kept) > 2 * self._max_bytes:  # not for every byte, because it moves the kept bytes
            del self._kept[: -self._max_bytes]

    def __bytes__(self) -> bytes:
        return bytes(self._kept[-self._max_bytes :])

    @property
    def text(self) -> str:
        """Return the kept text, from the start of a line if one starts there."""
        kept = bytes(self)
        if not self._complete:
            kept = kept.partition(b"\n")[2] or kept
        return kept.decode(errors="replace")
