"""The estimator under its old module name. Re-exports only."""

from hora.spark.estimator.base import EstimatorParams
from hora.spark.estimator.persistence import ParamsReadable as TorchEstimatorParamsReadable
from hora.spark.estimator.persistence import ParamsReader as TorchEstimatorParamsReader
from hora.spark.estimator.persistence import ParamsWritable as TorchEstimatorParamsWritable
from hora.spark.estimator.persistence import ParamsWriter as TorchEstimatorParamsWriter
from hora.spark.estimator.persistence import serialize_param as _torch_param_serialize
from hora.spark.lightning.estimator import TorchEstimator, TorchModel
from hora.spark.lightning.package import MIN_PL_VERSION

__all__ = ["MIN_PL_VERSION", "EstimatorParams", "TorchEstimator", "TorchModel"]
