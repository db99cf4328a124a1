"""Keras on a real standalone cluster: functions for the launchers, and `KerasEstimator` from data to predictions."""

from __future__ import annotations

import importlib
import importlib.util
import runpy
from pathlib import Path

import numpy as np
import pytest
from keras_function import keras_function

if importlib.util.find_spec("tensorflow") is None:
    pytest.skip("needs TensorFlow: make test-tensorflow", allow_module_level=True)

from pyspark.ml.linalg import DenseVector, Vectors

from horovod.spark.common.store import Store

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("by_value")]

X = np.random.default_rng(0).normal(size=(64, 2)).astype("float32")
Y = (X @ np.array([1.0, -2.0], dtype="float32") + 0.5).astype("float32")


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(Vectors.dense(x), float(y), int(y > 0)) for x, y in zip(X, Y, strict=True)]
    plain = spark.createDataFrame(rows, ["x", "y", "positive"])
    return plain.withColumns({"y": plain.y.cast("float"), "positive": plain.positive.cast("int")}).cache()


def estimator(store, package="keras", **more):
    from horovod.spark.keras import KerasEstimator

    keras = importlib.import_module(package)
    keras.utils.set_random_seed(0)
    given = {
        "num_proc": 2,
        "store": store,
        "model": keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)]),
        "optimizer": keras.optimizers.SGD(0.05),
        "loss": "mse",
        "metrics": ["mae"],
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 8,
        "epochs": 4,
        "validation": 0.25,
        "partitions_per_process": 1,
        "verbose": 0,
    }
    return KerasEstimator(**given | more)


@pytest.mark.parametrize("package", ["keras", "tf_keras"])  # Keras 3 and 2
def test_train_predict_save_and_resume(spark, frame, tmp_path, package):
    from horovod.spark.keras import KerasModel

    store = Store.create(str(tmp_path / "store"))
    first = estimator(store, package, epochs=2, run_id="run").fit(frame)
    model = estimator(store, package, epochs=6, run_id="run").fit(frame)
    history = model.getHistory()
    assert history["loss"][:2] == first.getHistory()["loss"]
    assert {name: len(values) for name, values in history.items()} == dict.fromkeys(
        ["loss", "mae", "val_loss", "val_mae"], 6
    )
    assert history["val_loss"][-1] < history["val_loss"][0]
    predicted = model.transform(frame).select("x", "y", "y__output").collect()
    expected = model.keras().predict_on_batch(np.array([row.x.toArray() for row in predicted], "float32"))
    np.testing.assert_allclose([row.y__output for row in predicted], expected[:, 0], rtol=1e-4)
    assert np.mean([(row.y - row.y__output) ** 2 for row in predicted]) < np.var(Y) / 4
    model.write().overwrite().save(str(tmp_path / "model"))
    loaded = KerasModel.load(str(tmp_path / "model"), trusted=True)
    again = [row.y__output for row in loaded.transform(frame).collect()]
    np.testing.assert_allclose(again, [row.y__output for row in predicted], rtol=1e-5)


def test_elastic_training_with_a_death_has_the_weights_of_an_undisturbed_one(frame, tmp_path):
    import keras

    from horovod.spark.common.backend import SparkBackend

    class Mortal(keras.callbacks.Callback):
        """Kills rank 1 after its third batch, once."""

        batches = 0

        def on_train_batch_end(self, batch, logs=None):
            import os
            import signal

            import horovod.torch as hvd

            self.batches += 1
            if hvd.rank() == 1 and self.batches == 3 and not os.path.exists(killed):
                open(killed, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)

    killed = str(tmp_path / "killed")
    found = []
    for more in (
        {},
        {"num_proc": None, "backend": SparkBackend(2, min_num_proc=2, verbose=0), "callbacks": [Mortal()]},
    ):
        store = Store.create(str(tmp_path / f"store{len(found)}"), save_runs=False)
        fitted = estimator(store, batch_size=64, epochs=6, validation=None, shuffle=False, **more).fit(frame)
        assert [len(losses) for losses in fitted.getHistory().values()] == [6, 6]
        found.append((fitted.getModel().get_weights(), fitted.getHistory()["loss"]))
    assert Path(killed).exists()
    for (weights, losses), (expected, wanted) in [found]:
        assert losses == pytest.approx(wanted, rel=1e-5)
        for array, other in zip(weights, expected, strict=True):
            np.testing.assert_allclose(array, other, rtol=1e-5)


def test_classes_with_an_own_callback(frame, tmp_path):
    import keras

    class Note(keras.callbacks.Callback):
        def __init__(self, path):
            super().__init__()
            self.path = path

        def on_train_end(self, logs=None):
            with open(self.path, "a") as notes:
                notes.write("done\n")

    model = estimator(
        Store.create(str(tmp_path / "store"), save_runs=False),
        model=keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(2, activation="softmax")]),
        loss=keras.losses.SparseCategoricalCrossentropy(),
        metrics=["accuracy"],
        label_cols=["positive"],
        validation=None,
        callbacks=[Note(str(tmp_path / "notes"))],
    ).fit(frame)
    assert (tmp_path / "notes").read_text() == "done\n" * 2
    row = model.transform(frame).first()
    assert isinstance(row.positive__output, DenseVector)
    assert sum(row.positive__output) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.usefixtures("spark")
def test_horovod_runner_and_spark_run_with_a_keras_function(capfd):
    import horovod.spark
    from sparkdl import HorovodRunner

    size, losses = HorovodRunner(np=2).run(keras_function(), rate=0.05)
    assert size == 2
    assert losses[1] < losses[0]
    assert "Epoch 1: loss=" in capfd.readouterr().out
    results = horovod.spark.run(keras_function(), args=(0.05,), num_proc=2)
    assert [found[0] for found in results] == [2, 2]
    assert results[0][1] == results[1][1]


@pytest.mark.usefixtures("spark")
def test_horovod_runner_with_a_training_loop_of_a_script():
    from sparkdl import HorovodRunner

    train = runpy.run_path(str(Path(__file__).parents[2] / "examples/tensorflow_digits.py"))["train"]
    assert HorovodRunner(np=2).run(train, steps=200) > 0.85


def test_without_shuffling_the_order_of_rows_does_not_depend_on_a_seed(frame, tmp_path):
    def weights(seed, shuffle):
        store = Store.create(str(tmp_path / "store"), save_runs=False)
        options = {"random_seed": seed, "shuffle": shuffle, "validation": None, "epochs": 1}
        return estimator(store, **options).fit(whole).keras().get_weights()[0]

    whole = frame.coalesce(1)  # Spark collects rows of several partitions in order of arrival
    plain = weights(1, False)
    np.testing.assert_array_equal(weights(2, False), plain)
    assert not np.array_equal(weights(1, True), plain)


def test_invalid_arguments_and_serialized_models(frame, tmp_path):
    from horovod.spark.keras.util import TFKerasUtil

    store = Store.create(str(tmp_path / "store"), save_runs=False)
    with pytest.raises(ValueError, match="optimizer and a loss"):
        estimator(store).setLoss(None).fit(frame)
    with pytest.raises(ValueError, match="models of Keras"):
        estimator(store, model=object()).fit(frame)
    given = estimator(store)
    assert given.getBatchSize() == 8
    text = TFKerasUtil.serialize_model(given.getModel())
    np.testing.assert_array_equal(
        TFKerasUtil.deserialize_model(text).get_weights()[0], given.getModel().get_weights()[0]
    )
