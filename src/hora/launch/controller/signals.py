"""Signals that ask the launcher to end, as exceptions: so that every `finally` on the way out gets its turn.

Who can do better at a first SIGTERM, because its ranks can commit and leave, says so with `Signals.first`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType

__all__ = ["Signals", "ended_by_signals"]


class Signals:
    """`first`: called, in the signal handler, instead of ending everything when the first SIGTERM comes."""

    first: Callable[[], None] | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        first, self.first = self.first, None
        if number != signal.SIGTERM or first is None:
            raise SystemExit(128 + number)
        first()


@contextlib.contextmanager
def ended_by_signals() -> Iterator[Signals]:
    """Within it, SIGTERM and SIGHUP raise SystemExit (128 + signal) in the main thread.

    Handlers that the program has installed itself stay, and elsewhere than in the main thread nothing
    changes. There the default applies: the process dies, and the agents of its workers notice.
    """
    signals = Signals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    ours = [number for number in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(number) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, signals.handle)
    try:
        yield signals
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)
