"""Horovod's functions for running on a Spark cluster. Re-exports only."""

from __future__ import annotations

from hora.spark.run import run, run_elastic

__all__ = ["run", "run_elastic"]
