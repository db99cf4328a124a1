"""The estimator for LightningModules. Re-exports only."""

from hora.spark.lightning.estimator import TorchEstimator, TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
