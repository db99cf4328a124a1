"""`TorchEstimator` on a real standalone cluster: models, stores, and rejected input."""

from __future__ import annotations

import datetime
import sys
import threading
from decimal import Decimal
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pyspark.ml.linalg import DenseVector, Vectors
from pyspark.sql import Row

from hora.data.shard import DatasetShard
from hora.spark.estimator.dataset import describe, materialise
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.store import Store
from horovod.spark.common.util import to_petastorm_fn
from horovod.spark.torch import TorchEstimator, TorchModel

pytestmark = [pytest.mark.spark, pytest.mark.usefixtures("by_value")]

X = np.random.default_rng(0).normal(size=(40, 2)).astype("float32")
Y = (X @ np.array([1.0, -2.0], dtype="float32") + 0.5).astype("float32")


@pytest.fixture(scope="module")
def frame(spark):
    rows = [
        (Vectors.dense(x), float(y), int(y > 0), index % 4 == 0) for index, (x, y) in enumerate(zip(X, Y, strict=True))
    ]
    plain = spark.createDataFrame(rows, ["x", "y", "positive", "held_out"])
    return plain.withColumns({"y": plain.y.cast("float"), "positive": plain.positive.cast("int")}).cache()


@pytest.fixture
def store(tmp_path):
    """A store without runs: checkpoints and logs take seconds."""
    return Store.create(str(tmp_path / "store"), save_runs=False)


def linear():
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05)


def estimator(store, **more):
    model, optimizer = linear()
    given = {
        "num_proc": 2,
        "store": store,
        "model": model,
        "optimizer": optimizer,
        "loss": F.mse_loss,
        "feature_cols": ["x"],
        "label_cols": ["y"],
        "batch_size": 64,
        "epochs": 3,
        "partitions_per_process": 1,
        "verbose": 0,
    }
    return TorchEstimator(**given | more)


def by_hand(epochs):
    """Train in one process with all rows in every step and the learning rate of two ranks; return the model."""
    model, optimizer = linear()
    optimizer.param_groups[0]["lr"] *= 2
    for _ in range(epochs):
        optimizer.zero_grad()
        F.mse_loss(model(torch.from_numpy(X)).reshape(-1), torch.from_numpy(Y)).backward()
        optimizer.step()
    return model


def deadly_loss(path):
    """Return a loss that kills rank 1 in its third step, once."""
    calls = []

    def loss(outputs, labels):
        import os
        import signal

        import horovod.torch as hvd

        calls.append(labels)
        if hvd.rank() == 1 and len(calls) == 3 and not os.path.exists(path):
            open(path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return F.mse_loss(outputs, labels)

    return loss


def test_elastic_training_with_a_death_equals_training_by_hand(frame, store, tmp_path):
    backend = SparkBackend(num_proc=2, min_num_proc=2, verbose=0)
    elastic = estimator(store, num_proc=None, backend=backend, loss=deadly_loss(str(tmp_path / "killed")), epochs=6)
    fitted = elastic.fit(frame)
    assert (tmp_path / "killed").exists()
    torch.testing.assert_close(fitted.getModel().state_dict(), by_hand(6).state_dict())
    assert [entry["epoch"] for entry in fitted.getHistory()] == list(range(6))
    assert fitted.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)


def test_training_equals_training_by_hand_and_can_be_resumed_and_saved(frame, tmp_path):
    store = Store.create(str(tmp_path / "store"))
    fitted = estimator(store, run_id="run", metrics=[[F.l1_loss]]).fit(frame)
    torch.testing.assert_close(fitted.getModel().state_dict(), by_hand(3).state_dict())
    assert not fitted.getModel().training
    assert [entry["epoch"] for entry in fitted.getHistory()] == [0, 1, 2]
    assert set(fitted.getHistory()[0]["train"]["all_metrics"][0]) == {"group_0_y"}
    assert "validation" not in fitted.getHistory()[0]
    assert fitted.getOptimizer().param_groups[0]["lr"] == pytest.approx(0.05)
    assert store.exists(store.get_checkpoint_path("run"))
    assert store.fs.find(store.get_localized_path(store.get_logs_path("run")))

    estimator(store, run_id="run", epochs=5).save(str(tmp_path / "estimator"))
    loaded = TorchEstimator.load(str(tmp_path / "estimator")).setStore(store)
    with mock.patch.object(loaded, "_load_checkpoint", side_effect=loaded._load_checkpoint) as load:
        resumed = loaded.fit(frame)
    load.assert_called_once_with("run")
    assert set(loaded._load_checkpoint("run")) >= {"model", "optimizer"}
    torch.testing.assert_close(resumed.getModel().state_dict(), by_hand(5).state_dict())
    assert [entry["epoch"] for entry in resumed.getHistory()] == [0, 1, 2, 3, 4]
    again = estimator(store, epochs=1).fit_on_parquet(dataset_idx=0)
    assert again.getHistory()[0]["train"]["loss"] == pytest.approx(fitted.getHistory()[0]["train"]["loss"], rel=1e-5)

    resumed.save(str(tmp_path / "model"))
    predicted = TorchModel.load(str(tmp_path / "model")).setOutputCols(["guess"]).transform(frame)
    assert predicted.columns == [*frame.columns, "guess"]
    assert predicted.schema["guess"].dataType.simpleString() == "float"
    found = {tuple(row.x): row.guess for row in predicted.collect()}
    expected = by_hand(5)(torch.from_numpy(X)).reshape(-1).tolist()
    assert [found[tuple(map(float, x))] for x in X] == pytest.approx(expected, rel=1e-4)


def accuracy(output, label):
    return (output.argmax(dim=1) == label).float().mean()


def test_classes_keep_their_numbers_and_columns_mark_validation(frame, store):
    torch.manual_seed(0)
    model = torch.nn.Linear(2, 2)
    fitted = estimator(
        store,
        model=model,
        optimizer=torch.optim.Adam(model.parameters(), lr=0.1),
        loss=torch.nn.CrossEntropyLoss(),
        label_cols=["positive"],
        validation="held_out",
        metrics=[accuracy],
        batch_size=8,
        epochs=10,
    ).fit(frame)
    assert store.get_parquet_dataset(store.get_val_data_path(0)).read().num_rows == 10
    last = fitted.getHistory()[-1]
    assert last["validation"]["all_metrics"][0]["group_0_positive"] > 0.7
    assert last["train"]["loss"] < fitted.getHistory()[0]["train"]["loss"]
    row = fitted.transform(frame).head()
    assert isinstance(row["positive__output"], DenseVector)
    assert len(row["positive__output"]) == 2


def test_numbers_as_probabilities_and_integers_as_their_predictions(frame, store):
    model = torch.nn.Sequential(torch.nn.Linear(2, 1), torch.nn.Sigmoid())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fitted = estimator(
        store,
        model=model,
        optimizer=optimizer,
        loss=torch.nn.BCELoss(),
        label_cols=["positive"],
        epochs=1,
        compress_sparse_cols=True,
    ).fit(frame)
    stored = store.get_parquet_dataset(store.get_train_data_path(0)).read().column("x").to_pylist()
    assert sorted((row["size"], *row["values"]) for row in stored) == sorted((2, *map(float, x)) for x in X)
    predicted = fitted.transform(frame).select("positive__output")
    assert predicted.schema["positive__output"].dataType.simpleString() == "int"
    assert {row[0] for row in predicted.collect()} <= {0, 1}


class InThisProcess(Backend):
    """Runs the training in the driver."""

    def run(self, fn, args=(), kwargs=None, env=None):
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


class ImageModel(TorchModel):
    def get_prediction_fn(self):
        return lambda model, row: model(torch.tensor([list(row.image.data)]) / 255)


class ImageEstimator(TorchEstimator):
    def get_model_class(self):
        return ImageModel


def decode(rows):
    """Convert images to brightness and texts to class numbers."""
    rows["image"] = [np.frombuffer(image["data"], np.uint8) / 255 for image in rows["image"]]
    rows["kind"] = (rows["kind"] == "light").astype("int64")
    return rows


def test_a_transformation_reads_images_and_texts(spark, store):
    kinds = [("light", 255), ("dark", 0)] * 4
    frame = spark.createDataFrame([(bytearray([level] * 4), kind) for kind, level in kinds], ["data", "kind"])
    frame = frame.selectExpr("named_struct('height', 2, 'width', 2, 'data', data) AS image", "kind").coalesce(1)
    model = torch.nn.Linear(4, 2)
    fitted = ImageEstimator(
        backend=InThisProcess(),
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1.0),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["image"],
        label_cols=["kind"],
        transformation_fn=decode,
        epochs=5,
        verbose=0,
    ).fit(frame)
    found = [(row.kind, int(np.argmax(row.kind__output))) for row in fitted.transform(frame).collect()]
    assert found == [("light", 1), ("dark", 0)] * 4


class OfRows(TorchModel):
    """Like SynapseML's models: the function may use any column with its type in the DataFrame."""

    def get_prediction_fn(self):
        def predict(model, row):
            kinds = [type(value).__name__ for value in row]
            assert kinds == ["DenseVector", "SparseVector", "date", "Decimal", "Row", "list", "int"], kinds
            assert row.x.dot(row.x) == row["x"].squared_distance(row.sparse) == 5.0
            assert (row.nested.deep.toArray() == [3.0]).all()
            return model(torch.tensor(row.x.toArray(), dtype=torch.float32))

        return predict


def test_a_subclasss_prediction_function_gets_the_rows_of_the_frame(spark):
    values = (Vectors.dense([1.0, 2.0]), Vectors.sparse(2, {}), datetime.date(2026, 1, 2), Decimal("1.5"))
    row = (*values, Row(deep=Vectors.dense([3.0])), [1, 2], 7)
    frame = spark.createDataFrame([row] * 3, ["x", "sparse", "day", "price", "nested", "several.numbers", "y"])
    model = torch.nn.Linear(2, 1)
    predicted = (
        OfRows(model=model, feature_columns=["x"], label_columns=["y"]).setOutputCols(["guess"]).transform(frame)
    )
    expected = round(model(torch.tensor([1.0, 2.0])).item())
    assert [row.guess for row in predicted.collect()] == [expected] * 3
    two = OfRows(model=model, feature_columns=["x"], label_columns=["y", "price"]).setOutputCols(["a", "b"])
    with pytest.raises(Exception, match="the model has 1 outputs, but there are 2 label columns"):
        two.transform(frame)


def test_without_metadata_vectors_become_arrays():
    row = Row(x=Vectors.dense([1.0, 2.0]), sparse=Vectors.sparse(2, {1: 3.0}), y=1, text="a")
    assert to_petastorm_fn(["x", "sparse", "y"], None)(row) == Row(x=[1.0, 2.0], sparse=[0.0, 3.0], y=1)
    metadata = {"x": {"intermediate_format": "array"}, "y": {"intermediate_format": "nochange"}}
    assert to_petastorm_fn(["x", "y"], metadata)(row) == Row(x=[1.0, 2.0], y=1)


class Counted(SparkBackend):
    """Blocks trainings until both have started."""

    def __init__(self):
        super().__init__(1)
        self.both = threading.Barrier(2, timeout=120)
        self.running = threading.Lock()
        self.paths = []

    def run(self, fn, args=(), kwargs=None, env=None):
        self.paths.append(args[0].remote.train_data_path)
        self.both.wait()
        with self.running:  # the cluster has only two slots
            return super().run(fn, args, kwargs, env)


def test_concurrent_trainings_share_their_data_but_not_their_run(frame, store):
    backend = Counted()
    fitted = []
    threads = [
        threading.Thread(
            target=lambda: fitted.append(estimator(store, num_proc=None, backend=backend, epochs=1).fit(frame))
        )
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    assert backend.paths == [store.get_train_data_path(0)] * 2
    assert len({model.getRunId() for model in fitted}) == 2


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"model": None}, "Model parameter is required"),
        ({"optimizer": linear()[1]}, "parameters that are not the model's"),
        ({"store": None}, "Store parameter is required"),
        ({"backend": SparkBackend(1)}, "num_proc or backend, not both"),
        ({"loss_constructors": [lambda **known: F.mse_loss]}, "both are"),
        ({"loss": None}, "none of them is"),
        ({"label_cols": None}, "label_cols must name"),
        ({"label_cols": ["z"]}, "there is no column 'z'"),
        ({"feature_cols": ["z"]}, "there is no column 'z'"),
        ({"loss_weights": [0.5, 0.5]}, "2 loss_weights, but 1 label"),
        ({"label_shapes": [[-1], [-1]]}, "2 label_shapes, but 1 label"),
        ({"input_shapes": [[-1, 2], [-1]]}, "2 input_shapes, but 1 features"),
        ({"input_shapes": [[-1, 3]]}, "does not fit its 2 elements"),
        ({"metrics": [[F.l1_loss, F.l1_loss]]}, "1 function or one for each label"),
        ({"validation": 1.0}, "less than 1"),
        ({"validation": ["held_out"]}, "a column's name"),
        ({"validation": "z"}, "there is no column 'z'"),
        ({"validation": "x"}, "must hold booleans or numbers"),
        ({"partitions_per_process": 0}, "partitions_per_process must be"),
        ({"backward_passes_per_step": 0}, "backward_passes_per_step must be"),
        ({"mp_start_method": "threads"}, "mp_start_method must be one of"),
        ({"callbacks": [print]}, "callbacks are not supported"),
        ({"reader_pool_type": "ocean"}, "reader_pool_type must be"),
        ({"verbose": 3}, "verbose must be"),
    ],
)
def test_invalid_arguments_raise_helpful_errors(frame, store, wrong, words):
    with pytest.raises(ValueError, match=words):
        estimator(**{"store": store} | wrong).fit(frame)


def test_every_rank_has_rows_from_all_parts_of_a_sorted_frame(spark, store):
    """Four partitions, each with one class: every rank gets a quarter of each."""
    rows = spark.range(0, 400, 1, 4).selectExpr("id", "floor(id / 100) AS y", "array(id, -id) AS x")
    dataset = materialise(
        rows, describe(rows, rows.columns), store, 0, validation="y", num_partitions=4, num_proc=2, seed=None
    )
    assert (dataset.train_rows, dataset.val_rows) == (100, 300)  # classes 1 to 3 are true
    assert {name: column.size for name, column in dataset.columns.items()} == {"id": 1, "y": 1, "x": 2}
    path = store.get_localized_path(store.get_val_data_path(0))
    shards = [next(DatasetShard(path, cur_shard=rank, shard_count=2).passes(rng=None)) for rank in range(2)]
    assert sorted(np.concatenate([shard["id"] for shard in shards])) == list(range(100, 400))
    assert [np.bincount(shard["y"], minlength=4).tolist() for shard in shards] == [[0, 50, 50, 50]] * 2
    assert all((shard["x"] == np.stack([shard["id"], -shard["id"]], axis=1)).all() for shard in shards)
    assert {name.rpartition("/")[2] for name in store.fs.find(path)} == {f"part-{n:05d}.parquet" for n in range(3)}
    assert spark.conf.get("spark.sql.execution.arrow.maxRecordsPerBatch") == "10000"


def test_invalid_data_raises_helpful_errors(spark, frame, store):
    ragged = spark.createDataFrame([([1.0, 2.0], 1.0), ([1.0], 2.0)], ["x", "y"])
    with pytest.raises(ValueError, match="rows of column 'x' differ in shape: they have between 1 and 2"):
        estimator(store).fit(ragged)
    with pytest.raises(ValueError, match="column 'x' has 1 missing values"):
        estimator(store).fit(spark.createDataFrame([(1.0, 1.0), (None, 2.0)], ["x", "y"]))
    with pytest.raises(ValueError, match="column 'x' has 1 missing values"):
        estimator(store).fit(spark.createDataFrame([([1.0, None], 1.0), ([1.0, 2.0], 2.0)], ["x", "y"]))
    with pytest.raises(ValueError, match="column 'x' has type string"):
        estimator(store).fit(spark.createDataFrame([("a", 1.0)], ["x", "y"]))
    with pytest.raises(ValueError, match="1 training rows are too few for 2 processes"):
        estimator(store).fit(spark.createDataFrame([(1.0, 1.0)], ["x", "y"]))
    with pytest.raises(ValueError, match="there are no rows at"):
        estimator(store, validation="mark").fit(spark.createDataFrame([(1.0, 1.0, 0)], ["x", "y", "mark"]))
    with pytest.raises(ValueError, match="there is no Parquet dataset"):
        estimator(store).fit_on_parquet(dataset_idx=9)
    store.write_text(f"{store.get_train_data_path(8)}/_delta_log/0.json", "")
    with pytest.raises(ValueError, match=r"is a Delta table: read it with Spark, and use fit\(df\)"):
        estimator(store).fit_on_parquet(dataset_idx=8)
    with pytest.raises(TypeError, match="no parameter learning_rate"):
        TorchEstimator(learning_rate=1)


def test_every_parameter_has_its_accessors():
    asked = TorchEstimator(epochs=7)
    assert asked.setBatchSize(5) is asked
    assert (asked.getEpochs(), asked.getBatchSize(), asked.getPartitionsPerProcess()) == (7, 5, 10)
    for name in ("InMemoryCacheAll", "TrainReaderNumWorker", "ValReaderNumWorker", "UseGpu", "MpStartMethod"):
        assert getattr(asked, f"set{name}")(None) is asked
    with pytest.warns(DeprecationWarning, match="use shuffle"):
        asked.setShufflingBufferSize(10)
    assert TorchModel().setLabelColoumns(["y"]).getLabelColumns() == ["y"]


class Widest(torch.nn.Module):
    """Predicts the number of rows that it sees at once."""

    def forward(self, x):
        return torch.full((len(x), 1), float(len(x)))


def test_a_prediction_sees_at_most_a_batch_of_rows(spark):
    frame = spark.range(100).selectExpr("float(id) as x").coalesce(1)
    model = TorchModel(model=Widest(), feature_columns=["x"], label_columns=["y"], input_shapes=[[-1, 1]])
    assert {row.y__output for row in model.transform(frame).collect()} == {100.0}
    assert {row.y__output for row in model.setBatchSize(30).transform(frame).collect()} == {30.0, 10.0}
    with pytest.raises(ValueError, match="batch_size must be an integer of at least 1, but it is 0"):
        model.setBatchSize(0).transform(frame)


class WithoutTensorFlow(torch.nn.Linear):
    def forward(self, rows):
        loaded = [name for name in ("tensorflow", "keras") if name in sys.modules]
        assert not loaded, loaded
        return super().forward(rows)


def test_neither_ranks_nor_tasks_that_predict_import_tensorflow(frame, store):
    model = WithoutTensorFlow(2, 1)
    trained = estimator(store, model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.05), epochs=1).fit(frame)
    assert trained.transform(frame).select("y__output").count() == len(X)
    assert len(trained.transform(frame).select("y__output").collect()) == len(X)
