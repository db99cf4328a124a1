"""The commands `hora` and `horovodrun`."""

from hora.cli.dispatch import main

__all__ = ["main"]
