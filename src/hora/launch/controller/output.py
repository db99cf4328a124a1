"""The workers' output: whole lines with a prefix that tells the rank, on the console and in files.

Bytes go in as they arrive; lines come out as soon as they are complete (`\\n`, `\\r` or both end one), byte for byte
what the worker wrote. Of a line that was written over and over (`\\r`, a progress bar) a file gets only the last state.
Memory is bounded whatever a worker prints. Keeps the end of each worker's output for error reports. Called by the
controller, from any thread.
"""

from __future__ import annotations

import codecs
import contextlib
import io
import logging
import os
import re
import select
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import IO, Any

from hora.files import new_file
from hora.launch.job import OutputOptions
from hora.launch.limits import UNREAD_S
from hora.launch.tail import Tail

MAX_LINE_BYTES = 256 * 1024  # a longer line is written in pieces
_LINE_WITH_END = re.compile(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+")

_LOOK_MS = 100

_log = logging.getLogger("hora.launch")


class OutputWriter:
    """Writes the workers' output. `ranks`: each worker's number in the prefixes and directory names. Without a
    directory workers may have names instead.
    """

    def __init__(self, options: OutputOptions, ranks: Mapping[int, int | str]) -> None:
        self._options = options
        self.aside: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext  # around each write
        self._ranks = dict(ranks)
        self._lock = threading.Lock()
        self._streams: dict[tuple[int, str], _WorkerStream] = {}
        self._tails: dict[int, Tail] = {}
        self._consoles = {
            "stdout": _Console(options.stdout if options.stdout is not None else sys.stdout),
            "stderr": _Console(options.stderr if options.stderr is not None else sys.stderr),
        }
        self._files: dict[tuple[int | str, str], LogFile] = {}  # by rank
        self._width = max(map(len, map(str, self._ranks.values())), default=1)
        self._open_files()

    def _open_files(self) -> None:
        if self._options.directory is None:
            return
        for rank in self._ranks.values():
            place = Path(self._options.directory) / f"rank.{str(rank).zfill(self._width)}"
            for stream in ("stdout", "stderr"):
                if (rank, stream) not in self._files:
                    try:
                        self._files[rank, stream] = LogFile(place / stream)
                    except OSError as error:
                        message = f"cannot write {place / stream} (--output-filename): {error.strerror}"
                        raise OSError(message) from None

    def set_ranks(self, ranks: Mapping[int, int | str]) -> None:
        """Change the numbers, or names, of these workers."""
        with self._lock:
            self._ranks |= ranks
            self._open_files()

    def feed(self, worker: int, stream: str, data: bytes) -> None:
        """Add bytes of a worker's stdout or stderr."""
        with self._lock:
            self._tails.setdefault(worker, Tail()).add(data)
            self._write(worker, stream, data)

    def end(self, worker: int) -> None:
        """The worker has ended: write its last line even if it is incomplete."""
        with self._lock:
            for stream in ("stdout", "stderr"):
                if (worker, stream) in self._streams:
                    self._write(worker, stream, b"", last=True)

    def say(self, text: str, *, stream: str = "stdout") -> None:
        """Write a line of the launcher, or a worker's line without a prefix."""
        with self._lock, self.aside():
            self._consoles[stream].write(text.encode(errors="replace") + b"\n")

    def tail(self, worker: int) -> str:
        """Return the end of the worker's output."""
        with self._lock:
            return self._tails[worker].text if worker in self._tails else ""

    def hurry(self) -> None:
        """The job is to end: stop writing to a console that accepts nothing for a while, such as an unread pipe."""
        for console in self._consoles.values():
            console.hurry()

    def close(self) -> None:
        with self._lock:
            for file in self._files.values():
                file.close()

    def _write(self, worker: int, stream: str, data: bytes, *, last: bool = False) -> None:
        key, console, prefix, rank = (worker, stream), self._consoles[stream], b"", self._ranks.get(worker, worker)
        if self._options.prefix:
            when = time.asctime() if self._options.timestamp else ""
            prefix = f"{when}[{self._options.tag}{rank}]<{stream}>:".encode()
        shown, kept = self._streams.setdefault(key, _WorkerStream()).feed(data, prefix, last=last)
        if console.is_file:
            shown = kept
        if self._options.console and shown:
            with self.aside():
                console.write(shown, key, prefix)
        if kept and (rank, stream) in self._files:
            self._files[rank, stream].write(kept)


class _WorkerStream:
    """One stream of a worker as lines with a prefix: on the console, and in a file."""

    def __init__(self) -> None:
        self._partial = b""  # a line whose end has not arrived
        self._inside = False  # the beginning of a long line has been written
        self._after_return = False  # `\r` ended the last line: the next one overwrites it, and a `\n` belongs to it
        self._line = b""  # that line

    def feed(self, data: bytes, prefix: bytes, *, last: bool = False) -> tuple[bytes, bytes]:
        """Return the complete lines as a console shows them, and without those that were overwritten.

        `last`: the worker has ended, and an incomplete line with it.
        """
        data = self._partial + data
        if last and (data or self._inside):
            data += b"\n"
        cut = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
        if not cut and len(data) >= MAX_LINE_BYTES:
            cut = len(data)
        whole, self._partial = data[:cut], data[cut:]
        if self._after_return or b"\r" in whole:
            shown, kept = self._overwrite(whole, prefix)
        else:  # the usual case, much faster
            shown = kept = whole[:-1].replace(b"\n", b"\n" + prefix) + whole[-1:]
            if whole:
                shown = kept = shown if self._inside else prefix + shown
                self._inside = not whole.endswith(b"\n")
        if last and self._line:
            kept, self._line = kept + self._line + b"\n", b""
        return shown, kept

    def _overwrite(self, whole: bytes, prefix: bytes) -> tuple[bytes, bytes]:
        shown, kept = bytearray(), bytearray()
        for line in _LINE_WITH_END.findall(whole):
            text = line.rstrip(b"\r\n")
            end = line[len(text) :]
            # Many progress bars begin with a bare carriage return.
            if not (self._inside or line == b"\r" or (self._after_return and line == b"\n")):
                text = prefix + text
            shown += text + end
            self._line = text if self._after_return and text else self._line + text
            self._inside, self._after_return = not end, end == b"\r"
            if not self._after_return:
                kept += self._line + end[-1:]
                self._line = b""
        return bytes(shown), bytes(kept)


class LogFile:
    """A log file. If the disk is full, the rest of the log is lost and the job continues.

    Readable by its owner only. Raises OSError if it cannot be created.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file: IO[bytes] | None = os.fdopen(new_file(path), "wb", buffering=0)

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
        self._binary = next((one for one in (stream, getattr(stream, "buffer", None)) if _is_binary(one)), None)
        self._decoders: dict[object, codecs.IncrementalDecoder] = {}
        self._unfinished: object = None
        self._interrupted: set[object] = set()
        self._broken = stream is None
        self.is_file = _is_file(self._stream)
        self._hurried_at: float | None = None
        self._room: select.poll | None = None
        with contextlib.suppress(OSError, ValueError, AttributeError):  # a notebook's has no descriptor
            if self._binary is not None and not self.is_file:
                self._descriptor = self._binary.fileno()
                self._room = select.poll()
                self._room.register(self._descriptor, select.POLLOUT)

    def hurry(self) -> None:
        """Limit the time for which a write may find no room. From any thread."""
        self._hurried_at = time.monotonic()

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
            if self._binary is None:
                decoder = self._decoders.setdefault(key, codecs.getincrementaldecoder("utf-8")("replace"))
                self._stream.write(decoder.decode(data))
            elif self._room is None:
                self._stream.flush()
                self._binary.write(data)
            else:
                self._write_when_there_is_room(self._room, data)
            self._stream.flush()
        except (OSError, ValueError) as error:  # a closed pipe or stream does not end the training
            self._broken = True
            _log.warning("the workers' output cannot be shown any more: %s", error)

    def _write_when_there_is_room(self, room: select.poll, data: bytes) -> None:
        """Write to a pipe or terminal without blocking: a blocked thread, and the launcher, could not be ended."""
        self._stream.flush()
        view, since = memoryview(data), time.monotonic()
        while view:
            if room.poll(_LOOK_MS):
                with contextlib.suppress(BlockingIOError):  # another process has made it non-blocking, or writes too
                    view = view[os.write(self._descriptor, view[: select.PIPE_BUF]) :]
                    since = time.monotonic()
            elif self._hurried_at is not None and time.monotonic() > max(since, self._hurried_at) + UNREAD_S:
                self._broken = True
                return


def _is_file(stream: IO[Any]) -> bool:
    """Return whether the stream is a regular file: not a terminal, a notebook, or a pipe to one."""
    try:
        return stat.S_ISREG(os.fstat(stream.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


def _is_binary(stream: IO[Any] | None) -> bool:
    return isinstance(stream, (io.RawIOBase, io.BufferedIOBase)) or "b" in str(getattr(stream, "mode", ""))
