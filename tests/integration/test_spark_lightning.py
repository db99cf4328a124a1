"""`horovod.spark.lightning` from a DataFrame to predictions, with training in the driver's process, and invalid
arguments.
"""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from horovod.spark.common import constants, util
from horovod.spark.common.backend import Backend, SparkBackend
from horovod.spark.common.store import Store

pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.usefixtures("by_value"),
]

from lightning.pytorch import LightningModule  # noqa: E402

from horovod.spark.common.estimator import HorovodModel  # noqa: E402
from horovod.spark.common.params import EstimatorParams  # noqa: E402
from horovod.spark.lightning import TorchEstimator, TorchModel  # noqa: E402

X = np.random.default_rng(0).normal(size=(16, 2)).astype("float32")
Y = X[:, 0] - 2 * X[:, 1]


class InThisProcess(Backend):
    """Runs the function in the driver, like the backends of Horovod's own tests."""

    def run(self, fn, args=(), kwargs=None, env=None):
        return [fn(*args, **(kwargs or {}))]

    def num_processes(self):
        return 1


class Regression(LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(2, 1)

    def forward(self, a, b):
        return self.layer(torch.stack([a.float().reshape(-1), b.float().reshape(-1)], dim=1))

    def training_step(self, batch, batch_idx):
        loss = F.mse_loss(self(batch["a"], batch["b"]).reshape(-1), batch["y"].float())
        self.log("loss", loss.detach())
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.fixture(scope="module")
def frame(spark):
    rows = [(float(a), float(b), float(y), f"{a}") for (a, b), y in zip(X, Y, strict=True)]
    return spark.createDataFrame(rows, ["a", "b", "y", "text"]).coalesce(1).cache()


def estimator(store, **more):
    given = {
        "model": Regression(),
        "backend": InThisProcess(),
        "store": store,
        "feature_cols": ["a", "b"],
        "label_cols": ["y"],
        "batch_size": 16,
        "epochs": 2,
        "partitions_per_process": 1,
        "verbose": 0,
        "run_id": "run",
    }
    return TorchEstimator(**given | more)


class ByRows(TorchModel):
    """Like SynapseML's models: predicts row by row, from any column."""

    def get_prediction_fn(self):
        return lambda model, row: model(torch.tensor([row["a"]]), torch.tensor([float(row["text"])]) * 0 + row["b"])


class OwnEstimator(TorchEstimator):
    def get_model_class(self):
        return ByRows


def test_fit_resume_save_load_and_predict(frame, tmp_path):
    store = Store.create(str(tmp_path / "store"))
    path = store.get_checkpoint_path("run")
    assert not store.exists(path)
    fitted = estimator(store).fit(frame)
    assert store.exists(path)
    assert isinstance(fitted, TorchModel)
    assert isinstance(fitted, HorovodModel)
    assert [entry["epoch"] for entry in fitted.getEpochs()] == [0, 1]
    assert float(fitted.getHistory()["loss"]) == pytest.approx(fitted.getEpochs()[-1]["loss"])

    again = OwnEstimator()
    again._set(**{param.name: value for param, value in estimator(store, epochs=4).extractParamMap().items()})
    with mock.patch.object(again, "_read_checkpoint", side_effect=again._read_checkpoint) as read:
        resumed = again.fit(frame)
    read.assert_called_once_with("run")
    assert [entry["epoch"] for entry in resumed.getEpochs()] == [0, 1, 2, 3]
    assert resumed.getEpochs()[-1]["loss"] < fitted.getEpochs()[-1]["loss"]

    fitted.save(str(tmp_path / "model"))
    with pytest.raises(ValueError, match=r"Regression, and reading it can run any code.*trusted=True"):
        TorchModel.load(str(tmp_path / "model"))
    loaded = TorchModel.load(str(tmp_path / "model"), trusted=True)
    for model in (loaded, resumed):
        predicted = model.setOutputCols(["guess"]).transform(frame)
        assert predicted.columns == ["a", "b", "y", "text", "guess"]
        found = [row.guess for row in predicted.collect()]
        expected = model.getModel()(torch.from_numpy(X[:, 0]), torch.from_numpy(X[:, 1])).reshape(-1).tolist()
        assert found == pytest.approx(expected, rel=1e-5)


class Mortal(Regression):
    """Kills rank 1 in its third step, once."""

    def __init__(self, path):
        super().__init__()
        self.path, self.steps = path, 0

    def training_step(self, batch, batch_idx):
        import os
        import signal

        import horovod.torch as hvd

        self.steps += 1
        if hvd.rank() == 1 and self.steps == 3 and not os.path.exists(self.path):
            open(self.path, "w").close()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
def test_elastic_training_with_a_death_equals_training_by_hand(frame, tmp_path):
    store = Store.create(str(tmp_path / "store"), save_runs=False)
    backend = SparkBackend(num_proc=2, min_num_proc=2, verbose=0)
    fitted = estimator(store, model=Mortal(str(tmp_path / "killed")), backend=backend, epochs=6).fit(frame)
    assert (tmp_path / "killed").exists()
    assert [entry["epoch"] for entry in fitted.getEpochs()] == list(range(6))
    by_hand = Regression()
    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.2)  # the rate of two ranks
    a, b, y = (torch.from_numpy(column.copy()) for column in (X[:, 0], X[:, 1], Y))
    for _ in range(6):
        optimizer.zero_grad()
        F.mse_loss(by_hand(a, b).reshape(-1), y).backward()
        optimizer.step()
    torch.testing.assert_close(fitted.getModel().state_dict(), by_hand.state_dict())


def trained_with_a_trainer():
    """Train with the user's own Trainer; the last of three ranks dies after a step of the second epoch."""
    import os
    import signal

    import lightning.pytorch as pl
    import torch

    import horovod.torch as hvd
    from hora.spark.lightning.package import default_package
    from hora.spark.lightning.strategy import horovod_strategy

    class Regression(pl.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(2, 1)

        def training_step(self, batch, batch_idx):
            if hvd.size() == 3 and hvd.rank() == 2 and self.trainer.global_step == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = self.layer(batch).square().mean()
            self.log("loss", loss, on_epoch=True, sync_dist=True)
            return loss

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(strategy=horovod_strategy(default_package())(), devices=1, max_epochs=3, **quiet)
    module = Regression()
    rows = torch.arange(48.0).reshape(24, 2) / 48
    trainer.fit(module, torch.utils.data.DataLoader(rows, batch_size=2, shuffle=True))
    (rate,) = trainer.lr_scheduler_configs[0].scheduler.get_last_lr()
    weights = hvd.allgather(module.layer.weight.detach())
    return hvd.size(), trainer.global_step, trainer.current_epoch, rate, (weights - weights[0]).abs().max().item()


@pytest.mark.slow
def test_a_trainer_continues_with_fewer_ranks_at_the_same_step_and_scaled_rate():
    import horovod

    # Four steps of three ranks, one more, then the rest of the epoch in four steps of two ranks, and six more.
    expected = (2, 4 + 1 + 4 + 6, 3, pytest.approx(0.05 * 2 / 8), 0.0)
    assert horovod.run(trained_with_a_trainer, num_proc=3, min_num_proc=2) == [expected] * 2


def test_invalid_arguments_are_rejected_with_an_explanation(tmp_path):
    store = Store.create(str(tmp_path))
    module = torch.nn.Linear(2, 1)
    sgd = torch.optim.SGD(module.parameters(), lr=0.1)
    for more, said in (
        ({"optimizer": sgd}, "optimizer cannot be used with a LightningModule"),
        ({"loss": F.mse_loss}, "loss cannot be used with a LightningModule"),
        ({"model": module, "loss": F.mse_loss}, "Optimizer parameter is required"),
        ({"model": module, "optimizer": sgd}, "one of loss and loss_constructors"),
        ({"metrics": [F.l1_loss]}, "metrics has no meaning for Lightning"),
        ({"num_proc": 2}, "num_proc or backend"),
    ):
        made = estimator(store, **more)
        with pytest.raises(ValueError, match=said):
            made._check_values(made.values())
    made = estimator(store).setTrainAsyncDataLoaderQueueSize("many")
    with pytest.raises(RuntimeError, match="train_async_data_loader_queue_size"):
        made._check_values(made.values())
    with pytest.raises(TypeError, match="no parameter nothing"):
        TorchEstimator(nothing=1)


def test_accessors_and_shared_names(frame):
    made = TorchEstimator().setNumGPUs(1).setTrainerArgs({"max_steps": 3}).setUseGpu(False).setProfiler("simple")
    assert (made.getNumGPUs(), made.getTrainerArgs(), made.getUseGpu(), made.getProfiler()) == (
        1,
        {"max_steps": 3},
        False,
        "simple",
    )
    assert (EstimatorParams.backend.name, EstimatorParams.model.name) == ("backend", "model")
    metadata = util._get_metadata(frame)
    assert metadata["a"]["spark_data_type"].__name__ == "DoubleType"
    assert metadata["a"]["intermediate_format"] == constants.NOCHANGE
    assert not util._has_vector_column(frame)
    assert (util.to_list(None, 2), util.to_list(1, 2), util.to_list([1, 2], 2)) == (None, [1, 1], [1, 2])
    with pytest.raises(ValueError, match="1 or 3 elements"):
        util.to_list([1, 2], 3)
    util.check_shape_compatibility(metadata, ["a"], ["y"], input_shapes=[[-1, 1]])
    with pytest.raises(ValueError, match="does not fit"):
        util.check_shape_compatibility(metadata, ["a"], ["y"], input_shapes=[[-1, 2]])
    model = TorchModel(model=Regression(), feature_columns=["a", "b"], label_columns=["y"], _metadata=metadata)
    assert model.transform(frame).schema["y__output"].dataType.simpleString() == "double"
