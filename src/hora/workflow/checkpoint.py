"""Checkpoint folder that survives a kill at any time. `fit` decides what a checkpoint contains.

A file is a line of JSON (format, the payload's size and SHA-256), then the payload: `torch.save`'s format, read back as
data (`hora.safe_load`), so no code in it ever runs. A file is written under another name and renamed once it is
complete and on disk. A damaged file is detected and the previous one used.
"""

from __future__ import annotations

import hashlib
import io
import json
import random
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hora.files import replaced
from hora.safe_load import ForeignError, load_torch

_MAGIC = "hora-checkpoint-1"
_NAME = re.compile(r"^(\d{8})\.ckpt$")
_UNFINISHED = "unfinished.partial"
_MAX_HEADER_BYTES = 4096


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def capture_rng() -> dict[str, Any]:
    """Return the state of this process's generators as plain values and tensors, which load without running code."""
    kind, keys, position, has_gauss, gauss = np.random.get_state(legacy=True)
    return {
        "python": random.getstate(),
        "numpy": (str(kind), [int(key) for key in keys], int(position), int(has_gauss), float(gauss)),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def restore_rng(state: dict[str, Any]) -> None:
    """Restore the state of `capture_rng`."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


class Checkpoints:
    """The last `keep` checkpoints in `folder`: one per epoch, and one every `every_steps` optimizer steps."""

    def __init__(self, folder: str | Path, *, keep: int = 2, every_steps: int | None = None) -> None:
        if keep < 1:
            raise ValueError(f"keep must be at least 1 checkpoint, but it is {keep}")
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, or None, but it is {every_steps}")
        self.folder = Path(folder)
        self.keep = keep
        self.every_steps = every_steps

    def save(self, state: Mapping[str, Any]) -> Path:
        """Write a state as the newest checkpoint; removes all but the last `keep`."""
        buffer = io.BytesIO()
        torch.save(dict(state), buffer)
        payload = buffer.getbuffer()
        header = {"format": _MAGIC, "num_bytes": len(payload), "sha256": hashlib.sha256(payload).hexdigest()}
        self.folder.mkdir(parents=True, exist_ok=True)
        # Numbered in the order of writing: steps may start from 0 again in a folder that was used before.
        number = 1 + max((int(path.stem) for path in self.paths()), default=0)
        path = self.folder / f"{number:08d}.ckpt"
        with replaced(path, unfinished=_UNFINISHED) as file:
            file.write(json.dumps(header).encode() + b"\n")
            file.write(payload)
        for old in self.paths()[: -self.keep]:
            old.unlink()
        return path

    def paths(self) -> list[Path]:
        """Return the checkpoint files, oldest first."""
        if not self.folder.is_dir():
            return []
        return sorted(path for path in self.folder.iterdir() if _NAME.match(path.name))

    def read_last(self) -> bytes | None:
        """Return the payload of the newest undamaged checkpoint; None if there is none. Warns about damaged ones."""
        (self.folder / _UNFINISHED).unlink(missing_ok=True)
        for path in reversed(self.paths()):
            try:
                return _payload(path)
            except ValueError as error:
                warnings.warn(f"checkpoint {path} is damaged ({error}); trying the one before it", stacklevel=2)
        return None

    @staticmethod
    def decode(payload: bytes) -> dict[str, Any]:
        """Return the state in a payload, on the CPU. Raises ValueError if it contains more than data."""
        try:
            return load_torch(payload).plain()
        except ForeignError as error:
            raise ValueError(f"the checkpoint holds more than data: {error}") from None


def _payload(path: Path) -> bytes:
    with path.open("rb") as file:
        line = file.readline(_MAX_HEADER_BYTES)
        try:
            header = json.loads(line)
            wanted, digest = int(header["num_bytes"]), str(header["sha256"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise ValueError("its header cannot be read") from error
        if header.get("format") != _MAGIC:
            raise ValueError(f"its format is {header.get('format')!r}, not {_MAGIC!r}")
        payload = file.read()
    if len(payload) != wanted:
        raise ValueError(f"it has {len(payload)} of {wanted} bytes")
    if hashlib.sha256(payload).hexdigest() != digest:
        raise ValueError("its checksum is wrong")
    return payload
