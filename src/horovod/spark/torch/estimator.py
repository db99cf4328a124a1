"""The estimator under its old module name. Re-exports only."""

from hora.spark.estimator.torch_estimator import TorchEstimator
from hora.spark.estimator.torch_model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
