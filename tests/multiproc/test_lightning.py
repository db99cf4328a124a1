"""The Lightning estimator's training on every rank, without Spark; Lightning's Trainer with the Horovod strategy."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import horovod.torch as hvd
from hora.spark.estimator.dataset import Column, Dataset
from hora.spark.estimator.packing import RankSpec, pack_model
from hora.spark.estimator.store import Store

pytestmark = pytest.mark.ranks(2)
pytest.importorskip("lightning")
CALLBACKS = importlib.import_module("lightning.pytorch.callbacks").__all__
NUM_ROWS = 24
X = np.random.default_rng(0).normal(size=(NUM_ROWS, 2)).astype("float32")
Y = X[:, 0] - 2 * X[:, 1]


@pytest.fixture
def folder(tmp_path):
    table = {"x": list(X), "y": Y, "name": [f"{a},{b}" for a, b in X]}
    for part in ("intermediate_train_data.0", "intermediate_val_data.0"):
        (tmp_path / part).mkdir()
        pq.write_table(pa.table(table), tmp_path / part / "rows.parquet", row_group_size=5)
    return str(tmp_path)


def linear():
    torch.manual_seed(0)
    return torch.nn.Linear(2, 1)


def regression():
    """Return a typical LightningModule, with a hook of Lightning 1 and state across epochs."""
    from lightning.pytorch import LightningModule

    class Regression(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.seen = linear(), []

        def forward(self, x):
            return self.layer(x)

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self(batch["x"].float()).reshape(-1), batch["y"].float())
            self.log("train_loss", loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
            return loss

        def training_epoch_end(self, outputs):
            self.seen.append(len(outputs))
            self.log("batches", float(len(outputs)))

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    return Regression()


def by_hand(epochs, *, rate=0.1):
    """Train with all rows in every step, at the learning rate of two ranks."""
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    for _ in range(epochs):
        optimizer.zero_grad()
        F.mse_loss(model(torch.from_numpy(X)).reshape(-1), torch.from_numpy(Y)).backward()
        optimizer.step()
    return model.state_dict()


def fit(folder, module, *, checkpoint=None, val_rows=0, features=("x",), save_runs=True, **values):
    """Train on this rank; return rank 0's result on all ranks."""
    from hora.spark.lightning.estimator import TorchEstimator
    from hora.spark.lightning.package import default_package
    from hora.spark.lightning.training import train

    store = Store.create(folder, save_runs=save_runs)
    given = {"label_cols": ["y"], "batch_size": 64, "epochs": 3, "verbose": 0, "shuffle": False}
    columns = {name: Column(name, "scalar", "double", 1) for name in ("x", "y", "name")}
    spec = RankSpec(
        package=default_package(),
        model=pack_model(module),
        store=store,
        remote=store.to_remote("run", 0),
        dataset=Dataset(index=0, train_rows=NUM_ROWS, val_rows=val_rows, columns=columns),
        features=tuple(features),
        values={name: default for name, (default, _) in TorchEstimator.table.items()} | given | values,
        checkpoint=checkpoint,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            result = train(spec)
        return hvd.broadcast_object(result, root_rank=0)
    finally:
        hvd.shutdown()


def counting():
    """Return a callback with hooks of Lightning 1."""
    from lightning.pytorch import Callback

    class Counting(Callback):
        ends = 0

        def on_init_end(self, trainer):
            self.ends = 100

        def on_epoch_end(self, trainer, pl_module):
            self.ends += 1
            pl_module.log("ends", float(self.ends))

    return Counting()


def test_a_training_equals_a_handwritten_loop_and_can_be_resumed(folder):
    result = fit(folder, regression(), callbacks=[counting()])
    assert [entry["ends"] for entry in result.history] == [101, 102, 103]
    expected = {f"layer.{name}": value for name, value in by_hand(3).items()}
    torch.testing.assert_close(result.model, expected)
    assert [entry["epoch"] for entry in result.history] == [0, 1, 2]
    assert result.logged_metrics["batches"] == 1
    assert result.logged_metrics["train_loss"] == pytest.approx(result.history[-1]["train_loss"])

    store = Store.create(folder)
    checkpoint = store.read(store.get_checkpoint_path("run"))
    assert [name.rpartition("/")[2] for name in store.get_checkpoints("run")] == ["checkpoint.ckpt"]
    resumed = fit(folder, regression(), checkpoint=checkpoint, epochs=5)
    expected = {f"layer.{name}": value for name, value in by_hand(5).items()}
    torch.testing.assert_close(resumed.model, expected)
    assert [entry["epoch"] for entry in resumed.history] == [0, 1, 2, 3, 4]


def counted(folder, faults):
    """Return a module of an elastic job; `faults` are the places at which the world breaks, once each."""
    from lightning.pytorch import LightningModule

    class Counted(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.faults, self.starts = linear(), list(faults), 0

        def training_step(self, batch, batch_idx):
            x = torch.tensor([[1.0, 2.0], [3.0, -1.0]]) * (1 + hvd.rank())  # the same in every batch
            loss = self.layer(x).square().mean()
            self.log("train_loss", loss.detach(), on_epoch=True, on_step=False, sync_dist=True)
            self.happen("forward")
            return loss

        def happen(self, where):
            where = (where, self.trainer.current_epoch, self.trainer.global_step)
            if where in self.faults:
                self.faults.remove(where)
                raise hvd.HorovodInternalError("injected")

        def on_train_start(self):
            self.starts += 1

        def on_after_backward(self):
            self.happen("backward")

        def on_train_batch_end(self, *args):
            self.happen("batch end")

        def validation_step(self, batch, batch_idx):
            assert not self.training
            self.happen("validation")

        def on_train_epoch_end(self):
            self.happen("epoch end")

        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), lr=0.05)
            schedules = [(torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5), "step")]
            schedules += [(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "epoch")]
            return [optimizer], [{"scheduler": schedule, "interval": each} for schedule, each in schedules]

        def on_train_end(self):
            assert self.training
            assert not self.faults, self.faults
            assert self.starts == len(faults) + 1
            optimizer, schedules = self.trainer.optimizers[0], self.trainer.lr_scheduler_configs
            counts = [
                self.trainer.global_step,
                self.trainer.current_epoch,
                *(s.scheduler.last_epoch for s in schedules),
            ]
            found = (counts, [g["lr"] for g in optimizer.param_groups], optimizer.state_dict()["state"])
            torch.save((found, self.layer.state_dict()), f"{folder}/found.{len(faults)}.{hvd.rank()}")

    return Counted()


@pytest.mark.parametrize("more", [{}, {"trainer_args": {"accumulate_grad_batches": 2}}], ids=["each", "accumulated"])
def test_a_training_interrupted_by_faults_is_bit_identical_to_one_without(folder, more):
    places = ("forward", 0, 1), ("backward", 0, 2), ("batch end", 1, 5), ("validation", 1, 6), ("epoch end", 2, 9)
    if more:
        places = ("forward", 0, 1), ("backward", 1, 2), ("validation", 1, 4), ("epoch end", 2, 6)
    told = []
    with mock.patch("hora.spark.lightning.strategy.is_elastic", return_value=True):
        for faults in ((), places):
            module = counted(folder, faults)
            told.append(fit(folder, module, val_rows=NUM_ROWS, batch_size=4, shuffle=True, random_seed=1, **more))
    assert [[entry["epoch"] for entry in result.history] for result in told] == [[0, 1, 2]] * 2
    for rank in range(2):
        undisturbed, disturbed = (torch.load(f"{folder}/found.{n}.{rank}") for n in (0, len(places)))
        assert undisturbed[0][0][:2] == [6 if more else 9, 3]
        torch.testing.assert_close(disturbed, undisturbed, rtol=0, atol=0)


def finetuned():
    """Return a LightningModule suitable for every callback: with a backbone, a learning rate and a batch size."""
    from lightning.pytorch import LightningModule

    class Finetuned(LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.backbone, self.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
            self.lr, self.batch_size = 0.05, 4

        def forward(self, x):
            return self.head(self.backbone(x))

        def training_step(self, batch, batch_idx):
            loss = F.mse_loss(self(batch["x"].float()).reshape(-1), batch["y"].float())
            self.log("train_loss", loss.detach(), sync_dist=True)
            return loss

        def validation_step(self, batch, batch_idx):
            loss = F.mse_loss(self(batch["x"].float()).reshape(-1), batch["y"].float())
            self.log("val_loss", loss, sync_dist=True)

        def configure_optimizers(self):
            learning = [parameter for parameter in self.parameters() if parameter.requires_grad]
            optimizer = torch.optim.SGD(learning, lr=self.lr)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]

    return Finetuned()


def every_callback(folder):
    """Return a constructor for each of Lightning's callbacks, by name."""
    from lightning.pytorch import callbacks as of

    class Finetuning(of.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.backbone)

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.backbone, optimizer)

    class Bar(of.ProgressBar):
        def disable(self):
            self.shown = False

    return {
        "BackboneFinetuning": lambda: of.BackboneFinetuning(1, backbone_initial_lr=0.01),
        "BaseFinetuning": Finetuning,
        "BasePredictionWriter": lambda: of.BasePredictionWriter("epoch"),
        "BatchSizeFinder": lambda: of.BatchSizeFinder(max_trials=2, steps_per_trial=1),
        "Callback": of.Callback,
        "Checkpoint": of.Checkpoint,
        "DeviceStatsMonitor": of.DeviceStatsMonitor,
        "EMAWeightAveraging": of.EMAWeightAveraging,
        "EarlyStopping": lambda: of.EarlyStopping("val_loss"),
        "GradientAccumulationScheduler": lambda: of.GradientAccumulationScheduler({1: 2}),
        "LambdaCallback": lambda: of.LambdaCallback(on_train_start=lambda trainer, module: module.head.bias.sum()),
        "LearningRateFinder": lambda: of.LearningRateFinder(num_training_steps=4),
        "LearningRateMonitor": of.LearningRateMonitor,
        "ModelCheckpoint": lambda: of.ModelCheckpoint(monitor="val_loss"),
        "ModelPruning": lambda: of.ModelPruning("l1_unstructured", amount=0.25),
        "ModelSummary": of.ModelSummary,
        "OnExceptionCheckpoint": lambda: of.OnExceptionCheckpoint(folder),
        "ProgressBar": Bar,
        "RichModelSummary": of.RichModelSummary,
        "RichProgressBar": of.RichProgressBar,
        "SpikeDetection": lambda: of.SpikeDetection(warmup=100),
        "StochasticWeightAveraging": lambda: of.StochasticWeightAveraging(swa_lrs=0.01, swa_epoch_start=1),
        "TQDMProgressBar": of.TQDMProgressBar,
        "ThroughputMonitor": lambda: of.ThroughputMonitor(batch_size_fn=lambda batch: len(batch["y"])),
        "Timer": lambda: of.Timer(duration={"hours": 1}),
        "WeightAveraging": of.WeightAveraging,
    }


@pytest.mark.parametrize("name", CALLBACKS)
def test_every_callback_of_lightning(folder, name):
    """It runs on two ranks, whose parameters are equal afterwards."""
    callback = every_callback(folder)[name]()
    given = {"val_rows": NUM_ROWS, "batch_size": 4, "callbacks": [callback]}
    if name == "BatchSizeFinder":
        with pytest.raises(Exception, match="not supported with distributed strategies"):
            fit(folder, finetuned(), **given)
        return
    result = fit(folder, finetuned(), **given)
    assert [entry["epoch"] for entry in result.history] == [0, 1, 2]
    assert all(torch.isfinite(value).all() for value in result.model.values())


def test_an_unsaved_run_has_a_logger_too(folder):
    from lightning.pytorch.callbacks import LearningRateMonitor

    callbacks = [LearningRateMonitor()]
    result = fit(folder, finetuned(), val_rows=NUM_ROWS, batch_size=4, callbacks=callbacks, save_runs=False)
    assert len(result.history) == 3


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_validation_epoch_end", "setup"])
def test_a_callback_that_raises_on_one_rank_ends_the_training_with_its_own_error(folder, hook):
    """The other rank gets an error in its next collective, so neither waits in a barrier of a teardown."""
    from lightning.pytorch.callbacks import LambdaCallback, OnExceptionCheckpoint

    def fail(*args, **kwargs):
        if hvd.rank() == 1:
            raise KeyError("this callback fails")

    rank = int(os.environ["HOROVOD_RANK"])
    callbacks = [LambdaCallback(**{hook: fail}), OnExceptionCheckpoint(folder)]
    expected = pytest.raises(KeyError, match="this callback fails") if rank else pytest.raises(hvd.HorovodInternalError)
    with expected:
        fit(folder, finetuned(), val_rows=NUM_ROWS, batch_size=4, callbacks=callbacks)


def test_no_warning_about_writing_checkpoints_is_logged(folder):
    lines = []
    listener = logging.Handler()
    listener.emit = lambda record: lines.append(record.getMessage())
    logger = logging.getLogger("lightning.pytorch")
    logger.addHandler(listener)
    try:
        fit(folder, regression())
    finally:
        logger.removeHandler(listener)
    assert lines or os.environ["HOROVOD_RANK"] != "0"  # Lightning's other lines are logged
    assert not [line for line in lines if "weights_only" in line]


def rows_of(row):
    """Parse a text column into an array, without edit_fields; drop another column."""
    return {"x": np.array([float(part) for part in row["name"].split(",")], dtype="float32"), "y": row["y"]}


def test_a_plain_module_with_validation_early_stopping_and_transformed_rows(folder):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    from horovod.spark.lightning.legacy import to_lightning_module

    class ByKeyword(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x):
            return self.layer(x)

    model = ByKeyword()
    module = to_lightning_module(
        model, torch.optim.SGD(model.parameters(), lr=0.05), F.mse_loss, None, ["x"], ["y"], None, 0.5
    )
    callbacks = [EarlyStopping("val_loss", min_delta=1e9, patience=1), ModelCheckpoint(monitor="val_loss")]
    result = fit(
        folder,
        module,
        val_rows=NUM_ROWS,
        features=("name",),
        transformation_fn=rows_of,
        callbacks=callbacks,
        epochs=9,
        trainer_args={"progress_bar_refresh_rate": 0, "accumulate_grad_batches": 1, "gradient_clip_val": 1e6},
    )
    assert len(callbacks) == 2
    assert [entry["epoch"] for entry in result.history] == [0, 1]
    losses = [entry["val_loss"] for entry in result.history]
    assert losses[1] < losses[0]
    torch.testing.assert_close(result.model, {f"_model.layer.{n}": v for n, v in by_hand(2).items()})


def test_gradients_of_several_batches_are_summed_before_they_are_averaged(folder):
    result = fit(folder, regression(), batch_size=6, trainer_args={"accumulate_grad_batches": 2}, epochs=2)
    torch.testing.assert_close(result.model, {f"layer.{n}": v for n, v in by_hand(2).items()}, atol=1e-5, rtol=1e-4)


def validated():
    """Return a module in Lightning 1 style: a validation step without a result, and a hook for the steps' results."""
    module = regression()

    class Validated(type(module)):
        def validation_step(self, batch, batch_idx):
            self.log("val_loss", F.mse_loss(self(batch["x"].float()).reshape(-1), batch["y"].float()), sync_dist=True)

        def validation_epoch_end(self, outputs):
            self.log("outputs", float(len(outputs)), sync_dist=True)

    module.__class__ = Validated
    return module


def test_a_validation_step_without_results_has_no_outputs(folder):
    result = fit(folder, validated(), val_rows=NUM_ROWS)
    assert [entry["outputs"] for entry in result.history] == [0, 0, 0]


def test_a_module_with_a_validation_step_trains_without_a_validation_set(folder):
    result = fit(folder, validated())
    torch.testing.assert_close(result.model, {f"layer.{name}": value for name, value in by_hand(3).items()})
    assert all("val_loss" not in entry for entry in result.history)


def test_arguments_of_lightning_1_are_converted_to_callbacks(folder):
    given = {"stochastic_weight_avg": True, "terminate_on_nan": True, "callbacks": [counting()], "log_gpu_memory": None}
    result = fit(folder, regression(), epochs=10, trainer_args=given)
    assert [entry["epoch"] for entry in result.history] == list(range(10)), "the estimator's own callback is there"
    # Lightning averages the weights at the start of the last three epochs: averaging starts after 0.8 of the epochs.
    last = [{f"layer.{name}": value for name, value in by_hand(epochs).items()} for epochs in (7, 8, 9)]
    torch.testing.assert_close(result.model, {name: sum(state[name] for state in last) / 3 for name in last[0]})


def test_a_non_finite_loss_stops_the_training(folder):
    from lightning.pytorch import LightningModule

    class Nan(LightningModule):
        def __init__(self):
            super().__init__()
            self.layer = linear()

        def training_step(self, batch, batch_idx):
            return self.layer(batch["x"]).sum() * float("nan")

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    with pytest.raises(ValueError, match="terminate_on_nan"):
        fit(folder, Nan(), terminate_on_nan=True)


def test_the_strategys_collectives():
    from hora.spark.lightning.package import default_package
    from hora.spark.lightning.strategy import horovod_strategy

    strategy = horovod_strategy(default_package())()
    strategy.parallel_devices = [torch.device("cpu")]
    try:
        rank = hvd.rank()
        assert (strategy.global_rank, strategy.world_size, strategy.is_global_zero) == (rank, 2, rank == 0)
        assert strategy.reduce(torch.tensor(float(rank))) == 0.5
        assert strategy.reduce(torch.tensor(rank), reduce_op="sum") == 1
        assert strategy.reduce_boolean_decision(rank == 0, all=False)
        assert not strategy.reduce_boolean_decision(rank == 0)
        with pytest.raises(ValueError, match="process group"):
            strategy.reduce(torch.tensor(1.0), group=object())
        with pytest.raises(ValueError, match="reduce_op"):
            strategy.reduce(torch.tensor(1.0), reduce_op="product")
        assert strategy.all_gather(torch.tensor(rank)).tolist() == [0, 1]
        assert strategy.all_gather(torch.ones(3, 2)).shape == (2, 3, 2)
        assert strategy.broadcast({"rank": rank}) == {"rank": 0}
        strategy.barrier()
    finally:
        hvd.shutdown()
