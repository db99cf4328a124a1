"""The old import name: `import horovod.tensorflow as hvd`. Everything lives in `hora.tensorflow` and `hora.keras`."""

from __future__ import annotations

from typing import Any

from hora.requirements import missing_extra as _missing_extra

try:
    from tensorflow import executing_eagerly as _executing_eagerly
except ModuleNotFoundError as error:
    raise _missing_extra(error, "horovod.tensorflow", "tensorflow") from error
from hora.keras import tensorflow_names
from hora.keras.tensorflow_names import DistributedOptimizer, PartialDistributedOptimizer
from hora.tensorflow import *
from hora.tensorflow import __all__ as _names
from hora.tensorflow.gradients import DistributedGradientTape, PartialDistributedGradientTape
from horovod.tensorflow import compression, elastic, functions, mpi_ops, util  # type: ignore[attr-defined]

__all__ = [
    *_names,
    "DistributedGradientTape",
    "DistributedOptimizer",
    "PartialDistributedGradientTape",
    "PartialDistributedOptimizer",
    "compression",
    "elastic",
    "functions",
    "mpi_ops",
    "util",
]


def __getattr__(name: str) -> Any:
    if name == "SyncBatchNormalization":
        return tensorflow_names.SyncBatchNormalization
    if name == "keras":
        import horovod.tensorflow.keras

        return horovod.tensorflow.keras
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
