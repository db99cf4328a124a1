"""Elastic training for `tf.keras`; states and methods are in `hora.keras.elastic`."""

from __future__ import annotations

import tensorflow as tf

from hora.keras import elastic as _methods
from hora.keras.elastic import KerasState, TensorFlowKerasState, run

__all__ = [
    "CommitStateCallback",
    "KerasState",
    "TensorFlowKerasState",
    "UpdateBatchStateCallback",
    "UpdateEpochStateCallback",
    "run",
]


class CommitStateCallback(_methods.CommitState, tf.keras.callbacks.Callback):
    __doc__ = _methods.CommitState.__doc__


class UpdateBatchStateCallback(_methods.UpdateBatchState, tf.keras.callbacks.Callback):
    __doc__ = _methods.UpdateBatchState.__doc__


class UpdateEpochStateCallback(_methods.UpdateEpochState, tf.keras.callbacks.Callback):
    __doc__ = _methods.UpdateEpochState.__doc__
