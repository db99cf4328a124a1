"""Progress reports to Kubeflow's controller: their content, their only recipient, and jobs without a controller."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from job_process import run_command

from hora.telemetry import Report, Sample
from hora.watch import kubeflow
from hora.watch.model import Entry, Run
from simulated_run import Simulation

pytest.importorskip("cryptography")

from kubeflow_controller import TOKEN, controller

SCRIPT = """
import hora, torch
import horovod.torch as hvd
hvd.init()
model = torch.nn.Linear(2, 1)
optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
for step in range(4):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    hora.report(total_steps=4, loss=0.25)
"""


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Capture log messages, independently of how other tests configure the loggers."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("hora.watch")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def a_run() -> Run:
    simulation = Simulation(num_ranks=2)
    run = Run(simulation.facts)
    for entry in simulation.entries(3.0):
        run.apply(entry)
    return run


def test_a_job_reports_its_progress_to_the_controller(tmp_path: Path):
    (tmp_path / "train.py").write_text(SCRIPT)
    with controller(tmp_path) as kubeflows:
        status, out, err = run_command(
            "hora", "run", "-np", "2", sys.executable, "train.py", cwd=tmp_path, env=kubeflows.variables
        )
    assert status == 0, err
    last = kubeflows.statuses[-1]
    assert last["progressPercentage"] == 100  # the job has succeeded
    assert {"name": "loss", "value": "0.25"} in last["metrics"]
    assert {"name": "step", "value": "4"} in last["metrics"]
    assert TOKEN not in out + err
    models = pytest.importorskip("kubeflow_trainer_api.models")
    for told in kubeflows.statuses:
        assert set(models.TrainerV1alpha1TrainerStatus.from_dict(told).to_dict()) == set(told)


def test_content_of_a_status_report():
    run = a_run()
    total = Report(Sample(25, 1, 1.0, 0.5), metrics={"loss": 0.5}, total_steps=100)
    run.apply(Entry(run.now, "report", 0, total.encode()))
    told = kubeflow.status(run)
    step, _ = run.progress()
    assert told["progressPercentage"] == step
    assert told["estimatedRemainingSeconds"] >= 0
    run.apply(Entry(run.now, "report", 0, Report(Sample(126, 1, 1.0, 0.5), total_steps=100).encode()))
    assert kubeflow.status(run)["progressPercentage"] == 100


def test_reports_go_only_to_the_trusted_controller_and_a_failure_is_logged_once(tmp_path: Path, said: list[str]):
    run = a_run()
    with controller(tmp_path) as kubeflows:
        found = kubeflow.Reports.of(kubeflows.variables)
        assert found is not None
        found.post({"trainerStatus": {"progressPercentage": 1}})
        with pytest.raises(OSError, match="certificate verify failed"):  # not signed by the controller's authority
            kubeflow.Reports.of({**kubeflows.variables, "KUBEFLOW_TRAINER_SERVER_CA_CERT": ""}).post({})
        kubeflows.answer = 307  # redirects are not followed
        found._send(kubeflow.status(run))
        found._send(kubeflow.status(run))
        assert len([line for line in said if "it responded 307" in line]) == 1
        found.close(run)
    assert [told["progressPercentage"] for told in kubeflows.statuses] == [1]
    with_http = {**kubeflows.variables, "KUBEFLOW_TRAINER_SERVER_URL": "http://127.0.0.1:1/status"}
    assert kubeflow.Reports.of(with_http) is None
    assert kubeflow.Reports.of({}) is None
    assert "must begin with https://" in said[-1]
    assert TOKEN not in "".join(said)
