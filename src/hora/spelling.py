"""Suggestions for misspelt words: options of commands, keys of a config file, variables, log levels."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import NoReturn


def did_you_mean(word: str, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return "; did you mean …?" with the closest word, or an empty text."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=cutoff)
    return f"; did you mean {close[0]}?" if close else ""


class Parser(argparse.ArgumentParser):
    """A parser of a command line whose error for an unknown option names the closest one."""

    def error(self, message: str) -> NoReturn:
        begin, _, words = message.partition("unrecognized arguments: ")
        if not begin and words:
            options = [text for action in self._actions for text in action.option_strings if text.startswith("--")]
            message += did_you_mean(words.split()[0].partition("=")[0], options)
        super().error(message)
