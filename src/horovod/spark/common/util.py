"""Columns as Horovod describes them. Re-exports only."""

from hora.spark.estimator.metadata import *
from hora.spark.estimator.metadata import column_metadata as _get_metadata
from hora.spark.estimator.metadata import gpu_or_local_rank as _get_assigned_gpu_or_local_rank
from hora.spark.estimator.metadata import has_vector_column as _has_vector_column
