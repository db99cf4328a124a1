"""A torch.distributed Store over the job's authenticated control connection.

NCCL publishes its addresses in a Store. With this one they meet through the launcher's rendezvous, which checks
the job's secret, instead of an open TCPStore. Only small values pass here, never tensors. The meeting makes one per
transport, with a prefix of its own; torch calls the methods, also from threads of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

from hora.net.client import ControlClient

__all__ = ["ControlStore"]

# How long one request may wait at the server before the liveness check is asked again.
_SLICE_S = 0.5


class ControlStore(Store):
    """Keys live under `prefix`. Waiting ends after `timeout_s`, or when `check_alive` raises."""

    def __init__(
        self, client: ControlClient, *, prefix: str, timeout_s: float, check_alive: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__()
        self._client = client
        self._prefix = prefix
        self._timeout_s = timeout_s
        self._check_alive = check_alive

    def set(self, key: str, value: str | bytes) -> None:
        self._client.set(self._key(key), _bytes(value))

    def get(self, key: str) -> bytes:
        return self._get(key, self._timeout_s)

    def add(self, key: str, amount: int) -> int:
        return self._client.add(self._key(key), amount)

    def check(self, keys: Sequence[str]) -> bool:
        return self._client.check([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Return when every key is set."""
        limit_s = self._timeout_s if timeout is None else timeout.total_seconds()
        deadline = time.monotonic() + limit_s
        for key in keys:
            self._get(key, max(deadline - time.monotonic(), 0.001))

    def delete_key(self, key: str) -> bool:
        return self._client.delete(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def multi_set(self, keys: Sequence[str], values: Sequence[str | bytes]) -> None:
        for key, value in zip(keys, values, strict=True):
            self.set(key, value)

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Set `key` if its value is `expected` (empty: or the key is missing); the value afterwards."""
        lock = f"{key}/lock"
        deadline = time.monotonic() + self._timeout_s
        # `add` is the server's only atomic read-modify-write: the rank that counts to one holds the lock, and its
        # release wakes the next.
        turn = self.add(f"{lock}/turns", 1)
        if turn > 1:
            self._get(f"{lock}/{turn - 1}", max(deadline - time.monotonic(), 0.001))
            self.delete_key(f"{lock}/{turn - 1}")
        try:
            current = self.get(key) if self.check([key]) else b""
            if current == _bytes(expected):
                current = _bytes(desired)
                self.set(key, current)
            return current
        finally:
            self.set(f"{lock}/{turn}", b"released")

    def has_extended_api(self) -> bool:
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        return timedelta(seconds=self._timeout_s)

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def _get(self, key: str, limit_s: float) -> bytes:
        deadline = time.monotonic() + limit_s
        while True:
            left_s = deadline - time.monotonic()
            try:
                return self._client.get(self._key(key), timeout_s=max(min(left_s, _SLICE_S), 0.001))
            except TimeoutError:
                self._check_alive()
                if left_s <= _SLICE_S:
                    raise TimeoutError(f"waited {limit_s:g} s for the key {self._key(key)!r}") from None


def _bytes(value: str | bytes) -> bytes:
    # Values may be binary; Python callers also pass text.
    return value.encode() if isinstance(value, str) else bytes(value)
