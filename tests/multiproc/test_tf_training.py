"""Tapes, optimizers, callbacks and states of horovod.tensorflow and its keras (Keras 3 on TensorFlow)."""

from __future__ import annotations

import pytest

pytest.importorskip("tensorflow", reason="needs TensorFlow: make test-tensorflow")

import contextlib
import logging

import numpy as np
import tensorflow as tf
from tf_session import check, raises, session

import horovod.tensorflow as hvd
import horovod.tensorflow.keras as hvd_keras

pytestmark = pytest.mark.ranks(2)


def network(units=3, seed=0):
    tf.keras.utils.set_random_seed(seed)
    return tf.keras.Sequential([tf.keras.layers.Input((4,)), tf.keras.layers.Dense(units), tf.keras.layers.Dense(1)])


def data(rank, rows=8):
    rng = np.random.default_rng(rank)
    return rng.normal(size=(rows, 4)).astype("float32"), rng.normal(size=(rows, 1)).astype("float32")


def loss_of(model, x, y):
    return tf.reduce_mean((model(x, training=True) - y) ** 2)


def reference(model, passes=1):
    """Return the mean over the ranks of the gradients on their data."""
    found = []
    for rank in range(hvd.size()):
        with tf.GradientTape() as tape:
            loss = loss_of(model, *data(rank))
        found.append([g.numpy() for g in tape.gradient(loss, model.trainable_variables)])
    return [np.mean(parts, axis=0) for parts in zip(*found, strict=True)]


def weights(model):
    return [variable.numpy().copy() for variable in model.trainable_variables]


def assert_close(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def assert_same_everywhere(model):
    for other in hvd.allgather_object(weights(model)):
        for a, b in zip(weights(model), other, strict=True):
            np.testing.assert_array_equal(a, b)


@session
def test_a_tape_averages_eagerly_and_in_a_function():
    model = network()
    x, y = data(hvd.rank())

    def gradients(**options):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        tape = hvd.DistributedGradientTape(tape, **options)
        assert isinstance(tape, tf.GradientTape)
        return tape.gradient(loss, model.trainable_variables)

    expected = reference(model)
    groups = [model.trainable_variables[:2], model.trainable_variables[2:3]]
    for options in ({}, {"groups": 2}, {"groups": groups}, {"gradient_predivide_factor": 2.0}):
        assert_close(gradients(**options), expected)
        assert_close(tf.function(lambda o=options: gradients(**o))(), expected)
    halves = gradients(compression=hvd.Compression.fp16)
    for a, b in zip(halves, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-2, atol=2e-2)
    assert_close(gradients(op=hvd.Sum), [g * hvd.size() for g in expected])
    with raises(ValueError, "gradient_predivide_factor", "average"):
        gradients(op=hvd.Sum, gradient_predivide_factor=2.0)
    with raises(ValueError, "once", f"rank {hvd.rank()}"):
        hvd.DistributedGradientTape(hvd.DistributedGradientTape(tf.GradientTape()))


@session
def test_local_sources_and_sparse_gradients():
    table = tf.Variable(tf.ones([4, 2]))
    local = tf.Variable(2.0)

    def gradients(sparse_as_dense, scale):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.gather(table, [hvd.rank(), 3])) + local * 4.0
        tape = hvd.DistributedGradientTape(tape, sparse_as_dense=sparse_as_dense, scale_local_gradients=scale)
        tape.register_local_source(local)
        return tape.gradient(loss, [table, local])

    expected = np.zeros((4, 2))
    for rank in range(hvd.size()):
        expected[[rank, 3]] += 1 / hvd.size()
    for run in (gradients, tf.function(gradients)):
        for dense in (False, True):
            sparse, of_local = run(dense, True)
            assert isinstance(sparse, tf.IndexedSlices) is not dense
            check(tf.convert_to_tensor(sparse), expected, tf.float32)
            check(of_local, np.array(4.0 / hvd.size()), tf.float32)
        assert float(run(True, False)[1]) == 4.0


@session
def test_local_and_global_gradients_are_told_apart():
    shared, local = tf.Variable(1.0), tf.Variable(2.0)
    with tf.GradientTape() as tape:
        loss = shared * (hvd.rank() + 1.0) + local * (hvd.rank() + 1.0)
    tape = hvd.PartialDistributedGradientTape(tape)
    tape.register_local_source(local)
    of_local, of_shared = tape.get_local_and_global_gradients(loss, [shared, local], use_generic_names=True)
    assert of_local[0][0] is local
    assert float(of_local[0][1]) == (hvd.rank() + 1) / hvd.size()
    assert [(source is shared, float(gradient)) for source, gradient in of_shared] == [(True, (hvd.size() + 1) / 2)]


def eager_loop(step, number, rows):
    for _ in range(number):
        step(rows)


def function_loop(step, number, rows):
    compiled = tf.function(step)
    for _ in range(number):
        compiled(rows)


def loop_in_a_function(step, number, rows):
    @tf.function
    def run(times):
        for _ in tf.range(times):
            step(rows)

    run(tf.constant(number))


@contextlib.contextmanager
def heard():
    """Yield the list of Hora's warnings on this rank."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("hora").addHandler(handler)
    try:
        yield texts
    finally:
        logging.getLogger("hora").removeHandler(handler)


@session
def test_ranks_that_drift_apart_under_a_tape_are_named():
    """The ranks compare the variables of a tape: eagerly, in a function, and in a loop inside of one."""
    rows = tf.constant(data(hvd.rank())[0])

    def training(local=False, **options):
        model = network()

        def step(x):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            tape = hvd.DistributedGradientTape(tape, **options)
            if local:
                tape.register_local_source(model.trainable_variables[0])
            for variable, gradient in zip(
                model.trainable_variables, tape.gradient(loss, model.trainable_variables), strict=True
            ):
                variable.assign_sub(0.01 * gradient)

        def change():
            if hvd.rank() == 1:
                model.trainable_variables[0].assign_add(tf.ones([4, 3]))

        return step, change

    for loop in (eager_loop, function_loop, loop_in_a_function):
        step, change = training()
        other, _ = training()  # of another model, which stays the same

        def both(x, step=step, other=other):
            step(x)
            other(x)

        with heard() as texts:
            loop(both, 20, rows)
            assert not texts, (loop.__name__, texts)
            change()
            loop(both, 50, rows)
        assert len(texts) == (hvd.rank() == 0), (loop.__name__, texts)
        for text in texts:
            assert "drifted apart" in text, text
            assert "dense/kernel (variable 1 of 4)" in text, text
            assert "on rank 1" in text, text
            assert "hvd.broadcast_variables" in text, text
        for choice in ({"on_drift": "ignore"}, {"local": True}):
            step, change = training(**choice)
            change()
            with heard() as texts:
                loop(step, 10, rows)
            assert not texts, (loop.__name__, choice, texts)
        step, change = training(on_drift="error")
        change()
        with raises((ValueError, tf.errors.InvalidArgumentError), "drifted apart", "rank 1"):
            loop(step, 10, rows)
    with raises(ValueError, "on_drift", "'raise'"):
        hvd.DistributedGradientTape(tf.GradientTape(), on_drift="raise")


@session
def test_ranks_that_drift_apart_under_an_optimizer_of_version_1_are_named():
    """Another learning rate that is a number, and other variables."""
    rows = tf.constant(data(hvd.rank())[0])
    for what in ("learning rate", "parameter"):
        for compiled in (False, True):
            weights, bias = tf.Variable(tf.ones([4, 1]), name="weights"), tf.Variable(0.5, name="bias")
            rate = 0.01 if hvd.rank() == 0 or what == "parameter" else 0.02
            optimizer = hvd.DistributedOptimizer(tf.compat.v1.train.MomentumOptimizer(rate, 0.9))

            def step(weights=weights, bias=bias, optimizer=optimizer):
                optimizer.minimize(lambda: tf.reduce_mean((rows @ weights + bias) ** 2), var_list=[weights, bias])

            if what == "parameter" and hvd.rank() == 1:
                bias.assign(2.0)
            run = tf.function(step) if compiled else step
            with heard() as texts:
                for _ in range(10):
                    run()
            assert len(texts) == (hvd.rank() == 0), (what, compiled, texts)
            assert all("drifted apart" in text and what in text and "on rank 1" in text for text in texts), texts


@session
def test_small_gradients_of_two_models_in_functions_of_one_name():
    """The gradients are sent in one tensor; a rank that traces its function again stays in step with the others."""

    def training(model, op):
        @tf.function
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(model, x, y)
            return hvd.DistributedGradientTape(tape, op=op).gradient(loss, model.trainable_variables)

        return step

    models = [network(units=3), network(units=5)]
    steps = [training(model, hvd.Average) for model in models]
    x, y = data(hvd.rank())
    for number in range(4):
        if number == 2 and hvd.rank() == 1:
            x, y = np.concatenate([x, x]), np.concatenate([y, y])
        for model, step in zip(models, steps, strict=True):
            assert_close(step(tf.constant(x), tf.constant(y)), reference(model))
    assert [step.experimental_get_tracing_count() for step in steps] == [1 + hvd.rank()] * 2
    expected = hvd.grouped_allreduce([tf.constant(g) for g in own_gradients(models[0])], op=hvd.Adasum)
    for _ in range(2):
        assert_close(training(models[0], hvd.Adasum)(*data(hvd.rank())), expected)


def own_gradients(model):
    with tf.GradientTape() as tape:
        loss = loss_of(model, *data(hvd.rank()))
    return [gradient.numpy() for gradient in tape.gradient(loss, model.trainable_variables)]


@session
def test_mismatched_shapes_are_an_error_even_if_the_sizes_agree():
    variable = tf.Variable(tf.ones([2, 3] if hvd.rank() == 1 else [3, 2]))
    other = tf.Variable(tf.ones([2]))

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(variable) + tf.reduce_sum(other)
        return hvd.DistributedGradientTape(tape).gradient(loss, [variable, other])

    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        step()


@session
def test_autograph_leaves_no_file_and_tracebacks_show_its_code():
    import tempfile
    import traceback
    from pathlib import Path
    from unittest import mock

    @tf.function
    def step(x):
        if tf.reduce_sum(x) > 0:
            x = hvd.allreduce(x)
            raise ValueError("on purpose")
        return x

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(tempfile, "tempdir", folder):
        with pytest.raises(ValueError, match="on purpose") as caught:
            step(tf.ones(2))
        assert [str(path) for path in Path(folder).iterdir()] == []
    lines = traceback.format_exception(caught.value)
    assert any("__autograph_generated_file" in line and "if_body" in line and "raise" in line for line in lines)


@session
def test_many_buckets_in_a_function_and_a_failing_step():
    variables = [tf.Variable(tf.ones([700_000])) for _ in range(5)]

    @tf.function
    def step(limit):
        with tf.GradientTape() as tape:
            loss = tf.add_n([tf.reduce_sum(v) * float(i + 1) for i, v in enumerate(variables)]) * float(hvd.rank() + 1)
        gradients = hvd.DistributedGradientTape(tape).gradient(loss, variables)
        tf.debugging.assert_less(loss, limit)
        return [gradient[0] for gradient in gradients]

    mean = (hvd.size() + 1) / 2
    with pytest.raises(tf.errors.InvalidArgumentError):
        step(0.0)
    for _ in range(2):
        assert [float(value) for value in step(1e12)] == [(i + 1) * mean for i in range(5)]


@session
def test_an_optimizer_reduces_in_fit_and_keeps_its_class_and_state():
    for steps_per_execution in (1, 2):
        model = network(seed=hvd.rank())
        hvd.broadcast_variables(model.variables, root_rank=0)
        expected = [w - 0.1 * g for w, g in zip(weights(model), reference(model), strict=True)]
        optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1, name="mine"))
        assert isinstance(optimizer, tf.keras.optimizers.SGD)
        assert type(optimizer).__name__ == "SGD"
        model.compile(optimizer=optimizer, loss="mse", steps_per_execution=steps_per_execution)
        x, y = data(hvd.rank())
        model.fit(x, y, batch_size=8, epochs=1, verbose=0, shuffle=False)
        assert_close(weights(model), expected)
        assert int(optimizer.iterations) == 1
    with raises(ValueError, "once", f"rank {hvd.rank()}"):
        hvd.DistributedOptimizer(optimizer)
    config = optimizer.get_config()
    for copy in (optimizer.from_config(config), type(optimizer).from_config(config)):
        assert copy.get_config() == config
        variable = tf.keras.Variable(np.zeros(1, np.float32))
        copy.apply([tf.fill([1], float(hvd.rank()))], [variable])
        check(variable.value, np.array([-0.1 * (hvd.size() - 1) / 2]), tf.float32)
    with raises(ValueError, "tf.compat.v1", "horovod.tensorflow"):
        hvd_keras.DistributedOptimizer(tf.compat.v1.train.GradientDescentOptimizer(0.1))


@session
def test_the_state_of_a_wrapped_optimizer_is_kept():
    model = network()
    plain = tf.keras.optimizers.Adam(0.01)
    plain.apply([tf.ones_like(v) for v in model.trainable_variables], model.trainable_variables)
    before = [v.numpy() for v in plain.variables]
    wrapped = hvd_keras.DistributedOptimizer(plain)
    assert_close([v.numpy() for v in wrapped.variables], before)


@session
def test_backward_passes_per_step():
    for average in (False, True):
        for compiled in (False, True):
            model = network()
            expected = [
                w - 0.1 * g * (1 if average else 2) for w, g in zip(weights(model), reference(model), strict=True)
            ]
            optimizer = hvd_keras.DistributedOptimizer(
                tf.keras.optimizers.SGD(0.1), backward_passes_per_step=2, average_aggregated_gradients=average
            )

            def step(x, y, model=model, optimizer=optimizer):
                with tf.GradientTape() as tape:
                    loss = loss_of(model, x, y)
                optimizer.apply_gradients(
                    zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
                )

            run = tf.function(step) if compiled else step
            before = weights(model)
            x, y = (tf.constant(part) for part in data(hvd.rank()))
            run(x, y)
            assert_close(weights(model), before)
            run(x, y)
            assert_close(weights(model), expected)
            assert int(optimizer.iterations) == 2
    with raises(ValueError, "backward_passes_per_step"):
        hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(), backward_passes_per_step=0)


@session
def test_gradients_missing_in_some_backward_passes():
    variables, one = [tf.Variable(1.0), tf.Variable(1.0)], tf.constant(1.0)
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(1.0), backward_passes_per_step=2)
    for second in (one, None, None, one):
        optimizer.apply([one, second], variables)
    assert [v.numpy() for v in variables] == [-3.0, -1.0]


@session
def test_local_layers_are_not_reduced():
    model = network()
    x, y = data(hvd.rank())
    optimizer = hvd_keras.PartialDistributedOptimizer(
        tf.keras.optimizers.SGD(0.1), local_layers=model.layers[0], scale_local_gradients=False
    )
    with tf.GradientTape() as tape:
        loss = loss_of(model, x, y)
    own = tape.gradient(loss, model.trainable_variables)
    mean = reference(model)
    expected = [w - 0.1 * g for w, g in zip(weights(model), [*own[:2], *mean[2:]], strict=True)]
    optimizer.apply_gradients(zip(own, model.trainable_variables, strict=True))
    assert_close(weights(model), expected)


@session
def test_fit_with_all_callbacks():
    model = network(seed=hvd.rank())
    rate = 0.1
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(rate, momentum=0.9))
    model.compile(optimizer=optimizer, loss="mse", metrics=["mae"])
    seen = []

    class Watch(tf.keras.callbacks.Callback):
        def on_train_batch_begin(self, batch, logs=None):
            seen.append(float(self.model.optimizer.learning_rate.numpy()))

        def on_epoch_end(self, epoch, logs=None):
            seen.append(dict(logs))

    x, y = data(hvd.rank(), rows=16)
    callbacks = [
        hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0),
        hvd_keras.callbacks.MetricAverageCallback(),
        hvd_keras.callbacks.LearningRateWarmupCallback(rate, warmup_epochs=2, verbose=1),
        hvd_keras.callbacks.LearningRateScheduleCallback(rate, multiplier=0.5, start_epoch=2),
        Watch(),
    ]
    model.fit(x, y, batch_size=4, epochs=4, verbose=0, callbacks=callbacks)
    assert_same_everywhere(model)
    rates = [value for value in seen if isinstance(value, float)]
    n = hvd.size()
    warmup = [rate / n * ((e + 1 / 4 + b / 4) * (n - 1) / 2 + 1) for e in range(2) for b in range(4)]
    np.testing.assert_allclose(rates, [*warmup, *[rate] * 4, *[rate / 2] * 4], rtol=1e-5)
    logs = [value for value in seen if isinstance(value, dict)]
    assert all(other == logs for other in hvd.allgather_object(logs))
    assert logs[-1]["lr"] == pytest.approx(rate / 2)
    with raises(ValueError, "steps_per_epoch"):
        callback = hvd_keras.callbacks.LearningRateWarmupCallback(0.1)
        callback.set_params({})
        callback.on_train_begin()


@session
def test_a_saved_model_loads_with_and_without_horovod():
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        for name in ("model.keras", "model.h5"):
            path = f"{folder}/{hvd.rank()}{name}"
            model = network()
            optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01))
            model.compile(optimizer=optimizer, loss=tf.keras.losses.MeanSquaredError())
            x, y = data(hvd.rank())
            model.fit(x, y, batch_size=4, epochs=1, verbose=0)
            model.save(path)
            plain = tf.keras.models.load_model(path)
            assert type(plain.optimizer) is tf.keras.optimizers.Adam
            loaded = hvd_keras.load_model(path)
            assert int(loaded.optimizer.iterations) == 2
            assert_close([v.numpy() for v in loaded.optimizer.variables], [v.numpy() for v in optimizer.variables])
            loaded.fit(x, y, batch_size=4, epochs=1, verbose=0)
            assert_same_everywhere(loaded)


@session
def test_values_of_every_kind():
    assert hvd_keras.allreduce(float(hvd.rank()), average=False) == sum(range(hvd.size()))
    np.testing.assert_array_equal(hvd_keras.allgather(np.array([hvd.rank()])), np.arange(hvd.size()))
    check(hvd_keras.broadcast(tf.constant([hvd.rank()]), 1), np.array([1]), tf.int32)
    assert hvd_keras.reducescatter(np.ones(hvd.size(), np.float32), op=hvd.Sum).tolist() == [hvd.size()]
    with raises(RuntimeError, "BroadcastGlobalVariablesCallback"):
        hvd_keras.broadcast_global_variables(0)


@session
def test_synchronized_batch_normalization():
    x_all = np.concatenate([data(rank)[0] for rank in range(hvd.size())])
    layer, plain = hvd.SyncBatchNormalization(), tf.keras.layers.BatchNormalization()
    expected = plain(x_all, training=True)
    rows = slice(8 * hvd.rank(), 8 * hvd.rank() + 8)
    for run in (layer, tf.function(layer)):
        check(run(tf.constant(x_all[rows]), training=True), expected[rows], tf.float32)
    with raises(ValueError, "fused"):
        hvd.SyncBatchNormalization(fused=True)


@session
def test_synchronized_batch_normalization_of_large_values():
    x_all = 1e4 + np.concatenate([data(rank)[0] for rank in range(hvd.size())])
    plain, layer = tf.keras.layers.BatchNormalization(), hvd.SyncBatchNormalization()
    expected = plain(x_all.astype(np.float64), training=True).numpy()
    mine = layer(tf.constant(x_all[8 * hvd.rank() : 8 * hvd.rank() + 8]), training=True).numpy()
    np.testing.assert_allclose(mine, expected[8 * hvd.rank() : 8 * hvd.rank() + 8], atol=2e-2)


@session
def test_synchronized_batch_normalization_ignores_masked_steps():
    steps = np.stack([data(rank)[0] for rank in range(hvd.size())])
    mask = np.stack([np.arange(8) < 8 - 3 * rank for rank in range(hvd.size())])
    plain, layer = tf.keras.layers.BatchNormalization(momentum=0.0), hvd.SyncBatchNormalization(momentum=0.0)
    plain(steps, training=True, mask=mask)
    for run in (layer, tf.function(layer)):
        run(tf.constant(steps[hvd.rank()][np.newaxis]), training=True, mask=mask[hvd.rank()][np.newaxis])
        assert_close([v.numpy() for v in layer.weights], [v.numpy() for v in plain.weights])


@session
def test_ranks_with_different_initial_weights_get_an_error():
    model = network(seed=hvd.rank())
    model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    x, y = data(hvd.rank(), rows=80)
    with pytest.raises(tf.errors.OpError, match="BroadcastGlobalVariablesCallback"):
        model.fit(x, y, batch_size=1, epochs=1, verbose=0)


@session
def test_ranks_with_different_models_get_an_error():
    model = network(units=3 + hvd.rank())
    model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):
        model.fit(*data(hvd.rank()), batch_size=4, epochs=1, verbose=0)


@session
def test_loss_scaling_skips_a_step_on_all_ranks_or_on_none():
    tf.keras.utils.set_random_seed(0)
    layers = [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(1)]
    model = tf.keras.Sequential(layers)
    model.dtype_policy = tf.keras.DTypePolicy("mixed_float16")
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01))
    model.compile(optimizer=optimizer, loss="mse")
    assert isinstance(model.optimizer, tf.keras.mixed_precision.LossScaleOptimizer)
    x, y = data(hvd.rank())
    model.train_on_batch(x, y)
    before = weights(model)
    bad = np.full_like(y, np.inf if hvd.rank() == 1 else 0.0)
    model.train_on_batch(x, bad)
    assert_close(weights(model), before)
    model.train_on_batch(x, y)
    assert int(optimizer.iterations) == 2
    assert_same_everywhere(model)


@session
def test_automatic_compilation_is_disabled_for_reduced_models():
    from unittest import mock

    gpu = mock.Mock(device_type="GPU")
    with mock.patch("tensorflow.config.list_physical_devices", return_value=[gpu]):
        model = network()
        model.compile(optimizer=tf.keras.optimizers.SGD(), loss="mse", jit_compile="auto")
        assert model.jit_compile
        model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD()), loss="mse")
        assert not model.jit_compile
    model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD()), loss="mse", jit_compile=True)
    with raises(ValueError, "jit_compile=False", f"rank {hvd.rank()}"):
        model.fit(*data(0), verbose=0)


@pytest.mark.ranks(2, env={"HORA_NAN_CHECK": "1"})
@session
def test_a_nan_gradient_is_named_before_its_reduction():
    from hora.telemetry.meters import meter

    model = network()
    optimizer = hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01))
    bad = [tf.fill(v.shape, np.nan) for v in model.trainable_variables]
    for run, kind in (
        (optimizer.apply, FloatingPointError),
        (tf.function(lambda *grads: optimizer.apply(grads, model.trainable_variables)), tf.errors.UnknownError),
    ):
        arguments = (bad, model.trainable_variables) if kind is FloatingPointError else bad
        with pytest.raises(kind, match=rf"kernel on rank {hvd.rank()} has 12 NaN"):
            run(*arguments)
    assert [event for event, _ in meter.pop_events()].count("nan") == 2


@session
def test_fit_reports_to_the_live_page():
    from hora.telemetry.meters import meter

    model = network()
    model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    steps, waited = meter.num_steps, meter.data_s
    callbacks = [hvd_keras.callbacks.BroadcastGlobalVariablesCallback(0), hvd_keras.callbacks.MetricAverageCallback()]
    model.fit(*data(hvd.rank()), batch_size=4, epochs=2, verbose=0, callbacks=callbacks)
    assert meter.num_steps - steps == meter.total_steps == 4
    assert meter.data_s > waited
    assert np.isfinite(meter.pop_metrics()["loss"])


@session
def test_a_state_is_saved_restored_and_synchronized():
    model = network(seed=hvd.rank())
    model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.Adam(0.01)), loss="mse")
    state = hvd_keras.elastic.KerasState(model, epoch=hvd.rank(), batch=5)
    state.sync()
    assert (state.epoch, state.batch) == (0, 5)
    assert_same_everywhere(model)
    before = weights(model)
    x, y = data(hvd.rank())
    model.fit(x, y, batch_size=4, epochs=1, verbose=0)
    state.epoch = 9
    state.restore()
    assert state.epoch == 0
    assert_close(weights(model), before)
    assert int(model.optimizer.iterations) == 0
    with raises(ValueError, "built"):
        hvd_keras.elastic.KerasState(tf.keras.Sequential([tf.keras.layers.Dense(1)]))
    variable = tf.Variable(float(hvd.rank()))
    plain = hvd.elastic.TensorFlowState([variable], step=3)
    plain.sync()
    assert float(variable) == 0.0


@session
def test_state_callbacks_continue_counting_after_resets():
    model = network()
    model.compile(optimizer=hvd_keras.DistributedOptimizer(tf.keras.optimizers.SGD(0.01)), loss="mse")
    state = hvd_keras.elastic.TensorFlowKerasState(model, epoch=1, batch=3)
    batches = []
    x, y = data(0, rows=20)

    class Count(tf.keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            batches.append((state.epoch, state.batch))

    elastic = hvd_keras.elastic
    callbacks = [
        Count(),
        elastic.CommitStateCallback(state, batches_per_commit=2),
        elastic.UpdateEpochStateCallback(state),
        elastic.UpdateBatchStateCallback(state),
    ]
    model.fit(x, y, batch_size=4, steps_per_epoch=5, epochs=2, verbose=0, callbacks=callbacks)
    assert (state.epoch, state.batch) == (3, 0)
    assert batches == [(1, 3), (1, 4), *[(2, b) for b in range(5)]]


@pytest.mark.ranks(3, lost=(1,))
def test_rank_1_dies_in_mid_step(place):
    import os
    import signal

    hvd.init()
    model = network()
    optimizer = hvd.DistributedOptimizer(tf.keras.optimizers.SGD(0.1))

    @tf.function
    def step(x, y):
        with tf.GradientTape() as tape:
            loss = loss_of(model, x, y)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

    def train():
        for _ in range(100):
            step(*data(hvd.rank()))
            if place.rank == 1 and int(optimizer.iterations) == 5:
                os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(hvd.HorovodInternalError, match="rank 1") as caught:
        train()
    assert isinstance(caught.value, tf.errors.UnknownError)
    hvd.shutdown()
