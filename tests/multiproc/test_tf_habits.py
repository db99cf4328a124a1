"""The column "Keras" of the matrix of habits: Keras 3 on TensorFlow, each row of `habits.py` against one process.

The single process trains on the batches of all ranks as one batch: the loss is a mean, so its gradient is
the mean of the ranks' gradients.
"""

from __future__ import annotations

import tempfile

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")

import numpy as np
import tensorflow as tf
from habits import ROWS, STEPS
from tensorflow import keras

import horovod.tensorflow.keras as hvd

pytestmark = pytest.mark.ranks(2)

# Rows that do not apply to Keras, with the reason.
MEANINGLESS = {
    "AddedGroup": "optimizers of Keras have no parameter groups",
    "Closures": "optimizers of Keras 3 take gradients, not closures",
    "HooksBefore": "variables of TensorFlow have no gradient hooks",
    "HooksAfter": "variables of TensorFlow have no gradient hooks",
    "PassesSetInTheMiddle": "the number of passes is part of the optimizer's graph",
    "GroupAddedInTheMiddle": "optimizers of Keras have no parameter groups",
    "StepHook": "optimizers of Keras have no step hooks",
    "ClearedInPlace": "gradients of TensorFlow are immutable",
    "GradientsGivenData": "gradients of TensorFlow are immutable",
    "Converted": "variables of TensorFlow keep their dtype",
    "SharedByTorch": "variables of TensorFlow cannot be shared between processes",
    "SentThroughAQueue": "variables of TensorFlow cannot be shared between processes",
}


class Plain:
    """The base row; others override parts of it. `refused`: words of the error that a row must raise."""

    dtype = "float32"
    refused: tuple[str, ...] = ()
    passes = 1  # backward passes per step
    is_jit_compiled = False

    def __init__(self, ranks):
        """`ranks`: the ranks whose batches are used; a single process gets all of them."""
        self.ranks, self.is_distributed = ranks, ranks == [hvd.rank()]
        keras.utils.set_random_seed(0)
        self.net = self.model()
        self.set_up()

    def model(self):
        sizes = [keras.layers.Dense(n, "tanh", dtype=self.dtype) for n in (80, 70)]
        return keras.Sequential([keras.layers.Input((6,)), *sizes, keras.layers.Dense(3, dtype=self.dtype)])

    def optimizer(self):
        return keras.optimizers.SGD(0.05, momentum=0.9)

    def wrapped(self, optimizer=None):
        optimizer = optimizer or self.optimizer()
        if not self.is_distributed:
            return optimizer
        passes = {"backward_passes_per_step": self.passes, "average_aggregated_gradients": self.passes > 1}
        return hvd.DistributedOptimizer(optimizer, **passes)

    def set_up(self):
        self.net.compile(self.wrapped(), "mse", jit_compile=self.is_jit_compiled)

    def batch(self, rank, number):
        inputs = np.random.default_rng([number, rank]).normal(size=(4, *self.net.input_shape[1:]))
        return inputs.astype("float32"), np.zeros((4, *self.net.output_shape[1:]), "float32")

    def batches(self, number):
        parts = [self.batch(rank, number) for rank in self.ranks]
        return [np.concatenate(part) for part in zip(*parts, strict=True)]

    def iterate(self, number):
        self.net.train_on_batch(*self.batches(number))

    def result(self):
        return [variable.numpy() for variable in self.net.variables]


class Accumulation(Plain):
    passes = 2

    def iterate(self, number):
        both = [self.batches(2 * number), self.batches(2 * number + 1)]
        whole = [[np.concatenate(part) for part in zip(*both, strict=True)]]
        for batch in both if self.is_distributed else whole:
            self.net.train_on_batch(*batch)


class Clipping(Plain):
    def optimizer(self):
        return keras.optimizers.SGD(0.05, momentum=0.9, global_clipnorm=0.05)


class ScalerInfinityEverywhere(Plain):
    bad = (0, 1)

    def set_up(self):
        self.net.compile(keras.optimizers.LossScaleOptimizer(self.wrapped(), initial_scale=1024.0), "mse")

    def batch(self, rank, number):
        inputs, targets = super().batch(rank, number)
        return inputs, targets + (np.inf if number == 3 and rank in self.bad else 0.0)

    def result(self):
        return [*super().result(), self.net.optimizer.dynamic_scale.numpy()]


class ScalerInfinityOnOneRank(ScalerInfinityEverywhere):
    bad = (1,)


class CheckpointAndResume(Plain):
    def iterate(self, number):
        if number == 3:
            with tempfile.TemporaryDirectory() as folder:
                self.net.save(f"{folder}/model.keras")
                load = hvd.load_model if self.is_distributed else keras.models.load_model
                self.net = load(f"{folder}/model.keras")
        super().iterate(number)


class FreezeAndThaw(Plain):
    """Keras requires a new `compile`, with a new optimizer, when the trainable variables change."""

    def iterate(self, number):
        if number in (0, 2, 4):
            self.net.layers[0].trainable = number > 0
            self.net.layers[1].trainable = number < 4
            self.set_up()
        super().iterate(number)


class TiedWeights(Plain):
    def model(self):
        layer, inputs = keras.layers.Dense(6, "tanh"), keras.layers.Input((6,))
        return keras.Model(inputs, layer(layer(inputs)))


class _HasUnused(keras.layers.Layer):
    def build(self, shape):
        self.used = self.add_weight(shape=shape[1:])
        self.unused = self.add_weight(shape=(7, 70))

    def call(self, inputs):
        return inputs * self.used


class UnusedParameters(Plain):
    def model(self):
        return keras.Sequential([keras.layers.Input((6,)), _HasUnused(), keras.layers.Dense(3)])


class RankDependentUse(Plain):
    """Uses a custom loop, because `fit` traces the model once."""

    refused = ("no gradient", "rank", "kernel")

    def model(self):
        return [keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(5)]) for _ in range(4)]

    def set_up(self):
        self.own = self.wrapped()

    def iterate(self, number):
        variables = [variable for net in self.net for variable in net.trainable_variables]
        with tf.GradientTape() as tape:
            losses = []
            for rank in self.ranks:
                inputs = np.random.default_rng([number, rank]).normal(size=(4, 6)).astype("float32")
                losses.append(tf.reduce_mean(self.net[(rank + number) % 4](inputs) ** 2))
            loss = tf.add_n(losses) / len(losses)
        self.own.apply(tape.gradient(loss, variables), variables)


class TwoOptimizers(Plain):
    def set_up(self):
        self.other = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(90)])
        first, second = self.wrapped(), self.wrapped(keras.optimizers.SGD(0.02))

        @tf.function
        def step(inputs):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(self.other(self.net(inputs)) ** 2)
            mine, others = tape.gradient(loss, [self.net.trainable_variables, self.other.trainable_variables])
            first.apply(mine, self.net.trainable_variables)
            second.apply(others, self.other.trainable_variables)

        self.step = step

    def iterate(self, number):
        self.step(tf.constant(self.batches(number)[0]))

    def result(self):
        return [*super().result(), *(variable.numpy() for variable in self.other.variables)]


class Complex(Plain):
    refused = ("complex64", "cannot carry")

    def set_up(self):
        self.own, self.weight = self.wrapped(), keras.Variable(tf.ones([3], tf.complex64), dtype="complex64")

    def iterate(self, number):
        self.own.apply([tf.ones([3], tf.complex64)], [self.weight])


class Float64(Plain):
    dtype = "float64"


class BFloat16(Plain):
    dtype = "bfloat16"


class _Scale(keras.layers.Layer):
    def build(self, shape):
        self.scale = self.add_weight(shape=(), initializer="ones")
        self.empty = self.add_weight(shape=(0, 4))

    def call(self, inputs):
        return inputs * self.scale + tf.reduce_sum(self.empty)


class ZeroDimensionalAndEmpty(Plain):
    def model(self):
        return keras.Sequential([keras.layers.Input((6,)), keras.layers.Dense(3), _Scale()])


class SparseGradients(Plain):
    def model(self):
        layers = [keras.layers.Embedding(50, 8), keras.layers.Flatten(), keras.layers.Dense(3)]
        return keras.Sequential([keras.layers.Input((3,), dtype="int32"), *layers])

    def batch(self, rank, number):
        inputs, targets = super().batch(rank, number)
        return np.random.default_rng([number, rank]).integers(0, 50, inputs.shape), targets


class ChannelsLast(Plain):
    def model(self):
        return keras.Sequential([keras.layers.Input((6, 6, 3)), keras.layers.Conv2D(8, 3), keras.layers.Conv2D(40, 3)])


class Compiled(Plain):
    is_jit_compiled = True
    refused = ("XLA", "jit_compile=False", "rank")


class ActivationCheckpointing(Plain):
    def model(self):
        with keras.RematScope(mode="full"):
            return super().model()

    def set_up(self):
        self.net.compile(self.wrapped(), "mse", run_eagerly=True)  # Keras's scope does not work inside tf.function


class ExponentialMovingAverage(Plain):
    def optimizer(self):
        return keras.optimizers.SGD(0.05, momentum=0.9, use_ema=True, ema_momentum=0.9)

    def result(self):
        return [*super().result(), *(variable.numpy() for variable in self.net.optimizer.variables)]


class Schedulers(Plain):
    def optimizer(self):
        return keras.optimizers.SGD(keras.optimizers.schedules.CosineDecay(0.1, STEPS), momentum=0.9)


class StateLoadedInTheMiddle(Accumulation):
    """The model's and the optimizer's variables, between two passes of a step."""

    def batches(self, number):
        if number == 7:
            optimizer = self.net.optimizer
            self.net.set_weights(self.net.get_weights())
            for variable in optimizer.variables:
                variable.assign(variable.numpy())
        return super().batches(number)


class SteppedTwice(Plain):
    """The same gradients, applied twice."""

    def set_up(self):
        self.own = self.wrapped()

    def gradients(self, number):
        inputs, targets = self.batches(number)
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((self.net(inputs) - targets) ** 2)
        return tape.gradient(loss, self.net.trainable_variables)

    def iterate(self, number):
        gradients = self.gradients(number)
        for _ in range(2):
            self.own.apply(gradients, self.net.trainable_variables)


class KeptGradients(SteppedTwice):
    """As PCGrad does: the gradients of two tasks, kept and combined."""

    def iterate(self, number):
        first, second = self.gradients(number), self.gradients(number + 100)
        combined = [one + 2 * other for one, other in zip(first, second, strict=True)]
        self.own.apply(combined, self.net.trainable_variables)


class MomentumSwitchedOn(Plain):
    """Keras reads the momentum when it builds a step: `compile` again with an optimizer that has one."""

    def optimizer(self):
        return keras.optimizers.SGD(0.05, momentum=0.9 if self.is_on else 0.0)

    is_on = False

    def iterate(self, number):
        if number == 2:
            self.is_on = True
            self.set_up()
        super().iterate(number)


class SchedulerMadeFirst(Plain):
    """A callback made with the plain optimizer sets the rate of the model's optimizer."""

    def iterate(self, number):
        self.net.optimizer.learning_rate = 0.05 * 0.5**number
        if number == 3:
            optimizer = self.net.optimizer
            for variable in optimizer.variables:
                variable.assign(variable.numpy())
        super().iterate(number)


class ParametersGivenData(Plain):
    """As clipping in a WGAN does."""

    def iterate(self, number):
        super().iterate(number)
        for variable in self.net.trainable_variables:
            variable.assign(tf.clip_by_value(variable, -0.2, 0.2))


class CellCalledTwice(Plain):
    """The cell of a notebook that makes the optimizer, and one that still holds the first one."""

    def iterate(self, number):
        if number in (2, 4):
            self.held = self.net.optimizer if number == 4 else None
            self.set_up()
        super().iterate(number)


CELLS = {row: globals()[row] for row in ROWS if row not in MEANINGLESS}
_TOLERANCES = {"float64": 1e-12, "bfloat16": 0.02}


@pytest.mark.parametrize("row", CELLS)
def test_keras(row):
    """Check that the row equals one process, or raises an error with an explanation."""
    hvd.init()
    try:
        compare(CELLS[row])
        hvd.barrier()
    finally:
        hvd.shutdown()


def compare(row):
    made, alone = row([hvd.rank()]), row(list(range(hvd.size())))
    if made.refused:
        with pytest.raises((ValueError, hvd.HorovodInternalError)) as caught:
            made.iterate(0)
        assert all(word in str(caught.value) for word in made.refused), str(caught.value)
        return
    for number in range(STEPS):
        made.iterate(number)
        alone.iterate(number)
    tolerance = _TOLERANCES.get(made.dtype, 1e-5)
    for mine, theirs in zip(made.result(), alone.result(), strict=True):
        np.testing.assert_allclose(mine.astype("float64"), theirs.astype("float64"), rtol=tolerance, atol=tolerance)
