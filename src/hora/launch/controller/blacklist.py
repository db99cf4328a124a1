"""Places where workers failed, and for how long none is started there. Pure: clock and chance are given.

A place is a host, or one slot of a host where the job has no other host. Called by `elastic`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

__all__ = ["Blacklist"]

_Barred = tuple[str, int | None]  # a host, and one of its slots (None: the whole host)


class Blacklist:
    """`cooldown_range`: shortest and longest time out, in seconds; None: for ever. `chance`: uniform in [0, 1)."""

    def __init__(self, cooldown_range: tuple[int, int] | None, chance: Callable[[], float]) -> None:
        self._range, self._chance = cooldown_range, chance
        self._times: dict[_Barred, int] = {}
        self._until: dict[_Barred, float | None] = {}

    def bar(self, place: _Barred, now: float) -> float | None:
        """Bar a place; returns until when (None: for ever). Each time lasts about twice as long as the one before."""
        times = self._times[place] = self._times.get(place, 0) + 1
        self._until[place] = None if self._range is None else now + self._delay_s(*self._range, times)
        return self._until[place]

    def _delay_s(self, shortest: int, longest: int, times: int) -> float:
        doubled = shortest * 2.0 ** min(times, 64)
        return float(min(max(doubled + self._chance() * shortest, shortest), longest))

    def saved(self, now: float) -> list[list[Any]]:
        """The barred places, with how often and for how much longer, for another launcher."""
        left = {place: None if until is None else until - now for place, until in self._until.items()}
        return [[*place, self._times[place], left_s] for place, left_s in left.items()]

    def restore(self, saved: Sequence[Sequence[Any]], now: float) -> None:
        for host, slot, times, left_s in saved:
            self._times[host, slot] = times
            self._until[host, slot] = None if left_s is None else now + left_s

    def is_barred(self, host: str, slot: int, now: float) -> bool:
        return any(self._out((host, place), now) for place in (None, slot))

    def usable(self, hosts: Mapping[str, int], now: float) -> dict[str, tuple[int, ...]]:
        """The slots that are not barred, by host. `hosts`: how many slots each has."""
        free = {host: tuple(s for s in range(num) if not self.is_barred(host, s, now)) for host, num in hosts.items()}
        return {host: slots for host, slots in free.items() if slots}

    def is_host_barred(self, host: str, now: float) -> bool:
        return self._out((host, None), now)

    def next_return(self, now: float) -> float | None:
        """When the next place comes back; None: none ever does."""
        times = [until for until in self._until.values() if until is not None and until > now]
        return min(times, default=None)

    def _out(self, place: _Barred, now: float) -> bool:
        if place not in self._until:
            return False
        until = self._until[place]
        return until is None or now < until
