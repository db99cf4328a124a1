"""The estimator under its old module name. Re-exports only."""

from hora.spark.estimator.base import EstimatorParams
from hora.spark.estimator.persistence import ParamsReadable as TorchEstimatorParamsReadable
from hora.spark.estimator.persistence import ParamsReader as TorchEstimatorParamsReader
from hora.spark.estimator.persistence import ParamsWritable as TorchEstimatorParamsWritable
from hora.spark.estimator.persistence import ParamsWriter as TorchEstimatorParamsWriter
from hora.spark.estimator.persistence import serialize_param as _torch_param_serialize
from hora.spark.estimator.torch_estimator import TorchEstimator
from hora.spark.estimator.torch_model import TorchModel

__all__ = ["TorchEstimator", "TorchModel"]
