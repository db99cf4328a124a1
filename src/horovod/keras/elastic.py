"""Elastic training for `keras`; states and methods are in `hora.keras.elastic`."""

import keras

from hora.keras import elastic as _methods
from hora.keras.callbacks import with_base as _with_base
from hora.keras.elastic import KerasState as KerasState
from hora.keras.elastic import TensorFlowKerasState as TensorFlowKerasState
from hora.keras.elastic import run as run

_callbacks = keras.callbacks
CommitStateCallback = _with_base(_methods.CommitStateCallback, _callbacks.Callback, __name__)
UpdateBatchStateCallback = _with_base(_methods.UpdateBatchStateCallback, _callbacks.Callback, __name__)
UpdateEpochStateCallback = _with_base(_methods.UpdateEpochStateCallback, _callbacks.Callback, __name__)
