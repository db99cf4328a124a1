"""A rank's telemetry as it arrives: the one place where a member's words become typed values, within limits.

Text is printable and short, numbers are finite, lists have limits. Recordings are read by the same functions. What a
rank measures is in `sample` and `stacks`.
"""

from __future__ import annotations

import functools
import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from hora.logs import printable
from hora.telemetry.sample import MAX_EVENTS, MAX_METRICS, MAX_NAME, SAMPLE, VERSION, Report, Sample

MAX_REPORT_BYTES = 64 * 1024
MAX_RANKS = 4096
_MAX_BYTES = 1024 * 1024
_MAX_COUNT = 2**62
_MAX_TEXT, _MAX_FRAMES, _MAX_THREADS, _MAX_STACKS, _MAX_GPUS = 1000, 60, 32, 50, 16
_ORIGINS = ("user", "library", "engine")
# What a rank says about its host. Bytes, bytes a second, shares and counts.
_HOST = ("num_cpus", "cpu", "load", "net_in", "net_out", "link", "memory", "memory_total", "shm", "shm_total")
_GPU = ("busy", "memory", "memory_total")


class Frame(NamedTuple):
    """A frame of a rank's stack. `origin`: user, library or engine."""

    file: str
    line: int
    function: str
    code: str
    origin: str


Stack = tuple[Frame, ...]


class Stacks(NamedTuple):
    """Stacks of a rank's threads by name, the training thread first; the innermost frames first."""

    threads: tuple[tuple[str, Stack], ...]

    @property
    def text(self) -> str:
        """Return the training thread's stack as a traceback. A wait in a collective ends at the line that called it."""
        if not self.threads:
            return "  (no thread)"
        frames, lines = self.threads[0][1], []
        called_at = next((index for index, frame in enumerate(frames) if frame.origin == "user"), 0)
        for frame in reversed(frames[called_at if frames and frames[0].origin == "engine" else 0 :]):
            lines.append(f'  File "{frame.file}", line {frame.line}, in {frame.function}')
            if frame.code:
                lines.append(f"    {frame.code}")
        return "\n".join(lines)


class Profile(NamedTuple):
    """Stacks of a rank's training thread, with the number of samples in each."""

    num_samples: int
    seconds: float
    stacks: tuple[tuple[int, Stack], ...]


class Stall(NamedTuple):
    """The ranks for which a rank has waited for long."""

    ranks: tuple[int, ...]


class Here(NamedTuple):
    """The rank can be asked."""


class Committed(NamedTuple):
    """The rank has committed its state, as it was asked to tell."""


Telemetry = Here | Report | Stacks | Profile | Stall | Committed
T = TypeVar("T")


def _rejecting(parse: Callable[[bytes], T]) -> Callable[[bytes], T]:
    """Make a parser raise ValueError alone, also for values of other types."""

    @functools.wraps(parse)
    def checked(data: bytes) -> T:
        if len(data) > _MAX_BYTES:
            raise ValueError(f"a message of {len(data)} bytes is too long")
        try:
            return parse(data)
        except (struct.error, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ValueError(f"not what a rank sends: {error!r:.200}") from None

    return checked


@_rejecting
def parse_report(data: bytes) -> Report:
    """Return a rank's report. Raises ValueError."""
    if len(data) > MAX_REPORT_BYTES:
        raise ValueError(f"a report may have at most {MAX_REPORT_BYTES} bytes, but this one has {len(data)}")
    version, step, num_steps, *values = SAMPLE.unpack_from(data)
    rest = json.loads(data[SAMPLE.size :]) if len(data) > SAMPLE.size else {}
    if version != VERSION or not isinstance(rest, dict):
        raise ValueError(f"not a report: version {version}")
    return Report(
        Sample(min(step, _MAX_COUNT), num_steps, *map(_number, values)),
        _waiting(*rest["w"]) if rest.get("w") is not None else None,
        {_text(name, MAX_NAME): _float(value) for name, value in list(rest.get("m", {}).items())[:MAX_METRICS]},
        tuple((_text(kind, MAX_NAME), _text(text)) for kind, text in _list(rest.get("e", []), MAX_EVENTS)),
        _host(rest.get("h", {})),
        min(max(int(_number(rest.get("t", 0))), 0), _MAX_COUNT),
    )


@_rejecting
def parse_stacks(data: bytes) -> Stacks:
    """Return the stacks of a rank's threads. Raises ValueError."""
    threads = _list(json.loads(data)["threads"], _MAX_THREADS)
    return Stacks(tuple((_text(name, 100), _frames(frames)) for name, frames in threads))


@_rejecting
def parse_profile(data: bytes) -> Profile:
    """Return the profile of a rank's training thread. Raises ValueError."""
    news = json.loads(data)
    stacks = tuple((int(_number(count)), _frames(frames)) for count, frames in _list(news["stacks"], _MAX_STACKS))
    return Profile(int(_number(news["num_samples"])), float(_number(news["seconds"])), stacks)


@_rejecting
def parse_stall(data: bytes) -> Stall:
    """Return the ranks for which a rank waits. Raises ValueError."""
    return Stall(_ranks(json.loads(data)))


_PARSERS: Mapping[str, Callable[[bytes], Telemetry]] = {
    "here": lambda data: Here(),
    "report": parse_report,
    "stack": parse_stacks,
    "profile": parse_profile,
    "stall": parse_stall,
    "committed": lambda data: Committed(),
}


def parse(kind: str, data: bytes) -> Telemetry:
    """Return what a rank has sent under this kind. Raises ValueError."""
    if kind not in _PARSERS:
        raise ValueError(f"no telemetry is called {kind[:100]!r}")
    return _PARSERS[kind](data)


def _waiting(name: Any, waited_s: Any, ranks: Any) -> tuple[str, float, tuple[int, ...]]:
    return _text(name, MAX_NAME), float(_number(waited_s)), _ranks(ranks)


def _host(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a host: numbers by name, and a list of such for GPUs."""
    found: dict[str, Any] = {name: _number(facts[name]) for name in _HOST if name in facts}
    if gpus := _list(facts.get("gpus", []), _MAX_GPUS):
        found["gpus"] = [
            {"name": _text(gpu.get("name", ""), 60), **{name: _number(gpu.get(name, 0)) for name in _GPU}}
            for gpu in gpus
        ]
    return found


def _frames(frames: Any) -> Stack:
    """Return frames. Recordings of earlier versions do not tell the origin."""
    return tuple(
        Frame(
            _text(file, 300),
            int(_number(line)),
            _text(function, 200),
            _text(code, 300),
            origin[0] if origin and origin[0] in _ORIGINS else "user",
        )
        for file, line, function, code, *origin in _list(frames, _MAX_FRAMES)
    )


def _ranks(ranks: Any) -> tuple[int, ...]:
    found = _list(ranks, MAX_RANKS)
    if not all(type(rank) is int and 0 <= rank < _MAX_COUNT for rank in found):
        raise ValueError("not a list of ranks")
    return tuple(found)


def _list(value: Any, limit: int) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.50} is not a list")
    return value[:limit]


def _text(value: Any, limit: int = _MAX_TEXT) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.50} is not a text")
    return printable(value[:limit])


def _number(value: Any) -> float:
    """Return a quantity: a measurement below zero is none, and nothing is larger than what can be counted."""
    if type(value) not in (int, float) or not math.isfinite(value):
        raise ValueError(f"{value!r:.50} is not a quantity")
    number: float = min(max(value, 0), _MAX_COUNT)
    return number


def _float(value: Any) -> float:
    """Return a metric of the training, which may be infinite or NaN."""
    if type(value) not in (int, float):
        raise ValueError(f"{value!r:.50} is not a number")
    return float(value)
