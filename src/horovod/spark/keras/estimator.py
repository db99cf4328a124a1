"""The estimator under its old module name. Re-exports only."""

from hora.spark.keras.estimator import KerasEstimator
from hora.spark.keras.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
