"""The old import name of HorovodRunner. Re-exports only."""

from __future__ import annotations

from hora.spark.runner import HorovodRunner

__version__ = "2.2.0+hora"

__all__ = ["HorovodRunner"]
