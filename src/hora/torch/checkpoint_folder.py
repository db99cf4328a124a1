"""A folder of numbered checkpoints that survives a kill at any time. Its users decide what a checkpoint contains.

A checkpoint is two files. `<number>.ckpt` is in torch.save's format; `<number>.json` holds its size and SHA-256 and is
renamed into place last. So a checkpoint is either complete or absent, and a damaged one is detected. The folder
returns paths; their contents are read as data (`hora.safe_load`), so no code in a file ever runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch

from hora.files import replaced

_FORMAT = "hora-checkpoint-2"
_MANIFEST = re.compile(r"(\d{8})\.json")
_PARTIAL = ".partial"
_MAX_MANIFEST_BYTES = 4096


class CheckpointFolder:
    """The last `keep` checkpoints in a folder."""

    def __init__(self, folder: str | Path, *, keep: int) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, but it is {keep}")
        self.folder, self.keep = Path(folder), keep
        self._is_made = False

    def make(self) -> None:
        """Create the folder, once: where it disappears later, a disk may have been unmounted."""
        if not self._is_made:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._is_made = True

    def write(self, content: Mapping[str, Any]) -> Path:
        """Write the newest checkpoint and remove all but the last `keep`; returns its path.

        Args:
            content: What `torch.save` writes. Its tensors must not change meanwhile.

        Raises:
            OSError: The disk is full or the folder is gone; earlier checkpoints stay.
        """
        self.make()
        # Numbered in the order of writing: steps may start from 0 again in a folder that was used before.
        number = 1 + max((int(path.stem) for path in self.paths()), default=0)
        path = self._path(number, "ckpt")
        with replaced(path, unfinished=f"{_PARTIAL}.ckpt") as file:
            torch.save(dict(content), file)
        with path.open("rb") as file:
            manifest = {"format": _FORMAT, "num_bytes": os.fstat(file.fileno()).st_size, "sha256": _digest(file)}
        with replaced(self._path(number, "json"), unfinished=f"{_PARTIAL}.json") as file:
            file.write(json.dumps(manifest).encode())
        for old in self.paths()[: -self.keep]:
            old.with_suffix(".json").unlink(missing_ok=True)
            old.unlink(missing_ok=True)
        return path

    def paths(self) -> list[Path]:
        """Return the complete checkpoints' `.ckpt` files, oldest first."""
        if not self.folder.is_dir():
            return []
        found = (_MANIFEST.fullmatch(name) for name in os.listdir(self.folder))
        return [self._path(number, "ckpt") for number in sorted(int(match[1]) for match in found if match)]

    def undamaged(self, on_damage: Callable[[Path, Exception], None]) -> Iterator[Path]:
        """Yield the checkpoints that are as they were written, newest first.

        Args:
            on_damage: Called with the path of a damaged one, and with what is wrong.
        """
        for path in reversed(self.paths()):
            try:
                _check(path)
            except (OSError, ValueError) as error:
                on_damage(path, error)
            else:
                yield path

    def _path(self, number: int, kind: str) -> Path:
        return self.folder / f"{number:08d}.{kind}"


def _check(path: Path) -> None:
    """Raise ValueError if the file is not the one that its manifest describes."""
    with path.with_suffix(".json").open("rb") as file:
        try:
            manifest = json.loads(file.read(_MAX_MANIFEST_BYTES))
        except RecursionError:
            raise ValueError("its manifest is nested too deeply") from None
    if not isinstance(manifest, dict) or manifest.get("format") != _FORMAT:
        raise ValueError(f"its manifest is not one of {_FORMAT!r}")
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != manifest.get("num_bytes"):
            raise ValueError(f"it has {num_bytes} of {manifest.get('num_bytes')} bytes")
        if _digest(file) != manifest.get("sha256"):
            raise ValueError("its checksum is wrong")


def _digest(file: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while piece := file.read(1 << 20):
        digest.update(piece)
    return digest.hexdigest()
