"""A small Keras training as a function for every launcher."""

from __future__ import annotations

from collections.abc import Callable


def keras_function() -> Callable[[float], tuple[int, list[float]]]:
    """Return a function that is pickled by value and does not need this module on the workers."""

    def train(rate):
        import numpy as np
        import tensorflow as tf

        import horovod.tensorflow.keras as hvd
        from sparkdl.horovod.tensorflow.keras import LogCallback

        hvd.init()
        tf.keras.utils.set_random_seed(0)  # so the first loss is that of each rank's own weights
        model = tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)])
        model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.SGD(rate * hvd.size())), loss="mse")
        x = np.random.default_rng(hvd.rank()).normal(size=(32, 4)).astype("float32")
        callbacks = [hvd.callbacks.BroadcastGlobalVariablesCallback(0), hvd.callbacks.MetricAverageCallback()]
        if hvd.rank() == 0 and hvd.size() > 1:
            callbacks.append(LogCallback())
        history = model.fit(x, x.sum(1, keepdims=True), epochs=2, callbacks=callbacks, verbose=0)
        return hvd.size(), history.history["loss"]

    return train
