"""The estimator for LightningModules. Re-exports only."""

from hora.requirements import missing_extra as _missing_extra

try:
    from hora.spark.lightning.estimator import TorchEstimator, TorchModel
except ModuleNotFoundError as error:
    raise _missing_extra(error, "horovod.spark.lightning", "spark,lightning") from error

__all__ = ["TorchEstimator", "TorchModel"]
