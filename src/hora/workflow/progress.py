"""What a person sees while training: a bar in a terminal or notebook, lines in a log. Rank 0 only.

Uses tqdm where it is installed and the output is a terminal or a notebook. `fit` drives it.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Mapping
from typing import Any

__all__ = ["Progress", "describe"]

_LINE_EVERY_S = 0.5


def describe(record: Mapping[str, float]) -> str:
    """An epoch in one line, without the epoch's number."""
    parts = [f"{name} {value:.4f}" for name, value in record.items() if name.startswith(("train_", "valid_"))]
    return "  ".join([*parts, f"lr {record['lr']:.3g}", f"{record['seconds']:.2f} s"])


class Progress:
    """Shows nothing unless `visible`; one bar over all epochs where a person is watching; else printed lines.

    Epochs shorter than half a second share a line: the first and the last epoch always have one.
    """

    def __init__(self, epochs: int, num_steps: int, *, visible: bool) -> None:
        self._epochs = epochs
        self._num_steps = num_steps
        self._visible = visible
        self._bar: Any = None
        self._last_line_s = float("-inf")

    def start(self, epoch: int, step: int) -> None:
        """Training begins at this place: (0, 0), or later after a resume."""
        bar_class = _bar_class() if self._visible else None
        if bar_class is not None:
            done, total = epoch * self._num_steps + step, self._epochs * self._num_steps
            self._bar = bar_class(total=total, initial=done, unit="step", dynamic_ncols=True)
            self._bar.set_description(f"epoch {epoch + 1}/{self._epochs}")

    def step(self) -> None:
        """A step has been taken."""
        if self._bar is not None:
            self._bar.update(1)

    def finish_epoch(self, epoch: int, record: Mapping[str, float]) -> None:
        """The epoch is over and this is what it gave."""
        if self._bar is not None:
            self._bar.set_description(f"epoch {epoch + 1}/{self._epochs}", refresh=False)
            self._bar.set_postfix_str(describe(record))
        elif self._visible:
            now = time.monotonic()
            if now - self._last_line_s >= _LINE_EVERY_S or epoch + 1 == self._epochs:
                self._last_line_s = now
                print(f"epoch {epoch + 1:>3}/{self._epochs}  {describe(record)}", flush=True)

    def say(self, text: str) -> None:
        """A line of its own."""
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
