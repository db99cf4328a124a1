"""Handwritten digits with a graph and a session: `horovodrun -np 2 python examples/tensorflow_graph.py`

A program in the style of TensorFlow 1: placeholders, an optimizer of `tf.compat.v1`, `MonitoredTrainingSession` with a
hook that broadcasts the variables, and checkpoints by rank 0.
"""

import argparse

import numpy as np
import tensorflow as tf
from sklearn.datasets import load_digits

import horovod.tensorflow as hvd

v1 = tf.compat.v1
v1.disable_v2_behavior()


def train(steps: int = 400, batch_size: int = 32, checkpoint: str | None = None) -> float:
    """Train on this rank's part of the digits; return the accuracy on the others, the mean over the ranks."""
    hvd.init()
    digits = load_digits()
    images, labels = digits.data.astype("float32") / 16.0, digits.target.astype("int32")
    mine = np.arange(hvd.rank(), 1500, hvd.size())

    x, y = v1.placeholder(tf.float32, [None, 64]), v1.placeholder(tf.int32, [None])
    hidden = tf.nn.relu(tf.matmul(x, v1.get_variable("kernel", [64, 32])) + v1.get_variable("bias", [32]))
    logits = tf.matmul(hidden, v1.get_variable("classes", [32, 10]))
    loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(y, logits))
    right = tf.reduce_mean(tf.cast(tf.equal(tf.argmax(logits, axis=1, output_type=tf.int32), y), tf.float32))
    accuracy = hvd.allreduce(right, name="accuracy")

    optimizer = hvd.DistributedOptimizer(v1.train.AdamOptimizer(0.005 * hvd.size()))
    gradients, variables = zip(*optimizer.compute_gradients(loss), strict=True)
    clipped, _ = tf.clip_by_global_norm(gradients, 5.0)  # clips reduced gradients, so equally on all ranks
    global_step = v1.train.get_or_create_global_step()
    update = optimizer.apply_gradients(zip(clipped, variables, strict=True), global_step=global_step)

    hooks = [hvd.BroadcastGlobalVariablesHook(0)]
    directory = checkpoint if hvd.rank() == 0 else None  # one rank saves
    batches = np.random.default_rng(hvd.rank())
    with v1.train.MonitoredTrainingSession(checkpoint_dir=directory, hooks=hooks, log_step_count_steps=None) as session:
        for number in range(steps // hvd.size()):
            batch = batches.choice(mine, batch_size)
            _, value = session.run([update, loss], {x: images[batch], y: labels[batch]})
            if number % 20 == 0 and hvd.rank() == 0:
                print(f"step {number}: loss {value:.3f}", flush=True)
        return float(session.run(accuracy, {x: images[1500:], y: labels[1500:]}))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="of all ranks together")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--checkpoint", help="the folder where rank 0 saves")
    options = parser.parse_args()
    found = train(options.steps, options.batch_size, options.checkpoint)
    if hvd.rank() == 0:
        print(f"{hvd.size()} ranks, accuracy {found:.3f}")
