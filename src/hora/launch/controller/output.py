"""The workers' output: whole lines with a prefix that tells the rank, on the console and in files.

Bytes go in as they arrive; lines come out as soon as they are complete (`\\n`, `\\r` or both end one), byte for byte
what the worker wrote. Of a line that was written over and over (`\\r`, a progress bar) a file gets only the last state.
Memory is bounded whatever a worker prints. Keeps the end of each worker's output for error reports. Called by the
controller, from any thread.
"""

from __future__ import annotations

import codecs
import io
import logging
import os
import re
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from hora.launch.job import OutputOptions

MAX_LINE_BYTES = 256 * 1024  # a longer line is written in pieces
_LINE_WITH_END = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")

_log = logging.getLogger("hora.launch")


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


class OutputWriter:
    """Writes the workers' output. `ranks`: each worker's number in the prefixes and directory names.

    Workers that are no ranks get names instead (`set_name`), for the prefixes.
    """

    def __init__(self, options: OutputOptions, ranks: Mapping[int, int]) -> None:
        self._options = options
        self._ranks = dict(ranks)
        self._names: dict[int, str] = {}
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, str], _Lines] = {}
        self._tails: dict[int, Tail] = {}
        self._consoles = {
            "stdout": _Console(options.stdout if options.stdout is not None else sys.stdout),
            "stderr": _Console(options.stderr if options.stderr is not None else sys.stderr),
        }
        self._files: dict[tuple[int, str], LogFile] = {}  # by rank
        self._settled: dict[tuple[int, str], _Settled] = {}
        self._width = len(str(max(self._ranks.values(), default=0)))
        self._open_files()

    def _open_files(self) -> None:
        if self._options.directory is None:
            return
        for rank in sorted(self._ranks.values()):
            place = Path(self._options.directory) / f"rank.{rank:0{self._width}d}"
            for stream in ("stdout", "stderr"):
                if (rank, stream) not in self._files:
                    try:
                        self._files[rank, stream] = LogFile(place / stream)
                    except OSError as error:
                        message = f"cannot write {place / stream} (--output-filename): {error.strerror}"
                        raise OSError(message) from None

    def set_ranks(self, ranks: Mapping[int, int]) -> None:
        """Change the numbers of these workers."""
        with self._lock:
            self._ranks |= ranks
            self._open_files()

    def set_name(self, worker: int, name: str) -> None:
        """Put this name before a worker's lines instead of its number."""
        with self._lock:
            self._names[worker] = name

    def feed(self, worker: int, stream: str, data: bytes) -> None:
        """Add bytes of a worker's stdout or stderr."""
        with self._lock:
            self._tails.setdefault(worker, Tail()).add(data)
            key = worker, stream
            if key not in self._streams:
                self._streams[key] = _Lines(lambda: self._prefix(worker, stream))
            self._write(key, self._streams[key].feed(data))

    def end(self, worker: int) -> None:
        """The worker has ended: write its last line even if it is incomplete."""
        with self._lock:
            for stream in ("stdout", "stderr"):
                if (worker, stream) in self._streams:
                    self._write((worker, stream), self._streams[worker, stream].end(), last=True)

    def say(self, text: str, *, stream: str = "stdout") -> None:
        """Write a line of the launcher, or a worker's line without a prefix."""
        with self._lock:
            self._consoles[stream].write(text.encode(errors="replace") + b"\n")

    def tail(self, worker: int) -> str:
        """Return the end of the worker's output."""
        with self._lock:
            return self._tails[worker].text if worker in self._tails else ""

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()

    def _prefix(self, worker: int, stream: str) -> bytes:
        if not self._options.prefix:
            return b""
        when = time.asctime() if self._options.timestamp else ""
        name = self._names.get(worker) or self._ranks.get(worker, worker)
        return f"{when}[{self._options.tag}{name}]<{stream}>:".encode()

    def _write(self, key: tuple[int, str], data: bytes, *, last: bool = False) -> None:
        if not data and not last:
            return
        settled = self._settled.setdefault(key, _Settled()).feed(data, last=last)
        console = self._consoles[key[1]]
        shown = settled if console.is_file else data
        if self._options.console and shown:
            console.write(shown, key, self._prefix(*key))
        file = self._files.get((self._ranks.get(key[0], key[0]), key[1]))
        if file is not None and settled:
            file.write(settled)


class _Lines:
    """Puts a prefix in front of each line of one stream."""

    def __init__(self, prefix: Callable[[], bytes]) -> None:
        self._prefix = prefix
        self._partial = b""
        self._inside = False  # part of the current line has been written
        self._after_return = False  # the last byte written was \r: a \n now belongs to it

    def feed(self, data: bytes) -> bytes:
        head = b""
        if self._after_return and data.startswith(b"\n"):
            head, data = b"\n", data[1:]
        self._after_return = self._after_return and not data and not head
        data = self._partial + data
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) < MAX_LINE_BYTES:
            self._partial = data
            return head
        if not cut:
            cut = len(data)
        whole, self._partial = data[:cut], data[cut:]
        return head + self._dress(whole)

    def _dress(self, whole: bytes) -> bytes:
        prefix = self._prefix()
        ended = whole.endswith((b"\n", b"\r"))
        last = len(whole) - (2 if whole.endswith(b"\r\n") else 1) if ended else len(whole)
        body, end = whole[:last], whole[last:]
        many = b"\r" in body  # plain newlines, the usual case, are replaced much faster
        start = b"" if self._inside else prefix
        if many or end == b"\r":
            text = self._dress_returns(body + end, prefix)
        else:
            text = start + body.replace(b"\n", b"\n" + prefix) + end
        self._inside = not ended
        self._after_return = end == b"\r"
        return text

    def _dress_returns(self, text: bytes, prefix: bytes) -> bytes:
        """Prefix every line except a bare carriage return, with which many progress bars begin."""
        pieces = _LINE_WITH_END.findall(text)
        bare = [piece == b"\r" or (number == 0 and self._inside) for number, piece in enumerate(pieces)]
        return b"".join(piece if is_bare else prefix + piece for piece, is_bare in zip(pieces, bare, strict=True))

    def end(self) -> bytes:
        last, self._partial = self._partial, b""
        if last or self._inside:
            return self._dress(last + b"\n")
        return b""


class _Settled:
    """Lines as they were when they ended: what `\\r` brought back to its beginning and wrote over is left out."""

    def __init__(self) -> None:
        self._held = b""  # a line after its `\r`, which may still be overwritten

    def feed(self, data: bytes, *, last: bool = False) -> bytes:
        data, self._held = self._held + data, b""
        if b"\r" not in data:
            return data
        *whole, rest = data.replace(b"\r\n", b"\n").split(b"\n")
        lines = [_last_state(line) + b"\n" for line in whole]
        if last and rest:
            lines.append(_last_state(rest) + b"\n")
        elif b"\r" in rest and len(rest) < MAX_LINE_BYTES:
            # The \r stays at its end: the next bytes overwrite the line, or a \n keeps it.
            self._held = _last_state(rest) + (b"\r" if rest.endswith(b"\r") else b"")
        else:
            lines.append(rest)
        return b"".join(lines)


def _last_state(line: bytes) -> bytes:
    return next((state for state in reversed(line.split(b"\r")) if state), b"")


class LogFile:
    """A log file. If the disk is full, the rest of the log is lost and the job continues.

    Readable by its owner only. Raises OSError if it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._file: IO[bytes] | None = os.fdopen(descriptor, "wb", buffering=0)

    def write(self, data: bytes) -> None:
        if self._file is None:
            return
        try:
            view = memoryview(data)
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:
            _log.error("cannot write %s: %s. The rest of this output is not kept.", self.path, error.strerror)
            self.close()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def discard(self) -> None:
        """The worker was never started."""
        self.close()
        self.path.unlink(missing_ok=True)


class _Console:
    """A console: an unfinished line is closed before a line of another worker; its rest gets a prefix again."""

    def __init__(self, stream: IO[Any] | None) -> None:
        # None: a process that was started without a console.
        self._stream: IO[Any] = stream if stream is not None else io.BytesIO()
        self._binary = _is_binary(self._stream)
        self._decoders: dict[object, codecs.IncrementalDecoder] = {}
        self._unfinished: object = None
        self._interrupted: set[object] = set()
        self._broken = stream is None
        self.is_file = _is_file(self._stream)

    def write(self, data: bytes, key: object = None, prefix: bytes = b"") -> None:
        if key in self._interrupted:
            self._interrupted.discard(key)
            data = prefix + data
        if self._unfinished not in (None, key):
            self._interrupted.add(self._unfinished)
            data = b"\n" + data
        self._unfinished = None if data.endswith((b"\n", b"\r")) else key
        if self._broken:
            return
        try:
            if self._binary:
                self._stream.write(data)
            else:
                self._write_text(data, key)
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed pipe or stream does not end the training
            self._broken = True
            _log.warning("the workers' output cannot be shown any more: %s", error)

    def _write_text(self, data: bytes, key: object) -> None:
        buffer = getattr(self._stream, "buffer", None)
        if isinstance(buffer, (io.RawIOBase, io.BufferedIOBase)):
            self._stream.flush()
            buffer.write(data)
            return
        if key not in self._decoders:
            self._decoders[key] = codecs.getincrementaldecoder("utf-8")("replace")
        self._stream.write(self._decoders[key].decode(data))


def _is_file(stream: IO[Any]) -> bool:
    """Return whether the stream is a regular file: not a terminal, a notebook, or a pipe to one."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


def _is_binary(stream: IO[Any]) -> bool:
    if isinstance(stream, (io.RawIOBase, io.BufferedIOBase)):
        return True
    return "b" in str(getattr(stream, "mode", ""))
