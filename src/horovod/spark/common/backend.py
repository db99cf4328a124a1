"""Backends under Horovod's name. Re-exports only."""

from hora.spark.estimator.backend import Backend, SparkBackend

__all__ = ["Backend", "SparkBackend"]
