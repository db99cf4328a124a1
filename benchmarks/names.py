"""Parse lists of names on a benchmark's command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable


def some_of(known: Iterable[str]) -> Callable[[str], list[str]]:
    """Return the `type` of an argument that takes known names with commas between them, or `all`."""

    def parse(text: str) -> list[str]:
        names = list(known) if text == "all" else text.split(",")
        unknown = sorted(set(names) - set(known))
        if unknown:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; there are {', '.join(known)}")
        return names

    return parse
