"""The old location of `LogCallback`. Only accessing the name imports Keras, not importing this module."""

from __future__ import annotations

from typing import Any

from hora.legacy.keras_log import log_callback_class

__all__ = ["LogCallback"]  # noqa: F822 - made by __getattr__


def __getattr__(name: str) -> Any:
    if name == "LogCallback":
        return log_callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
