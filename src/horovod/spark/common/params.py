"""The parameters of estimators and models. Re-exports only."""

from hora.spark.estimator.base import EstimatorParams, ModelParams

__all__ = ["EstimatorParams", "ModelParams"]
