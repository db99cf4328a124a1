"""Spark settings under Horovod's names. Re-exports only."""

from hora.launch.spark.conf import *
