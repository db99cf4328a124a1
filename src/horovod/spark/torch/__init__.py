"""The estimator for torch models. Re-exports only."""

from hora.spark.estimator.torch_estimator import TorchEstimator
from hora.spark.estimator.torch_model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
