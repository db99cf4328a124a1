"""Saving and loading what has parameters. Re-exports only."""

from hora.spark.estimator.persistence import ParamsReader as HorovodParamsReader
from hora.spark.estimator.persistence import ParamsWriter as HorovodParamsWriter

__all__ = ["HorovodParamsReader", "HorovodParamsWriter"]
