"""Jobs that report to the real `wandb`, offline: the log of each run is read back. `make test-mlflow` installs it."""

from __future__ import annotations

import json
import struct
import sys

import pytest
from job_process import run_command

pytest.importorskip("wandb", reason="wandb is not installed; `make test-mlflow` installs it")

from wandb.proto.wandb_internal_pb2 import Record

SCRIPT = """
import sys, torch, hora
import horovod.torch as hvd
hvd.init()
for step in range(1, 4):
    hora.report(loss=torch.tensor(step + hvd.rank() / 2), step=step)
hora.report(accuracy=0.5, step=1)  # an epoch: its step is not the greatest
if hvd.rank() == 0:
    open("model.pt", "w").write("weights")
    hora.report(files="model.pt")
hvd.barrier()
if sys.argv[1:] and hvd.rank() == 0:
    raise KeyError("after the last report")
"""
_BLOCK, _FIRST_HEADER, _WHOLE, _LAST = 32768, 7, 1, 4


def records(file):
    """Read the log of an offline run, in LevelDB's format."""
    data, at, parts = file.read_bytes(), _FIRST_HEADER, []
    while at + 7 <= len(data):
        left = _BLOCK - at % _BLOCK
        if left < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts.append(data[at + 7 : at + 7 + length])
        at += 7 + length
        if kind in (_WHOLE, _LAST):
            yield Record.FromString(b"".join(parts))
            parts = []


def runs(folder):
    """Return by name the project, the points, the files and the exit code of each run."""
    found = {}
    for file in folder.glob("wandb/offline-run-*/*.wandb"):
        log = list(records(file))
        run = next(record.run for record in log if record.HasField("run"))
        points = []
        for record in log:
            if record.HasField("history"):
                point = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                points.append({name: value for name, value in point.items() if not name.startswith("_")})
        files = {one.path for record in log if record.HasField("files") for one in record.files.files}
        (code,) = [record.exit.exit_code for record in log if record.HasField("exit")]
        found[run.display_name] = run.project, points, files, code
    return found


def train(folder, *arguments, **variables):
    (folder / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "hora", "run", "-np", "2", sys.executable, "train.py", *arguments]
    environ = {"OMP_NUM_THREADS": "1", "WANDB_MODE": "offline", "WANDB_DIR": str(folder), **variables}
    return run_command(*command, cwd=folder, env=environ)


def test_each_rank_reports_into_a_run_of_its_own(tmp_path):
    code, _, errors = train(tmp_path, HORA_REPORT="wandb:birds", HORA_REPORT_RANKS="all")
    assert code == 0, errors
    found = runs(tmp_path)
    assert sorted(found) == ["rank 0", "rank 1"]
    for rank in (0, 1):
        project, points, files, code = found[f"rank {rank}"]
        assert (project, code) == ("birds", 0)
        assert points == [
            *({"loss": step + rank / 2, "step": step} for step in (1, 2, 3)),
            {"accuracy": 0.5, "step": 1},
        ]
        assert ("model.pt" in files) == (rank == 0)


def test_the_run_of_a_failed_rank_has_its_reports_and_has_failed(tmp_path):
    code, _, errors = train(tmp_path, "fail", HORA_REPORT="wandb")
    assert code != 0
    assert "KeyError" in errors
    ((_, points, _, code),) = runs(tmp_path).values()
    assert [point["loss"] for point in points if "loss" in point] == [1.0, 2.0, 3.0]
    assert code != 0
