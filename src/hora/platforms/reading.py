"""Variables as numbers and texts; errors name the variable."""

from __future__ import annotations

from collections.abc import Mapping


def integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    """Return a variable as a number. Without a default it must be set: its partner variable is."""
    text = env.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set although its partner variable is; set both or neither")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, but it is {text!r}") from None


def text(env: Mapping[str, str], name: str, platform: str) -> str:
    if not env.get(name):
        raise ValueError(f"{name} is not set although other variables of {platform} are; set it, or use flags")
    return env[name]


def whole_number(env: Mapping[str, str], name: str, platform: str) -> int:
    found = text(env, name, platform)
    if not found.strip().isdecimal():
        raise ValueError(f"{name} must be a whole number, but it is {found!r} ({platform})")
    return int(found)


def gpus(env: Mapping[str, str], name: str) -> int | None:
    """Return the number of GPUs of this node, None if there are none."""
    text = env.get(name, "")
    return int(text) or None if text.isdecimal() else None
