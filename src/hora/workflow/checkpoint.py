"""Checkpoints of `fit`, and the state of random number generators in them. `fit` decides what a checkpoint contains."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hora.safe_load import ForeignError, load_torch
from hora.torch.checkpoint_folder import CheckpointFolder


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


class Checkpoints(CheckpointFolder):
    """A folder of checkpoints of `fit`: one per epoch, and more often if you like.

    Args:
        folder: Created with the first checkpoint.
        keep: How many of the last ones stay.
        every_steps: Also write one every so many optimizer steps.

    Raises:
        ValueError: `keep` or `every_steps` is less than 1.
    """

    def __init__(self, folder: str | Path, *, keep: int = 2, every_steps: int | None = None) -> None:
        super().__init__(folder, keep=keep)
        if every_steps is not None and every_steps < 1:
            raise ValueError(f"every_steps must be at least 1, or None, but it is {every_steps}")
        self.every_steps = every_steps

    def save(self, state: Mapping[str, Any]) -> Path:
        """Write a state as the newest checkpoint; removes all but the last `keep`."""
        return self.write(state)

    def read_last(self) -> bytes | None:
        """Return the newest undamaged checkpoint; None if there is none. Warns about damaged ones."""
        found = next(self.undamaged(_warn), None)
        return None if found is None else found.read_bytes()

    @staticmethod
    def decode(payload: bytes) -> dict[str, Any]:
        """Return the state in a checkpoint, on the CPU. Raises ValueError if it contains more than data."""
        try:
            return load_torch(payload).plain()
        except ForeignError as error:
            raise ValueError(f"the checkpoint holds more than data: {error}") from None


def _warn(path: Path, error: Exception) -> None:
    warnings.warn(f"checkpoint {path} is damaged ({error}); trying the one before it", stacklevel=2)
