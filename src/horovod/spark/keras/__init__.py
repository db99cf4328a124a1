"""The estimator for Keras models. Re-exports only."""

from hora.requirements import missing_extra as _missing_extra

try:
    from hora.spark.keras.estimator import KerasEstimator
    from hora.spark.keras.model import KerasModel
except ModuleNotFoundError as error:
    raise _missing_extra(error, "horovod.spark.keras", "spark,tensorflow") from error

__all__ = ["KerasEstimator", "KerasModel"]
