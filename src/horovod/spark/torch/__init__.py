"""The estimator for torch models. Re-exports only."""

from hora.requirements import missing_extra as _missing_extra

try:
    from hora.spark.estimator.torch_estimator import TorchEstimator
    from hora.spark.estimator.torch_model import TorchModel
except ModuleNotFoundError as error:
    raise _missing_extra(error, "horovod.spark.torch", "spark") from error

__all__ = ["TorchEstimator", "TorchModel"]
