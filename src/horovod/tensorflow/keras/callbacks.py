"""Horovod's callbacks for `tf.keras`; their methods are in `hora.keras.callbacks`."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from hora.keras import callbacks as _methods


class BroadcastGlobalVariablesCallback(_methods.Broadcast, tf.keras.callbacks.Callback):
    __doc__ = _methods.Broadcast.__doc__


class MetricAverageCallback(_methods.MetricAverage, tf.keras.callbacks.Callback):
    __doc__ = _methods.MetricAverage.__doc__


class LearningRateScheduleCallback(_methods.Schedule, tf.keras.callbacks.Callback):
    __doc__ = _methods.Schedule.__doc__


class LearningRateWarmupCallback(_methods.Warmup, tf.keras.callbacks.Callback):
    __doc__ = _methods.Warmup.__doc__


class BestModelCheckpoint(_methods.BestModel, tf.keras.callbacks.ModelCheckpoint):
    __doc__ = _methods.BestModel.__doc__

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: Any = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        super().__init__(
            "best.keras" if not save_weights_only else "best.weights.h5",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath = None
