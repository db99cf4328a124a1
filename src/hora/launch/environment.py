"""The environment of this process, for `hora.launch` and the rooms above it: read and changed here and nowhere else.

What the variables mean is not known here; who asks is given all of them, or a mapping in a test. Supervisors and probes
import this and start fast, so it imports nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["replace_variables", "set_missing", "variables"]


def variables() -> dict[str, str]:
    """A copy of what this process has now."""
    return dict(os.environ)


def replace_variables(env: Mapping[str, str]) -> None:
    """Have exactly these from now on: what a forked worker does in place of exec."""
    os.environ.clear()
    os.environ.update(env)


def set_missing(env: Mapping[str, str]) -> None:
    """Set those of these that are not set."""
    for name, value in env.items():
        os.environ.setdefault(name, value)
