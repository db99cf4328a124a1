"""Runs every file in examples/, the explicit loop under every launcher, and the notebooks in a real kernel."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import nbformat
import pytest
import torch
from job_process import run_command
from nbclient import NotebookClient

EXAMPLES = Path(__file__).parents[2] / "examples"
PENGUINS = str(EXAMPLES / "penguins.py")
EPOCHS = "30"


def _accuracy(output: str) -> float:
    return float(re.findall(r"test accuracy: ([\d.]+)%", output)[-1])


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def reference(checkpoints: Path) -> dict[str, torch.Tensor]:
    """The weights after `horovodrun -np 2`, which every other launcher must reproduce with two ranks."""
    path = str(checkpoints / "horovodrun.pt")
    job = ("horovodrun", "-np", "2", "python", PENGUINS, "--epochs", EPOCHS, "--checkpoint", path)
    status, out, err = run_command(*job)
    assert status == 0, err
    assert _accuracy(out) >= 95, out
    return torch.load(path, weights_only=True)["model"]


@pytest.mark.slow
def test_the_explicit_loop_alone():
    status, out, err = run_command("python", PENGUINS, "--epochs", EPOCHS)
    assert status == 0, err
    assert _accuracy(out) >= 95


@pytest.mark.slow  # `make test` runs the README's command, with two epochs
def test_the_explicit_loop_under_horovodrun(reference):
    assert reference["fc3.weight"].shape == (3, 10)


@pytest.mark.slow
def test_the_explicit_loop_under_horovod_runner(reference, checkpoints):
    path = checkpoints / "runner.pt"
    job = ("python", PENGUINS, "--epochs", EPOCHS, "--np", "-2", "--checkpoint", str(path))
    status, out, err = run_command(*job)
    assert status == 0, err
    assert _accuracy(out) >= 95
    _assert_same(torch.load(path, weights_only=True)["model"], reference)


@pytest.mark.slow
@pytest.mark.spark
def test_the_explicit_loop_on_the_cluster(spark, reference, checkpoints):
    from sparkdl import HorovodRunner

    path = checkpoints / "spark.pt"
    train = runpy.run_path(PENGUINS)["train"]
    accuracy = HorovodRunner(np=2).run(train, epochs=int(EPOCHS), checkpoint=str(path))
    assert accuracy >= 0.95
    _assert_same(torch.load(path, weights_only=True)["model"], reference)


def _assert_same(weights: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(weights[name], tensor) for name, tensor in reference.items())


@pytest.mark.slow
def test_the_workflow_example(tmp_path):
    job = ("horovodrun", "-np", "2", "python", str(EXAMPLES / "penguins_workflow.py"))
    status, out, err = run_command(*job, cwd=tmp_path)
    assert status == 0, err
    assert "a new penguin: Chinstrap" in out
    assert float(re.findall(r"([\d.]+)% of the test birds", out)[-1]) >= 95


def test_the_synthetic_benchmark(tmp_path):
    job = ("horovodrun", "-np", "2", "python", str(EXAMPLES / "image_classifier.py"))
    flags = ("--synthetic", "--width", "4", "--batch-size", "2", "--num-steps", "2", "--image-size", "16")
    status, out, err = run_command(*job, *flags, cwd=tmp_path)
    assert status == 0, err
    assert re.search(r"ResNet-18, 16x16, batch 2, float32, 2 ranks, .*: \d+ images/s", out)


def test_characters_over_a_slow_link(tmp_path):
    job = ("horovodrun", "-np", "2", "python", str(EXAMPLES / "characters.py"), "--send", "diloco")
    flags = ("--steps", "45", "--width", "32", "--depth", "1", "--batch-size", "8")
    status, out, err = run_command(*job, *flags, cwd=tmp_path, env={"HORA_TRANSPORT": "tcp"})
    assert status == 0, err
    assert float(re.findall(r"2 ranks, diloco: loss ([\d.]+)", out)[-1]) < 3.0  # log(41) is 3.7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["penguins", "images"])
def test_notebooks_run_from_top_to_bottom_with_visible_progress(name, tmp_path):
    notebook = nbformat.read(EXAMPLES / "notebooks" / f"{name}.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert re.search(r"epoch \d+/\d+: 100%.*step/s", text), "no progress bar"
    assert re.search(r"\[0\]<stdout>:epoch +\d+/\d+", text), "no progress of the distributed run"
    assert any("image/png" in output.get("data", {}) for output in outputs)
    if name == "penguins":
        assert "Gentoo (" in text


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.timeout(1200)
def test_the_tour_runs_from_top_to_bottom(tmp_path):
    notebook = nbformat.read(EXAMPLES / "tour.ipynb", as_version=4)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "epoch 4: loss" in text, "the script"
    assert "epoch 1: loss" in text, "the elastic training before the death"
    assert re.search(r"epoch 4: .* on 2 ranks", text), "and after it"
    assert re.search(r"http://127\.0\.0\.1:\d+.* is the page", text)
    assert "label__output" in text
    assert any("image/png" in output.get("data", {}) for output in outputs), "the penguins"


@pytest.mark.parametrize("launcher", [("torchrun", "--nproc-per-node", "2"), ("hora", "run", "-np", "2", "python")])
@pytest.mark.parametrize("name", ["ddp", "fsdp"])
def test_programs_of_torch_distributed_run_under_torchrun_and_hora(launcher, name):
    status, out, err = run_command(*launcher, str(EXAMPLES / f"{name}.py"))
    assert status == 0, err
    losses = [float(number) for number in re.findall(r"loss ([\d.]+)", out)]
    assert len(losses) >= 4, out
    assert losses[-1] < losses[0] / 2, out


def test_the_elastic_program_of_torch_distributed_runs_under_torchrun_too():
    status, out, err = run_command("torchrun", "--nproc-per-node", "2", str(EXAMPLES / "ddp_elastic.py"))
    assert status == 0, err
    assert "epoch 4: loss" in out
    assert "2 ranks" in out


def test_the_elastic_program_of_torch_distributed_goes_on_without_a_rank():
    arguments = (str(EXAMPLES / "ddp_elastic.py"), "--kill-rank", "1", "--at-step", "20")
    status, out, err = run_command("hora", "run", "-np", "2", "--min-np", "1", "python", *arguments)
    assert status == 0, err
    losses = [float(number) for number in re.findall(r"loss ([\d.]+), 1 ranks", out)]
    assert len(losses) == 5, out
    assert losses[-1] < losses[0] / 2, out


def test_the_elastic_program_with_shards_goes_on_from_the_last_commit():
    arguments = (str(EXAMPLES / "fsdp_elastic.py"), "--kill-rank", "1")
    status, out, err = run_command("hora", "run", "-np", "2", "--min-np", "1", "python", *arguments)
    assert status == 0, err
    losses = [(int(step), float(loss), ranks) for step, loss, ranks in re.findall(r"step (\d+): loss (\S+), (.)", out)]
    assert [(step, ranks) for step, _, ranks in losses] == [(10 * n, "2" if n <= 3 else "1") for n in range(1, 7)], out
    assert all(loss < 0.1 for _, loss, _ in losses), out
