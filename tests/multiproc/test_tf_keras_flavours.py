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
