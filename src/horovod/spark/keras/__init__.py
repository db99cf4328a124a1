"""The estimator for Keras models. Re-exports only."""

from hora.spark.keras.estimator import KerasEstimator
from hora.spark.keras.model import KerasModel

__all__ = ["KerasEstimator", "KerasModel"]
