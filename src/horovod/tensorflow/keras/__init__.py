"""The old import name: `import horovod.tensorflow.keras as hvd`, for `tf.keras`. Everything lives in `hora.keras`."""

import functools

import tensorflow as tf

from hora.keras.names import *
from hora.keras.names import __all__ as _names
from hora.keras.optimizer import load_model as _load_model
from hora.tensorflow.compression import Compression
from horovod.tensorflow.keras import callbacks, elastic

__all__ = [*_names, "Compression", "callbacks", "elastic", "load_model"]

load_model = functools.partial(_load_model, tf.keras)
