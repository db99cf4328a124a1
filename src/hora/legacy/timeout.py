"""`horovod.runner.common.util.timeout`: a limit that several waits share."""

from __future__ import annotations

import time

__all__ = ["Timeout", "TimeoutException"]


class TimeoutException(Exception):  # noqa: N818 - Horovod's name
    """A limit was passed. `message` says whose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class Timeout:
    """`timeout` seconds from now on. Pickled, it goes on with the seconds that are left."""

    def __init__(self, timeout: float, message: str) -> None:
        self._timeout = timeout
        self._message = message
        self._ends = time.monotonic() + timeout

    def remaining(self) -> float:
        """Seconds that are left, never less than 0."""
        return max(0.0, self._ends - time.monotonic())

    def timed_out(self) -> bool:
        return self.remaining() <= 0

    def check_time_out_for(self, activity: str) -> None:
        """TimeoutException if the limit has passed; `{activity}` in the message becomes what was waited for."""
        if self.timed_out():
            message = self._message.format(activity=activity)
            raise TimeoutException(f"{message} Timeout after {self._timeout:g} seconds.")

    def __getstate__(self) -> tuple[float, str, float]:
        return self._timeout, self._message, self.remaining()

    def __setstate__(self, state: tuple[float, str, float]) -> None:
        self._timeout, self._message, remaining = state
        self._ends = time.monotonic() + remaining
