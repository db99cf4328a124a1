"""What a data module of the torch estimator is. Re-exports only."""

from hora.spark.estimator.data_module import DataModule

__all__ = ["DataModule"]
