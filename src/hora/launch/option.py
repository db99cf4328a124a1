"""A knob: how one launch option is set from outside, checked, and handed to the workers.

Not here: which knobs there are (`options`) and the parser made of them (`flags`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Knob", "check"]


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class Knob:
    """The outside of one field of `Options`.

    `off_flags` set a switch to False; `old_flags` are deprecated spellings with the value they set.
    `export_with` names the field that must be set for this one to be exported. `launch_variable` is read by
    the launcher itself when the flag is missing. `default` is what an unset knob means. `idle` says why a knob of
    Horovod's changes nothing here; it is accepted, checked and exported all the same.
    """

    flags: tuple[str, ...]
    kind: type
    section: str
    help: str | None = None  # None: not shown by --help
    idle: str = ""
    metavar: str | None = None
    off_flags: tuple[str, ...] = ()
    old_flags: tuple[tuple[str, bool], ...] = ()
    exclusive: str = ""
    yaml: str = ""
    yaml_negated: bool = False
    variable: str = ""
    to_variable: Callable[[Any], str] = _text
    export_with: str = ""
    launch_variable: str = ""
    default: Any = None
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    count: int | None = None  # how many values the flag takes, when not one

    @property
    def name(self) -> str:
        """The flag by which messages call it."""
        return self.flags[0] if self.flags[0] == "-np" else self.flags[-1]


def check(knob: Knob, value: Any, *, where: str = "") -> Any:
    """The value as the knob's type, or a ValueError that says what `where` (by default the flag) must be."""
    where = where or knob.name
    if knob.kind is frozenset:
        names = value.split(",") if isinstance(value, str) else value
        return frozenset(str(name).strip() for name in names if str(name).strip()) or None
    if knob.count is None:
        return _check_one(knob, value, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != knob.count:
        raise ValueError(f"{where} takes {knob.count} numbers, but it is {value!r}")
    return tuple(_check_one(knob, one, where) for one in value)


def _check_one(knob: Knob, value: Any, where: str) -> Any:
    value = _convert(knob, value, where)
    if knob.choices:
        value = value.upper()
        if value not in knob.choices:
            raise ValueError(f"{where} must be one of {', '.join(knob.choices)}, but it is {value!r}")
    if knob.low is not None and value < knob.low:
        raise ValueError(f"{where} must be at least {knob.low}, but it is {value}")
    if knob.high is not None and value > knob.high:
        raise ValueError(f"{where} must be at most {knob.high}, but it is {value}")
    return value


def _convert(knob: Knob, value: Any, where: str) -> Any:
    if knob.kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{where} must be true or false, but it is {value!r}")
    if knob.kind is str:
        if isinstance(value, (dict, list)):
            raise ValueError(f"{where} must be a text, but it is {value!r}")
        return str(value)
    fraction = knob.kind is int and isinstance(value, float) and not value.is_integer()
    try:
        if isinstance(value, bool) or fraction:
            raise ValueError
        number = knob.kind(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        word = "an integer" if knob.kind is int else "a number"
        raise ValueError(f"{where} must be {word}, but it is {value!r}") from None
