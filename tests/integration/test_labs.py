"""The labs from the command line.

`hora demo penguins` and `hora demo images`, kill and resume, and equality of Spark and pandas.
"""

from __future__ import annotations

import random
import re
import time
from pathlib import Path

import psutil
import pytest
import torch
from job_process import CommandProcess, run_command

from hora.workflow import load
from waiting import wait_until

CSV = """Species,Island,CulmenLength,CulmenDepth,FlipperLength,BodyMass
{rows}
"""


@pytest.mark.slow
@pytest.mark.spark
def test_spark_and_pandas_agree_row_for_row(spark, tmp_path):
    """Covers gaps, text that stands for a gap, spaces and repeated rows. The lab itself compares the package's rows."""
    import pandas as pd

    from hora.labs.penguins import data

    rows = [f"{i % 3},{i % 2},4{i % 10}.{i},1{i % 5}, 18{i % 10} ,3{i % 10}00" for i in range(40)]
    rows += ["1,0,,17,180,3000", "1,0,40,NA,180,3000", rows[0], rows[1]]
    csv = tmp_path / "penguins.csv"
    csv.write_text(CSV.format(rows="\n".join(rows)))
    ours = data.prepare(data.read(csv))
    theirs = data.prepare_in_spark(data.read_in_spark(spark, csv))
    for left, right in zip(ours[:2], theirs[:2], strict=True):
        pd.testing.assert_frame_equal(left, right.toPandas())
    assert ours[2:] == theirs[2:]


@pytest.mark.spark
def test_spark_reports_text_in_a_number_column(spark, tmp_path):
    from hora.labs.penguins.data import load_penguins

    csv = tmp_path / "penguins.csv"
    csv.write_text(CSV.format(rows="1,0,40,17,180,3000\n1,0,40,17,long,3000\n1,0,41,17,180,3000"))
    with pytest.raises(ValueError, match="column FlipperLength holds 'long', which is not a number"):
        load_penguins(csv, spark=spark)


def _assert_penguin_lab(out: str, folder: Path) -> None:
    assert "identical to those of step 2" in out
    assert re.search(
        r"To see a training live, in the browser, and to kill its ranks: \S*hora demo faults$", out.rstrip()
    )
    accuracies = [float(found) for found in re.findall(r"([\d.]+)% of the test birds", out)]
    assert len(accuracies) == 3
    assert min(accuracies) >= 95, out
    assert "prediction: Gentoo" in out
    for name in ("penguins.png", "weights.png", "model", "report.html"):
        assert str(folder / name) in out
        assert (folder / name).exists()
    report = (folder / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 2
    assert "239 birds to learn from, 103 to be tested on" in report
    assert "an epoch has 956 rows" in report
    assert load(folder / "model").notes["ranks"] == 2


@pytest.mark.slow
@pytest.mark.spark
def test_the_penguin_lab_with_spark(tmp_path):
    import pyspark

    lab_job = ("hora", "demo", "penguins", "--epochs", "20", "--out", str(tmp_path / "lab"))
    with CommandProcess(*lab_job, cwd=tmp_path) as lab:
        status, out, err = lab.finish(limit_s=350)
    assert status == 0, err
    assert "pandas, as a check: the same rows in the same order" in out
    assert f"Spark {pyspark.__version__}" in out
    _assert_penguin_lab(out, tmp_path / "lab")


@pytest.mark.slow
def test_the_penguin_lab_without_spark(tmp_path):
    job = ("hora", "demo", "penguins", "--no-spark", "--epochs", "20", "--out", str(tmp_path / "lab"))
    status, out, err = run_command(*job, cwd=tmp_path)
    assert status == 0, err
    assert "pandas: 239 birds to learn from, 103 to be tested on\ntraining rows: 956" in out
    _assert_penguin_lab(out, tmp_path / "lab")


def test_messages_of_the_demo_command():
    status, out, _ = run_command("hora", "demo")
    assert status == 0
    assert "penguins" in out
    assert "images" in out
    status, _, err = run_command("hora", "demo", "walruses")
    assert status == 2
    assert "there is no lab 'walruses'" in err
    status, _, err = run_command("hora", "demo", "penguins", "-np", "0")
    assert status == 2
    assert "-np and --epochs must be at least 1" in err
    status, _, err = run_command("hora", "demo", "images", "--np", "0")
    assert status == 2
    assert "-np must be at least 1" in err
    status, _, err = run_command("hora", "demo", "images", "--epochs", "0")
    assert status == 2
    assert "--epochs must be at least 1" in err


@pytest.mark.slow
def test_images_reach_97_percent_on_two_ranks(tmp_path):
    lab_job = ("hora", "demo", "images", "--epochs", "9", "--log-dir", str(tmp_path / "whole"))
    with CommandProcess(*lab_job, cwd=tmp_path) as lab:
        status, out, err = lab.finish(limit_s=350)
    assert status == 0, err
    assert float(re.findall(r"test accuracy ([\d.]+)% on 2 ranks", out)[-1]) >= 97, out
    assert (tmp_path / "whole" / "images.png").stat().st_size > 20_000


@pytest.mark.slow
def test_images_resume_after_a_kill(tmp_path):
    """Kill a random rank at a random moment and resume: the weights equal those of an undisturbed run."""
    script = str(Path(__file__).parents[2] / "examples" / "image_classifier.py")
    job = ("horovodrun", "-np", "2", "python", script, "--epochs", "2", "--width", "8", "--checkpoint-steps", "7")
    status, _, err = run_command(*job, "--log-dir", str(tmp_path / "whole"), cwd=tmp_path)
    assert status == 0, err
    job += ("--resume", "--log-dir", str(tmp_path / "killed"))
    with CommandProcess(*job, cwd=tmp_path) as first:
        folder = tmp_path / "killed" / "checkpoints"
        wait_until("there is a checkpoint", lambda: folder.is_dir() and list(folder.glob("*.ckpt")))
        time.sleep(random.random())  # picks the random moment
        victims = [process for process in first.processes() if _is_rank(process, script)]
        assert len(victims) == 2
        random.choice(victims).kill()
        status, _, err = first.finish()
    assert status != 0
    assert "exited with non-zero status" in err
    status, out, err = run_command(*job, cwd=tmp_path)
    assert status == 0, err
    assert "resuming from" in out
    undisturbed, resumed = (load(tmp_path / name / "model").model.state_dict() for name in ("whole", "killed"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in undisturbed.items())


def _is_rank(process: psutil.Process, script: str) -> bool:
    try:
        argv = process.cmdline()
    except psutil.NoSuchProcess:
        return False
    return len(argv) > 1 and argv[0].endswith("python") and argv[1] == script
