"""Images per second on random data: `horovodrun -np 2 python examples/tensorflow_synthetic.py --model MobileNetV2`

Any model of `tf.keras.applications`; `--fp16-allreduce` sends gradients as half precision. Rank 0 reports the mean and
the spread over all ranks.
"""

import argparse
import timeit

import numpy as np
import tensorflow as tf

import horovod.tensorflow as hvd

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="MobileNetV2")
parser.add_argument("--image-size", type=int, default=96)
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=1)
parser.add_argument("--num-batches-per-iter", type=int, default=2)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--fp16-allreduce", action="store_true")
options = parser.parse_args()

hvd.init()
shape = (options.image_size, options.image_size, 3)
model = getattr(tf.keras.applications, options.model)(weights=None, input_shape=shape)
optimizer = tf.keras.optimizers.SGD(0.01)
images = tf.random.uniform([options.batch_size, *shape])
labels = tf.random.uniform([options.batch_size], maxval=1000, dtype=tf.int64)
compression = hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none


@tf.function
def step(first: bool) -> None:
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.keras.losses.sparse_categorical_crossentropy(labels, model(images, training=True)))
    tape = hvd.DistributedGradientTape(tape, compression=compression)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    if first:
        hvd.broadcast_variables(model.variables, root_rank=0)
        hvd.broadcast_variables(optimizer.variables, root_rank=0)


step(first=True)
timeit.timeit(lambda: step(first=False), number=options.num_warmup_batches)
rates = []
for _ in range(options.num_iters):
    seconds = timeit.timeit(lambda: step(first=False), number=options.num_batches_per_iter)
    rates.append(options.batch_size * options.num_batches_per_iter / seconds)
everybody = np.array(hvd.allgather_object(rates))
if hvd.rank() == 0:
    mean, spread = everybody.mean(), 1.96 * everybody.std()
    print(f"Img/sec per rank: {mean:.1f} +-{spread:.1f}")
    print(f"Total img/sec on {hvd.size()} ranks: {hvd.size() * mean:.1f} +-{hvd.size() * spread:.1f}")
