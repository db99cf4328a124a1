"""Horovod's callbacks for `tf.keras`; their methods are in `hora.keras.callbacks`."""

from __future__ import annotations

import tensorflow as tf

from hora.keras import callbacks as _methods


class BroadcastGlobalVariablesCallback(_methods.Broadcast, tf.keras.callbacks.Callback):
    __doc__ = _methods.Broadcast.__doc__


class MetricAverageCallback(_methods.MetricAverage, tf.keras.callbacks.Callback):
    __doc__ = _methods.MetricAverage.__doc__


class LearningRateScheduleCallback(_methods.LearningRateSchedule, tf.keras.callbacks.Callback):
    __doc__ = _methods.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(_methods.Warmup, tf.keras.callbacks.Callback):
    __doc__ = _methods.Warmup.__doc__


class BestModelCheckpoint(_methods.BestModel, tf.keras.callbacks.ModelCheckpoint):
    __doc__ = _methods.BestModel.__doc__
