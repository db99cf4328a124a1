"""`hora.report` to TensorBoard's files, and what it says about bad input. MLflow: tests/integration/test_mlflow.py."""

from __future__ import annotations

import logging

import pytest
import torch

from hora.telemetry.destinations import Wanted, parse
from hora.telemetry.meters import numbers_of
from hora.telemetry.report import Outbox


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("HORA_REPORT", "HORA_REPORT_RANKS", "MLFLOW_RUN_ID"):
        monkeypatch.delenv(name, raising=False)


def scalars(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return [(event.step, round(event.value, 4)) for event in EventAccumulator(str(folder)).Reload().Scalars(name)]


def test_figures_and_files_arrive_in_the_folder(tmp_path):
    (tmp_path / "model.pt").write_text("weights")
    outbox, loss = Outbox(), torch.zeros(())
    outbox.choose(f"tensorboard:{tmp_path}/logs", None)
    for step in (1, 2, 3):
        outbox.add({"loss": loss.fill_(step / 4), "rate": 0.5}, step)  # the same tensor each time
    outbox.add({}, files=[tmp_path / "model.pt"])
    outbox.close()
    assert scalars(tmp_path / "logs", "loss") == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert (tmp_path / "logs" / "model.pt").read_text() == "weights"


def test_only_rank_0_reports_unless_each_is_asked_to(tmp_path, monkeypatch):
    for rank in (0, 1):
        monkeypatch.setattr("hora.telemetry.report.detect_world", lambda rank=rank: type("World", (), {"rank": rank}))
        for each, name in ((None, "one"), (True, "each")):
            outbox = Outbox()
            outbox.choose(f"tensorboard:{tmp_path}/{name}", each)
            outbox.add({"loss": float(rank)}, 1)
            outbox.close()
    assert scalars(tmp_path / "one", "loss") == [(1, 0.0)]
    assert scalars(tmp_path / "each" / "rank.0", "loss") == [(1, 0.0)]
    assert scalars(tmp_path / "each" / "rank.1", "loss") == [(1, 1.0)]


def test_without_a_destination_there_is_no_thread():
    outbox = Outbox()
    outbox.add({"loss": 1.0})
    assert outbox._thread is None


def test_a_destination_that_fails_costs_one_line(tmp_path, caplog):
    (tmp_path / "file").write_text("")
    outbox = Outbox()
    outbox.choose(f"tensorboard:{tmp_path}/file/below", None)  # no folder can be there
    with caplog.at_level(logging.WARNING, logger="hora"):
        outbox.add({"loss": 1.0}, 1)
        outbox._deliver()
        outbox.add({"loss": 2.0}, 2)
        outbox._deliver()
        outbox.close()
    assert [record.message.partition(": ")[0] for record in caplog.records] == ["tensorboard"] * 2
    assert "the training goes on" in caplog.records[0].message
    assert caplog.records[1].message == "tensorboard: 2 reports were not delivered"


def test_a_metric_that_is_no_number_is_named_once(caplog):
    with caplog.at_level(logging.WARNING, logger="hora"):
        assert numbers_of({"loss": torch.tensor(2.0), "shapes": torch.ones(3), "word_x": "high"}) == {"loss": 2.0}
        assert numbers_of({"shapes": torch.ones(3)}) == {}
    said = [record.message for record in caplog.records]
    assert said == [
        "hora.report: shapes is no number but a Tensor, of the shape (3,): it is left out",
        "hora.report: word_x is no number but a str, 'high': it is left out",
    ]


def test_destinations_are_read_from_a_list():
    assert parse("mlflow:birds, tensorboard:runs/x,wandb", "HORA_REPORT") == (
        Wanted("mlflow", "birds"),
        Wanted("tensorboard", "runs/x"),
        Wanted("wandb"),
    )
    assert parse("none", "HORA_REPORT") == ()
    with pytest.raises(ValueError, match=r"HORA_REPORT takes .* but it is 'mlfow'; did you mean mlflow"):
        parse("mlfow", "HORA_REPORT")


def test_wrong_variables_and_files_are_rejected(monkeypatch, tmp_path):
    from hora import report

    monkeypatch.setenv("HORA_REPORT_RANKS", "some")
    with pytest.raises(ValueError, match=r"HORA_REPORT_RANKS must be 0 .* or all, but it is 'some'"):
        Outbox().add({"loss": 1.0})
    with pytest.raises(FileNotFoundError, match="there is no"):
        report(files=tmp_path / "nothing")
