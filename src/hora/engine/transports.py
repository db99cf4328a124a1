"""The transports of a queue, one for each choice of devices, made when first needed: `transport/` has the kinds of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

from hora.engine.status import WorldStatus
from hora.engine.transport.base import Transport
from hora.engine.transport.cuda import CudaTransport
from hora.errors import HorovodInternalError

__all__ = ["Transports"]

_SETTLE_LIMIT_S = 600.0  # of work that is queued on a GPU


class Transports:
    """`make(devices)` is called by every member at the same point of the agreed order."""

    def __init__(self, make: Callable[[str], Transport], status: WorldStatus) -> None:
        self._make = make
        self._status = status
        self._made: dict[str, Transport] = {}

    def get(self, devices: str) -> Transport:
        """The one for these devices (see `Batch`)."""
        found = self._made.get(devices)
        if found is None:
            found = self._made[devices] = self._make(devices)
        return found

    def made(self, devices: str) -> Transport | None:
        """The same, if there is one already."""
        return self._made.get(devices)

    def settle(self) -> None:
        """Wait until the GPU has done what this rank has its part in: other members may need that part."""
        until = time.monotonic() + _SETTLE_LIMIT_S

        def guard() -> None:
            if self._status.broken or time.monotonic() > until:
                raise self._status.error()

        for transport in self._on_gpus():
            with suppress(HorovodInternalError):
                transport.settle(guard)

    def give_up(self) -> None:
        """The world is broken: what waits on a GPU need not go on."""
        for transport in self._on_gpus():
            transport.give_up()

    def _on_gpus(self) -> list[CudaTransport]:
        return [transport for transport in [*self._made.values()] if isinstance(transport, CudaTransport)]

    def close(self) -> None:
        """Release what they hold."""
        for transport in self._made.values():
            transport.close()
        self._made.clear()
