"""Durable commits on disk, so that training survives the loss of every worker; written by `TorchState.persist`.

A commit is a checkpoint of `CheckpointFolder`. A thread writes; a commit made while the previous one is still being
written stays in memory only. A failed write is logged and skipped; only the last commit of a training must succeed.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hora.safe_load import ForeignError, load_torch
from hora.torch.checkpoint_folder import CheckpointFolder

log = logging.getLogger("hora")

_WRITE_LIMIT_S = 600.0


class DurableCommits:
    """The last `keep` commits in a folder."""

    def __init__(self, folder: str | Path, *, keep: int) -> None:
        self._checkpoints = CheckpointFolder(folder, keep=keep)
        self._folder = self._checkpoints.folder
        self._thread: threading.Thread | None = None
        self.failure: Exception | None = None  # of the last commit
        self._checkpoints.make()

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
        for path in self._checkpoints.undamaged(_warn):
            try:
                with path.open("rb") as file:
                    content: dict[str, Any] = load_torch(file).plain()
            except ForeignError as error:
                raise ValueError(f"{path} holds {error}: no commit does, so the file was modified; remove it") from None
            except (OSError, ValueError) as error:
                _warn(path, error)
            else:
                return content
        return None

    def _write(self, content: Mapping[str, Any]) -> None:
        try:
            self._checkpoints.write(content)
        except Exception as error:  # a full disk must not end the training
            self.failure = error
            log.warning("a commit could not be written to %s (%s); the next commit replaces it", self._folder, error)


def _warn(path: Path, error: Exception) -> None:
    log.warning("commit %s is damaged (%s); trying the one before it", path, error)
