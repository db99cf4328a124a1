"""What a person sees while training.

A bar in a terminal or notebook, one line per epoch in a log. Rank 0 only.

Uses tqdm where it is installed and somebody is watching. `fit` drives it.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["Progress", "describe"]


def describe(record: Mapping[str, float]) -> str:
    """An epoch in one line, without the epoch's number."""
    parts = [f"{name} {value:.4f}" for name, value in record.items() if name.startswith(("train_", "valid_"))]
    return "  ".join([*parts, f"lr {record['lr']:.3g}", f"{record['seconds']:.2f} s"])


class Progress:
    """Shows nothing unless `visible`; a bar where a person is watching; else one printed line per epoch."""

    def __init__(self, epochs: int, *, visible: bool) -> None:
        self._epochs = epochs
        self._visible = visible
        self._tqdm = _bar_class() if visible else None
        self._bar: Any = None

    def start_epoch(self, epoch: int, num_steps: int, done: int) -> None:
        """An epoch (from 0) begins, `done` of its steps having been taken before a resume."""
        if self._tqdm is not None:
            title = f"epoch {epoch + 1}/{self._epochs}"
            self._bar = self._tqdm(total=num_steps, initial=done, desc=title, leave=True, unit="step")

    def step(self) -> None:
        """A step has been taken."""
        if self._bar is not None:
            self._bar.update(1)

    def finish_epoch(self, epoch: int, record: Mapping[str, float]) -> None:
        """The epoch is over and this is what it gave."""
        if self._bar is not None:
            self._bar.set_postfix_str(describe(record))
            self._bar.close()
            self._bar = None
        elif self._visible:
            print(f"epoch {epoch + 1:>3}/{self._epochs}  {describe(record)}", flush=True)

    def say(self, text: str) -> None:
        """A line between epochs."""
        if self._visible:
            print(text, flush=True)

    def close(self) -> None:
        """Also after an exception in the middle of an epoch."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def _bar_class() -> Any:
    if not (_in_notebook() or sys.stderr.isatty()):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tqdm's advice to install widgets is not this program's news
            from tqdm.auto import tqdm
    except ImportError:
        return None
    return tqdm


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return shell is not None and shell.__class__.__name__ == "ZMQInteractiveShell"
