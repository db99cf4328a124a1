"""An estimator whose store is an S3 server that Spark itself cannot reach: tasks and ranks access it through fsspec."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from horovod.spark.common.store import Store
from horovod.spark.torch import TorchEstimator

server_of_moto = pytest.importorskip("moto.server", reason="needs pip install 'moto[server]' s3fs")
pytest.importorskip("s3fs", reason="needs pip install 'moto[server]' s3fs")
pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def options():
    server = server_of_moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    _, port = server.get_host_and_port()
    yield {"key": "any", "secret": "any", "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{port}"}}
    server.stop()


def test_data_checkpoints_and_logs_are_in_the_object_store(spark, options, by_value):
    store = Store.create("s3://bucket/prefix", storage_options=options)
    store.fs.mkdir("bucket")
    x = np.random.default_rng(0).normal(size=(40, 2))
    frame = spark.createDataFrame([(*map(float, row), float(row[0] - 2 * row[1])) for row in x], ["a", "b", "y"])

    class Sum(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = torch.nn.Linear(2, 1)

        def forward(self, a, b):
            return self.linear(torch.stack([a, b], dim=1))

    model = Sum()
    fitted = TorchEstimator(
        num_proc=2,
        store=store,
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss=lambda out, y: torch.nn.functional.mse_loss(out.reshape(-1), y),
        feature_cols=["a", "b"],
        label_cols=["y"],
        validation=0.25,
        epochs=3,
        run_id="r",
        verbose=0,
    ).fit(frame)
    history = fitted.getHistory()
    assert len(history) == 3
    assert history[-1]["train"]["loss"] < history[0]["train"]["loss"]
    assert store.exists(store.get_checkpoint_path("r"))
    train, val = (
        store.get_parquet_dataset(path(0)).read().num_rows
        for path in (store.get_train_data_path, store.get_val_data_path)
    )
    assert train + val == 40
