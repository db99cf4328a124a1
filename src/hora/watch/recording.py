"""A recorded run: the entries of a job in a file, small enough to mail, readable while it is written.

    HORA-RUN 3\\n   one line of JSON: the job's facts   then blocks: length (4 bytes), zlib of the entries in it

A block is written every few seconds, so a killed launcher loses no more than that; an incomplete last block is ignored
when the file is read. A file from someone else is treated as data only: sizes are checked, nothing is executed.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import struct
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from hora.files import new_file
from hora.watch.model import KINDS, Entry, Run

_FAMILY = b"HORA-RUN "
_MAGIC = _FAMILY + b"3\n"
_ENTRY = struct.Struct("<dBiI")
_LENGTH = struct.Struct("<I")
_BLOCK_BYTES = 256 * 1024
_MAX_BLOCK_BYTES = 4 * 1024 * 1024
_BLOCK_S = 5.0
_MAX_HEADER_BYTES = 1024 * 1024
_LOOK_S = 1.0
_MEMORY_BYTES = 8 * 2**20

_log = logging.getLogger("hora.watch")


class Recorder:
    """Writes a run as it happens; drops output beyond `max_bytes`, everything beyond twice that. No path: unnamed."""

    def __init__(self, path: str | Path | None, facts: Mapping[str, Any], *, max_bytes: int = 64 * 2**20) -> None:
        self._name, self._max_bytes = path, max_bytes
        if path is None:
            self._file = self._unnamed()
        else:
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            self._file = os.fdopen(new_file(path), "w+b", buffering=0)  # logs and arguments may be private
        self._entries = bytearray()
        self._since = 0.0
        self._num_bytes = 0
        self._write(_MAGIC + json.dumps(dict(facts)).encode() + b"\n")

    def _unnamed(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(prefix="hora-run-", buffering=0)
        except OSError:  # no folder for temporary files: in memory, then, but less
            self._max_bytes = min(self._max_bytes, _MEMORY_BYTES)
            return os.fdopen(os.memfd_create("hora-run", os.MFD_CLOEXEC), "w+b", buffering=0)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        try:
            while view:
                view = view[self._file.write(view) :]
        except OSError as error:  # a full disk ends the recording, not the training
            what = "the run" if self._name is None else self._name
            _log.warning("%s is not recorded any further: %s", what, error.strerror)
            self._file.close()

    def record(self, entry: Entry) -> None:
        limit = self._max_bytes if entry.kind == "line" else 2 * self._max_bytes
        if self._file.closed or self._num_bytes > limit:
            return
        if not self._entries:
            self._since = entry.at
        self._entries += _ENTRY.pack(entry.at, KINDS.index(entry.kind), entry.worker, len(entry.data))
        self._entries += entry.data
        if len(self._entries) > _BLOCK_BYTES or entry.at - self._since > _BLOCK_S:
            self.flush()

    def flush(self) -> None:
        if self._entries and not self._file.closed:
            block = zlib.compress(self._entries, 6)
            self._entries.clear()
            self._num_bytes += len(block)
            self._write(_LENGTH.pack(len(block)) + block)

    def contents(self) -> bytes:
        self.flush()
        if self._file.closed:
            return b""
        end = self._file.seek(0, os.SEEK_END)
        return os.pread(self._file.fileno(), end, 0)

    def close(self) -> None:
        self.flush()
        self._file.close()


def is_recording(path: str | Path) -> bool:
    """Return whether the file begins like a recorded run, of this version or another one."""
    with open(path, "rb") as file:
        return file.read(len(_FAMILY)) == _FAMILY


def read_entries(path: str | Path) -> tuple[dict[str, Any], Iterator[Entry]]:
    """Return the facts and entries of a recording. Raises ValueError if it is not one."""
    with open(path, "rb") as file:
        magic = file.read(len(_MAGIC))
        if magic.startswith(_FAMILY) and magic != _MAGIC:
            written, read = magic.decode(errors="replace").strip(), _MAGIC.decode().strip()
            raise ValueError(
                f"{path} was recorded by another version of Hora ({written!r:.20}, this one reads {read!r}): "
                "open it with that version"
            )
        if magic != _MAGIC:
            raise ValueError(f"{path} is not a recorded run: it does not begin with {_MAGIC.decode().strip()!r}")
        facts = None
        with contextlib.suppress(ValueError, RecursionError):
            facts = json.loads(file.readline(_MAX_HEADER_BYTES))
        if not isinstance(facts, dict):
            raise ValueError(f"{path} is damaged: its first lines do not describe the recording")
        return facts, _entries(path, file.tell())


def _entries(path: str | Path, begin: int) -> Iterator[Entry]:
    with open(path, "rb") as file:
        file.seek(begin)
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            (length,) = _LENGTH.unpack(head)
            if length > _MAX_BLOCK_BYTES or len(block := file.read(length)) < length:
                return
            unpacker = zlib.decompressobj()
            try:
                data = unpacker.decompress(block, _MAX_BLOCK_BYTES)
            except zlib.error:
                return
            position = 0
            while position + _ENTRY.size <= len(data):
                at, kind, worker, length = _ENTRY.unpack_from(data, position)
                position += _ENTRY.size
                if kind < len(KINDS):
                    yield Entry(at, KINDS[kind], worker, data[position : position + length])
                position += length


def read_run(path: str | Path) -> Run:
    """Return the run in a recording. Raises ValueError if the file is not one."""
    facts, entries = read_entries(path)
    try:
        run = Run(facts)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    looked_at = run.began
    for entry in entries:
        try:
            run.apply(entry)
        except ValueError:  # skip a damaged entry, keep the rest
            continue
        if run.now - looked_at >= _LOOK_S:  # as often as a live page, so that it reaches the same verdicts
            looked_at = run.now
            run.look(run.now)
    run.look(run.now)
    return run
