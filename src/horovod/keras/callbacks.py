"""Horovod's callbacks for `keras`; their methods are in `hora.keras.callbacks`."""

from __future__ import annotations

import keras

from hora.keras import callbacks as _methods


class BroadcastGlobalVariablesCallback(_methods.Broadcast, keras.callbacks.Callback):
    __doc__ = _methods.Broadcast.__doc__


class MetricAverageCallback(_methods.MetricAverage, keras.callbacks.Callback):
    __doc__ = _methods.MetricAverage.__doc__


class LearningRateScheduleCallback(_methods.LearningRateSchedule, keras.callbacks.Callback):
    __doc__ = _methods.LearningRateSchedule.__doc__


class LearningRateWarmupCallback(_methods.Warmup, keras.callbacks.Callback):
    __doc__ = _methods.Warmup.__doc__


class BestModelCheckpoint(_methods.BestModel, keras.callbacks.ModelCheckpoint):
    __doc__ = _methods.BestModel.__doc__
