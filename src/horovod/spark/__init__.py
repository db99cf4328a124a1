"""Horovod's own way to run a function on a Spark cluster. Re-exports only."""

from __future__ import annotations

from hora.spark_run import run

__all__ = ["run"]
