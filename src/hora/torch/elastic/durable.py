"""Durable commits on disk, so that training survives the loss of every worker; written by `TorchState.persist`.

A commit is two files. `<number>.commit` is in torch.save's format and is read back as data (`hora.safe_load`), so no
code in it ever runs. `<number>.json` holds its size and SHA-256 and is renamed into place last. So a commit is either
complete or absent, even if the writer is killed. A damaged commit is detected and the previous one used. A thread
writes; a commit made while the previous one is still being written stays in memory only. A failed write is logged and
skipped; only the last commit of a training must succeed.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import torch

from hora.files import replaced
from hora.safe_load import ForeignError, load_torch

log = logging.getLogger("hora")

_FORMAT = "hora-commit-1"
_MANIFEST = re.compile(r"(\d{8})\.json")
_PARTIAL = ".partial"
_MAX_MANIFEST_BYTES = 4096
_WRITE_LIMIT_S = 600.0


class DurableCommits:
    """The last `keep` commits in a folder."""

    def __init__(self, folder: str | Path, *, keep: int) -> None:
        self._folder, self._keep = Path(folder), keep
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None  # of the last commit
        self._folder.mkdir(parents=True, exist_ok=True)

    @property
    def busy(self) -> bool:
        """Return whether a commit is being written."""
        return self._thread is not None and self._thread.is_alive()

    def write(self, content: Mapping[str, Any]) -> None:
        """Write a commit in the background. Its tensors must not change while `busy`."""
        assert not self.busy
        self.failure = None
        # Not a daemon: a process that exits normally finishes its last commit.
        self._thread = threading.Thread(target=self._write, args=(dict(content),), name="hora-commit")
        self._thread.start()

    def wait(self) -> None:
        """Wait until the current write is complete."""
        if self._thread is not None:
            self._thread.join(_WRITE_LIMIT_S)
            if self._thread.is_alive():
                raise TimeoutError(f"a commit to {self._folder} was not written within {_WRITE_LIMIT_S:g} s")
            self._thread = None

    def finish(self) -> None:
        """Wait until the current commit is on disk. Raises RuntimeError if it could not be written."""
        self.wait()
        failure, self.failure = self.failure, None
        if failure is not None:
            raise RuntimeError(f"the last commit could not be written to {self._folder}: {failure}") from failure

    def read_last(self) -> dict[str, Any] | None:
        """Return the newest undamaged commit, on the CPU; None if there is none."""
        for number in reversed(self._numbers()):
            try:
                return self._read(number)
            except ForeignError as error:
                path = self._path(number, "commit")
                raise ValueError(f"{path} holds {error}: no commit does, so the file was modified; remove it") from None
            except (OSError, ValueError) as error:
                log.warning("commit %s is damaged (%s); trying the one before it", self._path(number, "commit"), error)
        return None

    def _read(self, number: int) -> dict[str, Any]:
        with self._path(number, "json").open("rb") as file:
            try:
                manifest = json.loads(file.read(_MAX_MANIFEST_BYTES))
            except RecursionError:
                raise ValueError("its manifest is nested too deeply") from None
        if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
            raise ValueError(f"its manifest is not one of {_FORMAT!r}")
        with self._path(number, "commit").open("rb") as file:
            if os.fstat(file.fileno()).st_size != manifest.get("num_bytes"):
                raise ValueError("its size is wrong")
            if _digest(file) != manifest.get("sha256"):
                raise ValueError("its checksum is wrong")
            file.seek(0)
            content: dict[str, Any] = load_torch(file).plain()
            return content

    def _write(self, content: Mapping[str, Any]) -> None:
        try:
            number = 1 + max(self._numbers(), default=0)
            payload = self._path(number, "commit")
            with replaced(payload, unfinished=f"{_PARTIAL}.commit") as file:
                torch.save(content, file)
            with payload.open("rb") as file:
                num_bytes = os.fstat(file.fileno()).st_size
                manifest = {"format": _FORMAT, "num_bytes": num_bytes, "sha256": _digest(file)}
            with replaced(self._path(number, "json"), unfinished=f"{_PARTIAL}.json") as file:
                file.write(json.dumps(manifest).encode())
            for old in self._numbers()[: -self._keep]:
                self._path(old, "json").unlink(missing_ok=True)
                self._path(old, "commit").unlink(missing_ok=True)
        except Exception as error:  # a full disk must not end the training
            self.failure = error
            log.warning("a commit could not be written to %s (%s); the next commit replaces it", self._folder, error)

    def _numbers(self) -> list[int]:
        found = (_MANIFEST.fullmatch(name) for name in os.listdir(self._folder))
        return sorted(int(match[1]) for match in found if match)

    def _path(self, number: int, kind: str) -> Path:
        return self._folder / f"{number:08d}.{kind}"


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
