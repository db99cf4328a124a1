"""Waiting in tests: for a condition, never for a time."""

from __future__ import annotations

import time
from collections.abc import Callable

LIMIT_S = 240.0


def wait_until(what: str, condition: Callable[[], object], limit_s: float = LIMIT_S) -> None:
    """Return when the condition holds; fail at the limit with `what`."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {limit_s:g} s until {what}"
        time.sleep(0.005)
