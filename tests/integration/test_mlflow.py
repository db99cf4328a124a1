"""Jobs whose figures arrive in a real tracking server of MLflow, on SQLite. `make test-mlflow` installs it."""

from __future__ import annotations

import http.server
import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
import urllib.error
import urllib.request

import pytest

mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed; `make test-mlflow` installs it")

from hora.telemetry.report import Outbox  # noqa: E402
from hora.watch.tracking import Tracking  # noqa: E402
from sparkdl import HorovodRunner  # noqa: E402

_START_S = 240.0  # a server imports a lot


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder, port = tmp_path_factory.mktemp("mlflow"), free_port()
    command = ["--backend-store-uri", f"sqlite:///{folder}/runs.db", "--artifacts-destination", str(folder / "files")]
    command += ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
    uri, limit = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    environ = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}  # four processes more that nothing uses
    with (
        open(folder / "server.txt", "wb") as log,
        subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *command],
            stdout=log,
            stderr=log,
            start_new_session=True,
            env=environ,
        ) as process,
    ):
        try:
            while True:
                try:
                    urllib.request.urlopen(f"{uri}/health", timeout=5).close()
                    break
                except OSError:
                    alive = process.poll() is None and time.monotonic() < limit
                    assert alive, (folder / "server.txt").read_text()
                    time.sleep(0.2)
            yield uri
        finally:
            os.killpg(process.pid, 15)


@pytest.fixture
def tracked(server, monkeypatch):
    """The server, as the one that this process and its jobs use."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    mlflow.set_tracking_uri(server)
    yield mlflow.MlflowClient(server)
    mlflow.set_tracking_uri(None)


def history(client, run_id, name):
    return [(point.step, round(point.value, 4)) for point in client.get_metric_history(run_id, name)]


def files(client, run_id):
    return {file.path for file in client.list_artifacts(run_id)}


def training(num_steps, model):
    import os

    import mlflow

    import hora
    import horovod.torch as hvd

    given = os.environ["MLFLOW_RUN_ID"]  # MLflow removes it when it takes the run up
    hvd.init()
    for step in range(1, num_steps + 1):
        hora.report(loss=1 / step, step=step)
    if hvd.rank() == 0:
        with open(model, "w") as file:
            file.write("weights")
        hora.report(files=model)
        mlflow.log_metric("own", 7.0)  # the user's own call, in the same run, without a token
    return given


def test_an_active_run_has_figures_parameters_verdict_and_model(tracked, tmp_path):
    mlflow.set_experiment("runner")
    with mlflow.start_run() as run:
        seen = HorovodRunner(np=-2).run(training, num_steps=5, model=str(tmp_path / "model.pt"))
    assert seen == run.info.run_id
    found = tracked.get_run(seen)
    assert history(tracked, seen, "loss") == [(step, round(1 / step, 4)) for step in range(1, 6)]
    assert found.data.metrics["own"] == 7.0
    assert found.data.params["hora.np"] == "2"
    assert found.data.params["hora.launcher"] == "this machine"
    assert files(tracked, seen) == {"model.pt", "verdict.json", "verdict.txt"}
    assert found.info.status == "FINISHED"


SCRIPT = """
import sys, torch, hora
import horovod.torch as hvd
hvd.init()
for step in range(1, 4):
    hora.report(loss=torch.tensor(step + hvd.rank() / 2), step=step)
hvd.barrier()
sys.exit(int(sys.argv[1]) if hvd.rank() == 0 else 0)
"""


def command(tmp_path, status, **variables):
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(SCRIPT))
    return subprocess.run(
        [sys.executable, "-m", "hora", "run", "-np", "2", sys.executable, str(script), str(status)],
        capture_output=True,
        text=True,
        timeout=280,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
    )


def runs_of(client, experiment):
    found = client.get_experiment_by_name(experiment)
    return [] if found is None else client.search_runs([found.experiment_id])


def test_a_command_has_a_run_of_its_own_and_each_rank_a_nested_one(tracked, server, tmp_path):
    variables = {"MLFLOW_TRACKING_URI": server, "HORA_REPORT": "mlflow:scripts", "HORA_REPORT_RANKS": "all"}
    done = command(tmp_path, 0, **variables)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "verdict.json").exists()
    runs = runs_of(tracked, "scripts")
    parent = next(run for run in runs if "mlflow.parentRunId" not in run.data.tags)
    nested = {run.info.run_name: run for run in runs if run is not parent}
    assert history(tracked, parent.info.run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]
    assert sorted(nested) == ["rank 0", "rank 1"]
    assert history(tracked, nested["rank 1"].info.run_id, "loss") == [(1, 1.5), (2, 2.5), (3, 3.5)]
    assert {run.data.tags["mlflow.parentRunId"] for run in nested.values()} == {parent.info.run_id}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert "train.py" in parent.data.params["hora.command"]
    assert files(tracked, parent.info.run_id) == {"verdict.json", "verdict.txt"}


def test_the_run_of_a_failed_command_has_failed(tracked, server, tmp_path):
    done = command(tmp_path, 3, MLFLOW_TRACKING_URI=server, HORA_REPORT="mlflow:failures")
    assert done.returncode == 3
    (run,) = runs_of(tracked, "failures")
    assert run.info.status == "FAILED"
    assert history(tracked, run.info.run_id, "loss") == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_a_server_that_is_away_costs_a_line(tmp_path):
    done = command(tmp_path, 0, MLFLOW_TRACKING_URI=f"http://127.0.0.1:{free_port()}", HORA_REPORT="mlflow")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stderr.splitlines() if "mlflow" in line]
    assert "parameters and verdict of this job do not arrive, and it goes on" in lines[0]
    assert any("[0]" in line and "nothing arrives there, and the training goes on" in line for line in lines)
    assert not any("[1]" in line for line in lines)
    assert "Traceback" not in done.stderr


def test_reports_go_on_when_the_server_returns(tracked, server, monkeypatch):
    run_id = tracked.create_run("0").info.run_id
    monkeypatch.setenv("MLFLOW_RUN_ID", run_id)
    monkeypatch.setattr("hora.telemetry.report._AGAIN_S", 0.0)
    outbox = Outbox()
    mlflow.set_tracking_uri(f"http://127.0.0.1:{free_port()}")
    outbox.add({"loss": 1.0}, 1)
    outbox._deliver()
    mlflow.set_tracking_uri(server)
    outbox.add({"loss": 2.0, "a strange name!": 3.0}, 2)
    outbox.close()
    assert history(tracked, run_id, "loss") == [(1, 1.0), (2, 2.0)]
    assert tracked.get_run(run_id).data.metrics["a strange name_"] == 3.0


WORKSPACE = {"DATABRICKS_HOST": "https://example.cloud.databricks.com", "DATABRICKS_TOKEN": "dapi-secret"}


def databricks_access(uri, **environ):
    mlflow.set_tracking_uri(uri)
    try:
        return Tracking.wanted({"HORA_REPORT": "mlflow", **environ}).variables()
    finally:
        mlflow.set_tracking_uri(None)


@pytest.fixture
def profile(tmp_path, monkeypatch):
    """Write a profile of Databricks' configuration file for a workspace on this port."""

    def write(port):
        (tmp_path / "databrickscfg").write_text(f"[birds]\nhost = http://127.0.0.1:{port}\ntoken = dapi-birds\n")
        monkeypatch.setenv("DATABRICKS_CONFIG_FILE", str(tmp_path / "databrickscfg"))

    return write


def test_ranks_are_given_the_access_of_the_environment():
    given = databricks_access("databricks", **WORKSPACE)
    assert given == {"HORA_REPORT": "mlflow", "MLFLOW_TRACKING_URI": "databricks", **WORKSPACE}


def test_ranks_are_given_the_access_of_a_profile(profile):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.BaseHTTPRequestHandler) as workspace:
        threading.Thread(target=workspace.serve_forever, daemon=True).start()
        profile(workspace.server_port)
        given = databricks_access("databricks://birds")
        workspace.shutdown()
    access = {"DATABRICKS_HOST": f"http://127.0.0.1:{workspace.server_port}", "DATABRICKS_TOKEN": "dapi-birds"}
    assert given == {"HORA_REPORT": "mlflow", "MLFLOW_TRACKING_URI": "databricks", **access}


def test_a_workspace_that_is_away_delays_the_job_only_for_a_while(profile, monkeypatch, caplog):
    monkeypatch.setattr("hora.watch.tracking._BEGIN_S", 0.5)
    profile(free_port())
    assert databricks_access("databricks://birds") == {"HORA_REPORT": "mlflow", "MLFLOW_TRACKING_URI": "databricks"}
    assert "no answer within 0.5 s; the job has no access to the workspace" in caplog.text


@pytest.mark.spark
@pytest.mark.usefixtures("by_value")
def test_an_estimator_and_a_stage_report_into_the_active_run(tracked, spark, tmp_path):
    import torch
    from pyspark.ml.linalg import Vectors

    from horovod.spark.common.store import Store
    from horovod.spark.torch import TorchEstimator

    rows = [(Vectors.dense([float(i), 1.0]), float(i)) for i in range(16)]
    model = torch.nn.Linear(2, 1)
    estimator = TorchEstimator(
        num_proc=2,
        store=Store.create(str(tmp_path / "store"), save_runs=False),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-4),
        loss=torch.nn.functional.mse_loss,
        feature_cols=["x"],
        label_cols=["y"],
        epochs=2,
        verbose=0,
    )
    with mlflow.start_run() as run:
        estimator.fit(spark.createDataFrame(rows, ["x", "y"]))
        HorovodRunner(np=2).run(training, num_steps=2, model=str(tmp_path / "model.pt"))
    assert [step for step, _ in history(tracked, run.info.run_id, "train_loss")] == [1, 2]
    assert history(tracked, run.info.run_id, "loss") == [(1, 1.0), (2, 0.5)]
    assert tracked.get_run(run.info.run_id).data.params["hora.launcher"] == "Spark"
