"""The old import name: `import horovod.keras as hvd`, for `import keras` on TensorFlow or torch; see `hora.keras`."""

import functools

from hora.requirements import missing_extra as _missing_extra

try:
    import keras
except ModuleNotFoundError as error:
    raise _missing_extra(error, "horovod.keras", "tensorflow") from error
from hora.keras.names import *
from hora.keras.names import __all__ as _names
from hora.keras.optimizer import keras_backend
from hora.keras.optimizer import load_model as _load_model
from horovod.keras import callbacks, elastic

if keras_backend() == "torch":
    from hora.torch.compression import Compression
else:
    from hora.tensorflow.compression import Compression  # type: ignore[assignment]

__all__ = [*_names, "Compression", "callbacks", "elastic", "load_model"]

load_model = functools.partial(_load_model, keras)
