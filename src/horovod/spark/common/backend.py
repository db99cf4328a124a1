"""Backends under Horovod's name. Re-exports only."""

from hora.spark.estimator.base import Backend, SparkBackend, default_num_proc

__all__ = ["Backend", "SparkBackend", "default_num_proc"]
