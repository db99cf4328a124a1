"""Handwritten digits with Keras on several ranks: `horovodrun -np 2 python examples/keras_digits.py --epochs 3`

The script of the Horovod documentation: `hvd.init`, a wrapped optimizer, three callbacks, and a report by rank 0.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow.keras as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=8)
parser.add_argument("--batch-size", type=int, default=32)
options = parser.parse_args()

hvd.init()
digits = load_digits()
images, labels = (digits.images / 16.0).astype("float32")[..., np.newaxis], digits.target
train = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shard(hvd.size(), hvd.rank())
train = train.shuffle(1500, seed=hvd.rank()).repeat().batch(options.batch_size)

model = tf.keras.Sequential(
    [
        tf.keras.layers.Input((8, 8, 1)),
        tf.keras.layers.Conv2D(16, 3, activation="relu"),
        tf.keras.layers.Flatten(),
        tf.keras.layers.Dense(64, activation="relu"),
        tf.keras.layers.Dense(10, activation="softmax"),
    ]
)
rate = 0.002 * hvd.size()
optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.Adam(rate))
model.compile(optimizer=optimizer, loss="sparse_categorical_crossentropy", metrics=["accuracy"])
callbacks = [
    hvd.callbacks.BroadcastGlobalVariablesCallback(0),
    hvd.callbacks.MetricAverageCallback(),
    hvd.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=1),
]
steps = 1500 // options.batch_size // hvd.size()
verbose = 2 if hvd.rank() == 0 else 0
model.fit(train, steps_per_epoch=steps, epochs=options.epochs, callbacks=callbacks, verbose=verbose)
if hvd.rank() == 0:
    _, accuracy = model.evaluate(images[1500:], labels[1500:], verbose=0)
    print(f"{hvd.size()} ranks, accuracy {accuracy:.3f}")
