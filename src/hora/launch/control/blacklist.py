"""Places where workers failed, and for how long nobody is started there. Pure: clock and chance are given.

A place is a host, or one slot of a host where the job has no other host. Called by `elastic`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from hora.launch.control.elastic_policy import HostSlots
from hora.launch.slots import HostInfo

__all__ = ["Blacklist", "Place"]

Place = tuple[str, int | None]  # a host, and one of its slots (None: the whole host)


class Blacklist:
    """`cooldown_range`: shortest and longest time out, in seconds; None: for ever. `chance`: uniform in [0, 1)."""

    def __init__(self, cooldown_range: tuple[int, int] | None, chance: Callable[[], float]) -> None:
        self._range, self._chance = cooldown_range, chance
        self._times: dict[Place, int] = {}
        self._until: dict[Place, float | None] = {}

    def bar(self, place: Place, now: float) -> float | None:
        """Bar a place; returns until when (None: for ever). Each time lasts about twice as long as the one before."""
        times = self._times[place] = self._times.get(place, 0) + 1
        self._until[place] = None if self._range is None else now + self._delay_s(*self._range, times)
        return self._until[place]

    def _delay_s(self, shortest: int, longest: int, times: int) -> float:
        doubled = shortest * 2.0 ** min(times, 64)
        return float(min(max(doubled + self._chance() * shortest, shortest), longest))

    def is_barred(self, host: str, slot: int, now: float) -> bool:
        return any(self._out((host, place), now) for place in (None, slot))

    def usable(self, hosts: Iterable[HostInfo], now: float) -> tuple[HostSlots, ...]:
        """The hosts and slots that are not barred."""
        free = [(h.hostname, [s for s in range(h.slots) if not self.is_barred(h.hostname, s, now)]) for h in hosts]
        return tuple(HostSlots(name, tuple(slots)) for name, slots in free if slots)

    def is_host_barred(self, host: str, now: float) -> bool:
        return self._out((host, None), now)

    def next_return(self, now: float) -> float | None:
        """When the next place comes back; None: none ever does."""
        times = [until for until in self._until.values() if until is not None and until > now]
        return min(times, default=None)

    def _out(self, place: Place, now: float) -> bool:
        if place not in self._until:
            return False
        until = self._until[place]
        return until is None or now < until
