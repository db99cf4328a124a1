"""Horovod's callbacks for `tf.keras`; their methods are in `hora.keras.callbacks`."""

import tensorflow as tf

from hora.keras import callbacks as _methods
from hora.keras.callbacks import with_base as _with_base

_callbacks = tf.keras.callbacks
BroadcastGlobalVariablesCallback = _with_base(_methods.BroadcastGlobalVariablesCallback, _callbacks.Callback, __name__)
MetricAverageCallback = _with_base(_methods.MetricAverageCallback, _callbacks.Callback, __name__)
LearningRateScheduleCallback = _with_base(_methods.LearningRateScheduleCallback, _callbacks.Callback, __name__)
LearningRateWarmupCallback = _with_base(_methods.LearningRateWarmupCallback, _callbacks.Callback, __name__)
BestModelCheckpoint = _with_base(_methods.BestModelCheckpoint, _callbacks.ModelCheckpoint, __name__)
