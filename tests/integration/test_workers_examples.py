"""The starter, the stopper and the old-style script of examples/workers, run as documented."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
ALLREDUCE = (
    "import torch, horovod.torch as hvd; hvd.init(); "
    "print('sum', hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), 'hosts', hvd.cross_size())"
)


def run(folder, *command):
    return subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True, timeout=280, check=False
    )


@pytest.fixture
def folder(tmp_path):
    yield tmp_path
    run(tmp_path, "-m", "hora", "workers", "end")


@pytest.mark.slow
def test_start_trains_across_workers_and_stop_ends_them(folder):
    flags = ("--width", "4", "--epochs", "1", "--batch-size", "64", "--log-dir", "out")
    started = run(folder, EXAMPLES / "workers" / "start.py", "--cpu", "0.5", "--memory", "1", "--", *flags)
    assert started.returncode == 0, started.stdout + started.stderr
    ids = re.findall(r"^worker ([a-z0-9]{16})  running +127\.0\.\d+\.\d+$", started.stdout, re.MULTILINE)
    assert len(ids) == 2
    assert re.search(r"\[0\]<stdout>:epoch +1/1 ", started.stdout)
    assert "on 2 ranks" in started.stdout
    assert (folder / "out" / "model").exists()

    left = run(folder, "-m", "hora", "workers", "list").stdout.splitlines()
    assert [line.split()[:2] for line in left] == [[worker, "running"] for worker in ids]

    one = run(folder, EXAMPLES / "workers" / "stop.py", ids[0])
    assert one.stdout == f"worker {ids[0]}  stopped\n1 workers stopped\n"
    unknown = run(folder, EXAMPLES / "workers" / "stop.py", "nonsense")
    assert (unknown.returncode, unknown.stdout.splitlines()[0]) == (1, "worker nonsense  unknown")
    rest = run(folder, EXAMPLES / "workers" / "stop.py")
    assert rest.stdout == f"worker {ids[1]}  stopped\n1 workers stopped\n"
    assert run(folder, "-m", "hora", "workers", "end").stdout == "there was no session\n"


def test_start_reports_an_unsatisfiable_request(folder):
    started = run(folder, EXAMPLES / "workers" / "start.py", "-n", "2", "--cpu", "1000")
    assert started.returncode == 1
    assert "1000 CPU cores were requested" in started.stderr
    assert run(folder, "-m", "hora", "workers", "list").stdout == ""


def test_a_cloudera_script_runs_unchanged(folder):
    script = EXAMPLES / "workers" / "cml_horovod.py"
    done = run(folder, "-m", "hora.compat", script, sys.executable, "-c", ALLREDUCE)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[0]<stdout>:sum 2.0 hosts 2" in done.stdout
    assert done.stdout.endswith("stopped: [204, 204]\n")
