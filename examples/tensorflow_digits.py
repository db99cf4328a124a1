"""Handwritten digits with a custom training loop: `horovodrun -np 2 python examples/tensorflow_digits.py --steps 200`

It uses `DistributedGradientTape` in a `tf.function`, broadcasts the variables after the first step, and lets rank 0
save a checkpoint and report.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd


def train(steps: int = 200, batch_size: int = 32, checkpoint: str | None = None) -> float:
    """Train on this rank's part of the digits; return the accuracy on the others, the mean over the ranks."""
    hvd.init()
    digits = load_digits()
    images, labels = (digits.images / 16.0).astype("float32")[..., np.newaxis], digits.target
    dataset = tf.data.Dataset.from_tensor_slices((images[:1500], labels[:1500])).shard(hvd.size(), hvd.rank())
    dataset = dataset.shuffle(1500, seed=hvd.rank()).repeat().batch(batch_size)

    model = tf.keras.Sequential(
        [
            tf.keras.layers.Input((8, 8, 1)),
            tf.keras.layers.Conv2D(16, 3, activation="relu"),
            tf.keras.layers.Flatten(),
            tf.keras.layers.Dense(10),
        ]
    )
    optimizer = tf.keras.optimizers.Adam(0.002 * hvd.size())

    @tf.function
    def step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = model(images, training=True)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
        tape = hvd.DistributedGradientTape(tape)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    for number, (x, y) in enumerate(dataset.take(steps // hvd.size())):
        loss = step(x, y)
        if number == 0:  # all variables exist now
            hvd.broadcast_variables(model.variables, root_rank=0)
            hvd.broadcast_variables(optimizer.variables, root_rank=0)
        if number % 20 == 0 and hvd.rank() == 0:
            print(f"step {number}: loss {float(loss):.3f}", flush=True)
    if checkpoint and hvd.rank() == 0:
        tf.train.Checkpoint(model=model).save(checkpoint)
    right = tf.equal(tf.argmax(model(images[1500:]), axis=1), labels[1500:])
    return float(hvd.allreduce(tf.reduce_mean(tf.cast(right, tf.float32))))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="of all ranks together")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", help="where rank 0 saves the model")
    options = parser.parse_args()
    accuracy = train(options.steps, options.batch_size, options.checkpoint)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, accuracy {accuracy:.3f}")
