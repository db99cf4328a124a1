"""`run` and `run_elastic` under their older module name. Re-exports only."""

from hora.spark.run import run, run_elastic

__all__ = ["run", "run_elastic"]
