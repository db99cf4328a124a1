"""Signals that ask the launcher to end, as exceptions: so that every `finally` on the way out gets its turn."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

__all__ = ["ended_by_signals"]


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, SIGTERM and SIGHUP raise SystemExit (128 + signal) in the main thread.

    Handlers that the program has installed itself stay, and elsewhere than in the main thread nothing
    changes. There the default applies: the process dies, and the supervisors of its workers notice.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _leave)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _leave(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
