"""What all estimators and models are. Re-exports only."""

from hora.spark.estimator.base import HorovodEstimator, HorovodModel

__all__ = ["HorovodEstimator", "HorovodModel"]
