"""The training that an estimator runs on every rank, without Spark: outputs, weights, custom steps, resuming."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

import horovod.torch as hvd
from hora.spark.estimator.dataset import Dataset
from hora.spark.estimator.packing import ModelAndOptimizer, RankSpec
from hora.spark.estimator.params import ESTIMATOR
from hora.spark.estimator.store import Store
from hora.spark.estimator.training import train

pytestmark = pytest.mark.ranks(1, 2)
NUM_ROWS = 24


@pytest.fixture
def folder(tmp_path):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(NUM_ROWS, 2)).astype("float32")
    table = {"x": list(x), "y": x[:, 0] - x[:, 1], "z": 2 * x[:, 0], "weight": np.arange(NUM_ROWS, dtype="float32")}
    for part in ("intermediate_train_data.0", "intermediate_val_data.0"):
        (tmp_path / part).mkdir()
        pq.write_table(pa.table(table), tmp_path / part / "rows.parquet", row_group_size=5)
    return str(tmp_path)


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)

    def forward(self, x):
        return self.first(x), self.second(x)


def fit(folder, *, make=lambda: torch.nn.Linear(2, 1), checkpoint=None, run="run", val_rows=0, **values):
    """Train on this rank; return rank 0's result on all ranks."""
    torch.manual_seed(1)
    model = make()
    store = Store.create(folder)
    given = {
        "label_cols": ["y"],
        "loss": F.mse_loss,
        "batch_size": 4,
        "epochs": 2,
        "verbose": 0,
        "shuffle": False,
        "reader_pool_type": "dummy",
    }
    spec = RankSpec(
        model=ModelAndOptimizer.of(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)),
        store=store,
        remote=store.to_remote(run, 0),
        dataset=Dataset(index=0, train_rows=NUM_ROWS, val_rows=val_rows, columns={}),
        features=("x",),
        values={name: default for name, (default, _) in ESTIMATOR.items()} | given | values,
        checkpoint=checkpoint,
    )
    try:
        result = hvd.broadcast_object(train(spec), root_rank=0)
        assert result is not None
        return result
    finally:
        hvd.shutdown()


def weights(result):
    return result.model.unpack()[0].state_dict()


def test_two_labels_with_weights_for_losses_and_rows(folder):
    found = fit(
        folder,
        make=TwoHeads,
        label_cols=["y", "z"],
        loss=[F.mse_loss, torch.nn.MSELoss()],
        loss_weights=[1.0, 0.0],
        sample_weight_col="weight",
        metrics=[[F.l1_loss], [F.l1_loss, F.mse_loss]],
        val_rows=NUM_ROWS,
    )
    torch.manual_seed(1)
    untouched = TwoHeads().state_dict()
    assert torch.equal(weights(found)["second.weight"], untouched["second.weight"])
    assert not torch.equal(weights(found)["first.weight"], untouched["first.weight"])
    last = found.history[-1]["validation"]
    assert [set(group) for group in last["all_metrics"]] == [
        {"group_0_y", "group_0_z"},
        {"group_1_y", "group_1_z"},
    ]
    assert last["all_metrics"][0]["group_0_y"] == pytest.approx(last["all_metrics"][1]["group_1_y"])
    assert found.output_sizes == (1, 1)


def own_step(model, optimizer, transform_outputs, loss_fn, inputs, labels, sample_weights, passes, batch_idx):
    optimizer.zero_grad()
    outputs, labels = transform_outputs(model(*inputs), labels)
    loss = loss_fn(outputs, labels, sample_weights)
    loss.backward()
    optimizer.step()
    return outputs, loss


def test_a_custom_step_equal_to_the_default_gives_the_same_bits(folder):
    one, other = fit(folder), fit(folder, train_minibatch_fn=own_step, run="own")
    assert one.history == other.history
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(one).items())


def test_resuming_gives_the_bits_of_an_uninterrupted_run(folder):
    whole = fit(folder, epochs=4, run="whole")
    fit(folder, epochs=2, run="parts")
    store = Store.create(folder)
    checkpoint = store.read(store.get_checkpoint_path("parts"))
    state = torch.load(io.BytesIO(checkpoint), weights_only=True)
    assert state["optimizer"]["param_groups"][0]["lr"] == pytest.approx(0.05)
    parts = fit(folder, epochs=4, run="parts", checkpoint=state)
    assert parts.history == whole.history
    assert all(torch.equal(value, weights(parts)[name]) for name, value in weights(whole).items())


def twice(frame):
    frame["y"] = frame["y"] * 2
    return frame


class Pairs:
    """A custom reader: two batches of features and labels, the same on every rank."""

    def __init__(self, *, train_dir, cur_shard, shard_count, schema_fields, **more):
        assert (cur_shard, shard_count) == (hvd.rank(), hvd.size())
        assert schema_fields == ["x", "y"]

    def __enter__(self):
        return self

    def __exit__(self, *exc_info):
        pass

    def train_data(self):
        return [(torch.ones(4, 2), torch.ones(4)), (torch.zeros(4, 2), torch.ones(4))]

    def val_data(self):
        return [(torch.ones(4, 2), torch.ones(4))]


def test_transformations_custom_readers_and_losses_constructed_on_the_rank(folder):
    plain = fit(folder, epochs=1)
    changed = fit(folder, epochs=1, transformation_fn=twice, run="twice")
    assert changed.history[0]["train"]["loss"] > plain.history[0]["train"]["loss"]
    own = fit(folder, data_module=Pairs, val_rows=4, epochs=20, run="pairs")
    assert own.history[-1]["validation"]["loss"] < 0.1
    made = fit(folder, loss=None, loss_constructors=[lambda model, **known: F.mse_loss], epochs=1, run="made")
    assert made.history == plain.history


def test_compression_and_passes_per_step(folder):
    found = fit(folder, gradient_compression=hvd.Compression.fp16, backward_passes_per_step=2, epochs=6)
    assert found.history[-1]["train"]["loss"] < found.history[0]["train"]["loss"]
    steps = fit(folder, train_steps_per_epoch=3, validation_steps_per_epoch=1, val_rows=NUM_ROWS, run="steps")
    assert len(steps.history) == 2
