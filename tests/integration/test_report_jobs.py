"""`hora.report` of the ranks of a job, to TensorBoard's files. MLflow: test_mlflow.py."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

SCRIPT = """
import os, sys, torch, hora
import horovod.torch as hvd
hvd.init()
for step in range(1, 4):
    hora.report(loss=torch.tensor(step + hvd.rank() / 2), step=step)
pid = os.fork()  # as a DataLoader's worker
if pid == 0:
    from hora.telemetry.report import outbox
    os._exit(outbox._thread is not None)
assert os.waitpid(pid, 0)[1] == 0
print("done", flush=True)
if hvd.rank() == 0:
    raise KeyError("after the last report")
"""


def test_the_last_reports_of_rank_0_arrive_even_if_it_fails(tmp_path):
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, "-m", "hora", "run", "-np", "2", sys.executable, "train.py"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "HORA_REPORT": f"tensorboard:{tmp_path}/logs"},
    )
    assert "KeyError: 'after the last report'" in done.stderr
    assert done.stdout.count("done") == 2, done.stderr
    events = EventAccumulator(str(tmp_path / "logs")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 1.0), (2, 2.0), (3, 3.0)]


def test_an_unknown_destination_ends_the_job_before_it_starts(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "hora", "run", "-np", "2", sys.executable, "-c", "print('started')"],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=tmp_path,
        env={**os.environ, "HORA_REPORT": "mlfow"},
    )
    assert done.returncode != 0
    assert "HORA_REPORT takes mlflow, tensorboard, wandb or none" in done.stderr
    assert "did you mean mlflow?" in done.stderr
    assert "started" not in done.stdout
    assert "Traceback" not in done.stderr
