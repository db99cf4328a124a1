"""Keras 2 on TensorFlow, and Keras 3 on torch, with the same optimizer and callbacks."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch

if importlib.util.find_spec("keras") is None:
    pytest.skip("needs Keras: make test-tensorflow", allow_module_level=True)

LEGACY = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
TORCH = {"KERAS_BACKEND": "torch"}
TENSORFLOW = {"KERAS_BACKEND": "tensorflow", "TF_CPP_MIN_LOG_LEVEL": "3"}


def data(rank, rows=8):
    rng = np.random.default_rng(rank)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32")


def network(keras, seed):
    keras.utils.set_random_seed(seed)
    layers = keras.layers
    return keras.Sequential([layers.Input((4,)), layers.Dense(3, "relu"), layers.Dense(1)])


def session(hvd, body):
    hvd.init()
    try:
        body()
        hvd.barrier()
    finally:
        hvd.shutdown()


def assert_alike(hvd, model):
    mine = [np.array(w) for w in model.get_weights()]
    for theirs in hvd.allgather_object(mine):
        for a, b in zip(mine, theirs, strict=True):
            np.testing.assert_array_equal(a, b)


def trains_like_one_process(hvd, keras, passes=1, average=False):
    """Two ranks with half of every batch each equal one process with whole batches."""
    alone, model = network(keras, 0), network(keras, 0)
    alone.compile(optimizer=keras.optimizers.SGD(0.1, momentum=0.5), loss="mse")
    parts = [data(rank, rows=16) for rank in range(hvd.size())]
    for start in range(0, 16, 4 * passes):
        x, y = (np.concatenate([part[k][start : start + 4 * passes] for part in parts]) for k in (0, 1))
        alone.train_on_batch(x, y)
    optimizer = hvd.DistributedOptimizer(
        keras.optimizers.SGD(0.1, momentum=0.5), backward_passes_per_step=passes, average_aggregated_gradients=average
    )
    model.compile(optimizer=optimizer, loss="mse")
    x, y = parts[hvd.rank()]
    model.fit(x, y, batch_size=4, epochs=1, shuffle=False, verbose=0)
    assert_alike(hvd, model)
    for found, expected in zip(model.get_weights(), alone.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert int(optimizer.iterations.numpy()) == 4


def fits_with_callbacks(hvd, keras, folder):
    model = network(keras, seed=hvd.rank())
    model.compile(optimizer=hvd.DistributedOptimizer(keras.optimizers.Adam(0.01)), loss="mse", metrics=["mae"])
    x, y = data(hvd.rank(), rows=16)
    callbacks = [
        hvd.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd.callbacks.MetricAverageCallback(),
        hvd.callbacks.LearningRateWarmupCallback(0.01, warmup_epochs=1),
    ]
    history = model.fit(x, y, batch_size=4, epochs=3, verbose=0, callbacks=callbacks)
    assert_alike(hvd, model)
    assert all(np.isfinite(history.history["loss"]))
    path = f"{folder}/{hvd.rank()}.keras"
    model.save(path)
    loaded = hvd.load_model(path)
    assert int(loaded.optimizer.iterations.numpy()) == 12
    loaded.fit(x, y, batch_size=4, epochs=1, verbose=0)
    assert_alike(hvd, loaded)
    state = hvd.elastic.KerasState(loaded, epoch=hvd.rank())
    state.sync()
    before = [np.array(w) for w in loaded.get_weights()]
    loaded.fit(x, y, batch_size=4, epochs=1, verbose=0)
    state.restore()
    assert state.epoch == 0
    for a, b in zip(before, loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(a, b)


def leaves_a_step_out_everywhere(hvd, keras):
    """Rank 1 has non-finite gradients, so all ranks skip the step."""
    model = network(keras, 0)
    model.dtype_policy = keras.DTypePolicy("mixed_float16")
    optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss="mse")
    assert isinstance(model.optimizer, keras.optimizers.LossScaleOptimizer)
    x, y = data(hvd.rank())
    for number, labels in enumerate((y, np.full_like(y, np.inf if hvd.rank() == 1 else 0.0), y, y)):
        model.train_on_batch(x, labels)
        assert int(optimizer.iterations.numpy()) == (number if number else 1)
        assert_alike(hvd, model)
        assert all(np.isfinite(weight).all() for weight in model.get_weights())


def loss_scales_alike(hvd, keras):
    """Test both orders of wrapping and both kinds of Keras 2 optimizers, whose iterations count every call."""
    scaled = keras.mixed_precision.LossScaleOptimizer
    x, y = data(hvd.rank())
    bad = np.full_like(y, np.inf if hvd.rank() == 1 else 0.0)
    for kind in (keras.optimizers.SGD, keras.optimizers.legacy.SGD):
        for wrap in (
            lambda plain: scaled(hvd.DistributedOptimizer(plain)),
            lambda plain: hvd.DistributedOptimizer(scaled(plain)),
        ):
            model = network(keras, 0)
            model.compile(optimizer=wrap(kind(0.01)), loss="mse")
            model.train_on_batch(x, y)
            before = model.get_weights()
            model.train_on_batch(x, bad)
            for a, b in zip(before, model.get_weights(), strict=True):
                np.testing.assert_array_equal(a, b)
            assert float(model.optimizer.loss_scale) == 2.0**14
            model.train_on_batch(x, y)
            assert_alike(hvd, model)
            assert not np.array_equal(before[0], model.get_weights()[0])
    several = scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), backward_passes_per_step=2))
    model.compile(optimizer=several, loss="mse", run_eagerly=True)
    with pytest.raises(ValueError, match="wrap the LossScaleOptimizer itself"):
        model.train_on_batch(x, y)


def reduces_when_it_computes(hvd, tf):
    """Gradients computed by a Keras 2 optimizer are reduced once, not again when they are applied."""
    size, rank = hvd.size(), hvd.rank()
    everything = sum(range(1, size + 1))
    for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        for passes in (1, 2):
            optimizer = hvd.DistributedOptimizer(kind(1.0), op=hvd.Sum, backward_passes_per_step=passes)
            assert (optimizer._agg_helper is None) == (passes == 1)
            weight = tf.Variable([0.0])
            for call in range(1, 2 * passes + 1):
                with tf.GradientTape() as tape:
                    loss = weight[0] * (rank + 1)
                pairs = optimizer._compute_gradients(loss, [weight], tape=tape)
                if call % passes == 0:
                    np.testing.assert_allclose(pairs[0][0], [passes * everything])
                optimizer.apply_gradients(pairs)
                np.testing.assert_allclose(weight, [-float(call // passes * passes * everything)])
            optimizer.apply_gradients([(tf.constant([0.0]), weight)] * 1)
            assert int(optimizer.iterations) == 2 * passes + 1


def with_corrected_momentum(weights, rates, gradient_of, *, momentum, nesterov):
    """Return the weights after one update for each rate, whose momentum is times new / old rate in its batch."""
    velocity, old = np.zeros_like(weights), rates[0][0]
    for batch, (_, new) in enumerate(rates):
        corrected = momentum if new is None else momentum * new / old
        old = new or old
        gradient = gradient_of(weights, batch)
        velocity = corrected * velocity - old * gradient
        weights = weights + (corrected * velocity - old * gradient if nesterov else velocity)
    return weights


def corrects_the_momentum(hvd, keras, optimizer_class, *, nesterov=False, scaled=False):
    """The callbacks multiply the momentum in every batch, also in a step that an earlier fit has compiled."""
    epochs, steps, rate, momentum = 3, 4, 0.05, 0.9
    x = [np.random.default_rng(rank).normal(size=(4 * steps, 3)).astype("float32") for rank in range(hvd.size())]
    y = [part.sum(1, keepdims=True) for part in x]

    def gradient_of(weights, batch):
        rows = slice(batch % steps * 4, batch % steps * 4 + 4)
        parts = [part[rows].T @ (part[rows] @ weights - labels[rows]) for part, labels in zip(x, y, strict=True)]
        return sum(parts) / 2 / hvd.size()

    size, callbacks = hvd.size(), hvd.callbacks
    warmup = [1 / size * ((e + (b + 1) / steps) * (size - 1) / 2 + 1) for e in range(2) for b in range(steps)]
    halved = [0.5**e if b == 0 else None for e in range(epochs) for b in range(steps)]
    for factors, callback in (
        (warmup + [None] * steps, callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2)),
        (halved, callbacks.LearningRateScheduleCallback(rate, lambda epoch: 0.5**epoch)),
    ):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.layers.Input((3,)), keras.layers.Dense(1, use_bias=False)])
        optimizer = hvd.DistributedOptimizer(optimizer_class(rate, momentum=momentum, nesterov=nesterov))
        if scaled:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1.0)
        model.compile(optimizer, "mse")
        mine = {"x": x[hvd.rank()], "y": y[hvd.rank()], "batch_size": 4, "shuffle": False, "verbose": 0}
        model.fit(**mine, epochs=1)
        variables = model.optimizer.variables
        for variable in variables() if callable(variables) else variables:
            name = getattr(variable, "path", variable.name)
            if "moment" in name or "/m/" in name:
                variable.assign(np.zeros(variable.shape, "float32"))
        before = model.get_weights()[0].astype("float64")
        model.fit(**mine, epochs=epochs, callbacks=[callback])
        rates = [(rate, None if factor is None else rate * factor) for factor in factors]
        expected = with_corrected_momentum(before, rates, gradient_of, momentum=momentum, nesterov=nesterov)
        np.testing.assert_allclose(model.get_weights()[0], expected, rtol=1e-4, atol=1e-5)
        assert_alike(hvd, model)
        inner = getattr(model.optimizer, "inner_optimizer", model.optimizer)
        np.testing.assert_allclose(float(np.array(inner.get_config()["momentum"])), momentum, rtol=1e-6)


def keeps_a_begun_step(hvd, keras, optimizer_class):
    """A state has the passes since the last step: restored, they are not lost and not added twice."""
    batches = [data(10 * hvd.rank() + number) for number in range(6)]

    def compiled():
        model = network(keras, 0)
        plain = optimizer_class(0.1, momentum=0.5)
        model.compile(optimizer=hvd.DistributedOptimizer(plain, backward_passes_per_step=3), loss="mse")
        return model

    unharmed, model = compiled(), compiled()
    for x, y in batches:
        unharmed.train_on_batch(x, y)
    model.train_on_batch(*batches[0])
    state = hvd.elastic.KerasState(model, batch=1)
    for number in (1, 2, 3):  # the last of these begins the next step
        model.train_on_batch(*batches[number])
    state.restore()
    for x, y in batches[1:]:
        model.train_on_batch(x, y)
    for found, expected in zip(model.get_weights(), unharmed.get_weights(), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    newcomer = compiled()  # rank 1 joins in the middle of a step
    if hvd.rank() == 0:
        newcomer.train_on_batch(*batches[0])
    hvd.elastic.KerasState(newcomer, batch=1).sync()
    before = newcomer.get_weights()
    newcomer.train_on_batch(*batches[1])
    np.testing.assert_array_equal(newcomer.get_weights()[0], before[0])
    newcomer.train_on_batch(*batches[2])
    assert_alike(hvd, newcomer)
    assert not np.array_equal(newcomer.get_weights()[0], before[0])


def keeps_hyperparameters(hvd, keras, optimizer_class):
    """A state has the learning rate and the momentum: both go back with it, and rank 0's reach a rank that joins."""

    def numbers():
        values = model.optimizer.learning_rate, model.optimizer.momentum
        return [float(np.array(value.numpy() if hasattr(value, "numpy") else value)) for value in values]

    model = network(keras, 0)
    model.compile(optimizer=hvd.DistributedOptimizer(optimizer_class(0.5, momentum=0.75)), loss="mse")
    state = hvd.elastic.KerasState(model)
    model.optimizer.learning_rate, model.optimizer.momentum = 0.25, 0.5
    state.restore()
    assert numbers() == [0.5, 0.75]
    model.optimizer.learning_rate, model.optimizer.momentum = 0.25 / 2 ** hvd.rank(), 0.5 / 2 ** hvd.rank()
    state.sync()
    assert numbers() == [0.25, 0.5]


def keeps_the_loss_scale(hvd, keras, scaled):
    """A state has the scale of the loss."""
    model = network(keras, 0)
    model.compile(optimizer=scaled(hvd.DistributedOptimizer(keras.optimizers.SGD(0.01))), loss="mse")
    x, y = data(hvd.rank())
    model.train_on_batch(x, y)
    state = hvd.elastic.KerasState(model)

    def scale():
        found = getattr(model.optimizer, "loss_scale", None)
        return float(np.array(found if found is not None else model.optimizer.dynamic_scale.numpy()))

    before = scale()
    model.train_on_batch(x, np.full_like(y, np.inf))
    assert scale() == before / 2
    state.restore()
    assert scale() == before


def notices_drift(hvd, keras):
    """Ranks that part in the middle of a training are named: another learning rate, other weights."""
    import logging

    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("hora").addHandler(handler)

    def train(what, passes=1, **options):
        said.clear()
        model = network(keras, 0)
        optimizer = hvd.DistributedOptimizer(
            keras.optimizers.SGD(0.01), backward_passes_per_step=passes, average_aggregated_gradients=True, **options
        )
        model.compile(optimizer=optimizer, loss="mse")
        for number in range(20 * passes):
            model.train_on_batch(*data(hvd.rank()))
            if number == 5 * passes and hvd.rank() == 1 and what == "learning rate":
                optimizer.learning_rate = 0.001
            elif number == 5 * passes and hvd.rank() == 1:
                model.layers[0].set_weights([weight + 1 for weight in model.layers[0].get_weights()])

    try:
        for what, passes in (("learning rate", 1), ("weights", 1), ("weights", 2)):
            train(what, passes)
            if hvd.rank() == 0:
                (text,) = said
                assert "rank 1" in text
                assert (what == "learning rate") == ("learning rate" in text), text
            assert hvd.rank() == 0 or not said
        with pytest.raises(Exception, match="drifted apart") as caught:
            train("weights", on_drift="error" if hvd.rank() == 0 else "warn")
        assert "rank 1" in str(caught.value)
        train("weights", on_drift="ignore")
        assert not said
        with pytest.raises(ValueError, match="on_drift must be one of warn, error, ignore"):
            hvd.DistributedOptimizer(keras.optimizers.SGD(0.01), on_drift="raise")
    finally:
        logging.getLogger("hora").removeHandler(handler)


def keeps_what_it_remembers(hvd, keras, *optimizer_classes):
    for optimizer_class in optimizer_classes:
        keeps_a_begun_step(hvd, keras, optimizer_class)
        keeps_hyperparameters(hvd, keras, optimizer_class)
        corrects_the_momentum(hvd, keras, optimizer_class)
        corrects_the_momentum(hvd, keras, optimizer_class, nesterov=True)


def reduces_before_it_applies_aggregated_gradients(hvd, tf):
    """Keras 2.2 and later apply with experimental_aggregate_gradients=False what they computed with the optimizer."""
    for kind in (tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD):
        for kwargs in ({}, {"experimental_aggregate_gradients": False}):
            for apart in (False, True):
                applied = passes_of_four(hvd, tf, kind(1.0), kwargs, apart)
                step = (hvd.size() + 1) / 2
                assert applied == [0.0, 0.0, 0.0, step, step, step, step, 2 * step, 2 * step], (kind, kwargs, apart)


def passes_of_four(hvd, tf, plain, kwargs, apart):
    """Return the variable after each of nine passes; `apart`: only the updates are in a function, traced once."""
    optimizer = hvd.DistributedOptimizer(plain, backward_passes_per_step=4, average_aggregated_gradients=True)
    variable = tf.Variable([0.0])

    def computed():
        return [g for g, _ in optimizer._compute_gradients(lambda: -variable * (hvd.rank() + 1.0), var_list=[variable])]

    def applied(gradients):
        optimizer.apply_gradients(zip(gradients, [variable], strict=True), **kwargs)

    apply, together = tf.function(applied), tf.function(lambda: applied(computed()))
    found = []
    for _ in range(9):
        apply(computed()) if apart else together()
        found.append(float(variable.numpy()[0]))
    assert int(optimizer.iterations) == 9
    return found


def is_known_to_wrappers(hvd, tf):
    """TensorFlow Recommenders Addons looks for `horovod._keras` in the text of an optimizer, and registers tables as
    local variables in a function around `_compute_gradients`, which Keras 2 calls with `var_list`."""
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(1.0))
    assert "horovod._keras" in str(optimizer)
    assert type(optimizer).__module__ == tf.keras.optimizers.legacy.SGD.__module__
    shared, table = tf.Variable([0.0]), tf.Variable([0.0])
    compute = optimizer._compute_gradients

    def registering(*args, **kwargs):
        assert any(variable is table for variable in kwargs["var_list"])
        optimizer.register_local_var(table)
        return compute(*args, **kwargs)

    optimizer._compute_gradients = registering
    rank, size = hvd.rank(), hvd.size()
    optimizer.minimize(lambda: (shared[0] + table[0]) * (rank + 1), [shared, table])
    np.testing.assert_allclose(shared, [-(size + 1) / 2])
    np.testing.assert_allclose(table, [-(rank + 1) / size])


def trains_in_a_session(hvd, tf):
    """Train a Keras 2 model in a graph of tf.compat.v1: its optimizer, the broadcast and the learning rate schedule."""
    from tf_keras.src import backend

    with tf.Graph().as_default(), pytest.raises(ValueError, match=r"legacy\.SGD"):
        hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.01))
    with tf.Graph().as_default(), tf.compat.v1.Session() as running:
        backend.set_session(running)
        model = tf.keras.Sequential([tf.keras.layers.Dense(1, input_shape=(3,), kernel_initializer="ones")])
        model.compile(optimizer=hvd.DistributedOptimizer(tf.keras.optimizers.legacy.SGD(0.01)), loss="mse")
        data = np.random.default_rng(hvd.rank()).normal(size=(16, 3))
        callbacks = [
            hvd.callbacks.BroadcastGlobalVariablesCallback(0),
            hvd.callbacks.LearningRateScheduleCallback(0.01, lambda epoch: 0.5**epoch),
        ]
        model.fit(data, data.sum(1) * 2, batch_size=4, epochs=2, callbacks=callbacks, verbose=0)
        weights = model.get_weights()
        for found in hvd.allgather_object(weights):
            for mine, theirs in zip(weights, found, strict=True):
                np.testing.assert_array_equal(mine, theirs)
        assert not np.array_equal(weights[0], np.ones((3, 1)))
        np.testing.assert_allclose(backend.get_value(model.optimizer.lr), 0.005, rtol=1e-6)
        model.layers[0].set_weights([np.full((3, 1), float(hvd.rank())), np.zeros(1)])
        hvd.broadcast_global_variables(hvd.size() - 1)
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), hvd.size() - 1.0))
        state = hvd.elastic.TensorFlowKerasState(model, epoch=3)
        model.layers[0].set_weights([np.zeros((3, 1)), np.zeros(1)])
        state.restore()
        np.testing.assert_array_equal(model.get_weights()[0], np.full((3, 1), hvd.size() - 1.0))
        backend.set_session(None)


def normalises_alike(hvd, tf):
    import horovod.tensorflow

    x_all = np.concatenate([data(rank)[0] for rank in range(hvd.size())])
    layer, plain = horovod.tensorflow.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    expected = plain(x_all, training=True)
    rows = slice(8 * hvd.rank(), 8 * hvd.rank() + 8)
    np.testing.assert_allclose(layer(x_all[rows], training=True), expected[rows], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)
    layer, plain = horovod.tensorflow.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    images = np.reshape(x_all, (len(x_all), 1, 1, -1))
    plain(images, training=True)
    layer(images[rows], training=True)
    np.testing.assert_allclose(layer.moving_mean, plain.moving_mean, rtol=1e-5)


@pytest.mark.ranks(2, env=LEGACY)
def test_keras_2():
    pytest.importorskip("tf_keras", reason="needs tf_keras")
    import keras
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    def body():
        import tempfile

        assert tf.keras.__name__ != "keras"
        trains_like_one_process(hvd, tf.keras)
        trains_like_one_process(hvd, tf.keras, passes=2, average=True)
        with tempfile.TemporaryDirectory() as folder:
            fits_with_callbacks(hvd, tf.keras, folder)
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))
        of_keras_3 = network(keras, 0).trainable_variables[0]
        with pytest.raises(ValueError, match=f"rank {hvd.rank()}.*Keras 3"):
            optimizer.apply_gradients([(tf.ones(of_keras_3.shape), of_keras_3)])
        with pytest.raises(
            ValueError, match=f"rank {hvd.rank()}: the model is of Keras 3 and the optimizer of Keras 2"
        ):
            hvd.elastic.KerasState(network(keras, 0), optimizer)
        loss_scales_alike(hvd, tf.keras)
        normalises_alike(hvd, tf)
        reduces_when_it_computes(hvd, tf)
        is_known_to_wrappers(hvd, tf)
        trains_in_a_session(hvd, tf)

    session(hvd, body)


@pytest.mark.ranks(2, env=LEGACY)
def test_keras_2_between_two_steps():
    pytest.importorskip("tf_keras", reason="needs tf_keras")
    import tensorflow as tf

    import horovod.tensorflow.keras as hvd

    def body():
        keeps_what_it_remembers(hvd, tf.keras, tf.keras.optimizers.SGD, tf.keras.optimizers.legacy.SGD)
        keeps_the_loss_scale(hvd, tf.keras, tf.keras.mixed_precision.LossScaleOptimizer)
        notices_drift(hvd, tf.keras)
        reduces_before_it_applies_aggregated_gradients(hvd, tf)

    session(hvd, body)


@pytest.mark.ranks(2, env=TENSORFLOW)
def test_keras_3_on_tensorflow_between_two_steps():
    pytest.importorskip("tensorflow", reason="needs TensorFlow")
    import keras

    import horovod.keras as hvd

    def body():
        keeps_what_it_remembers(hvd, keras, keras.optimizers.SGD)
        corrects_the_momentum(hvd, keras, keras.optimizers.SGD, scaled=True)
        keeps_the_loss_scale(hvd, keras, keras.optimizers.LossScaleOptimizer)
        notices_drift(hvd, keras)

    session(hvd, body)


@pytest.mark.ranks(2, env=TORCH)
def test_keras_3_on_torch_between_two_steps():
    import keras

    import horovod.keras as hvd

    def body():
        keeps_what_it_remembers(hvd, keras, keras.optimizers.SGD)
        keeps_the_loss_scale(hvd, keras, keras.optimizers.LossScaleOptimizer)
        notices_drift(hvd, keras)

    session(hvd, body)


@pytest.mark.ranks(2, env=TORCH)
def test_keras_3_on_torch():
    import sys

    import keras

    import horovod.keras as hvd

    def body():
        import tempfile

        assert keras.backend.backend() == "torch"
        trains_like_one_process(hvd, keras)
        trains_like_one_process(hvd, keras, passes=2, average=True)
        with tempfile.TemporaryDirectory() as folder:
            fits_with_callbacks(hvd, keras, folder)
        leaves_a_step_out_everywhere(hvd, keras)
        variables = [keras.Variable(1.0), keras.Variable(1.0)]
        optimizer = hvd.DistributedOptimizer(keras.optimizers.SGD(1.0), backward_passes_per_step=2)
        for second in (torch.ones(()), None, None, torch.ones(())):
            optimizer.apply([torch.ones(()), second], variables)
        assert [float(v.value) for v in variables] == [-3.0, -1.0]
        assert hvd.allreduce(torch.ones(2), average=False).tolist() == [2.0, 2.0]
        assert "hora.tensorflow" not in sys.modules

    session(hvd, body)


@pytest.mark.ranks(1, env={"KERAS_BACKEND": "jax"})
def test_jax_is_rejected_with_an_explanation():
    from types import SimpleNamespace
    from unittest import mock

    from hora.keras.optimizer import keras_backend

    fake = SimpleNamespace(backend=SimpleNamespace(backend=lambda: "jax"))
    with mock.patch.dict("sys.modules", keras=fake), pytest.raises(ValueError, match="KERAS_BACKEND=torch"):
        keras_backend()
