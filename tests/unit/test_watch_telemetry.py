"""Telemetry of a rank: few bytes, whole steps, and valid encodings."""

from __future__ import annotations

import time

import pytest

from hora import telemetry
from hora.telemetry import Meter, Report, Sample
from hora.telemetry.parsing import MAX_REPORT_BYTES, parse_report
from hora.telemetry.report import report


def test_a_report_survives_the_wire():
    report = Report(
        Sample(7, 2, 1.0, 0.5, 0.3),
        waiting=("allreduce.x", 1.5, (0, 2)),
        metrics={"loss": 0.25},
        events=(("commit", "at step 7"),),
        host={"cpu": 0.5},
        total_steps=100,
    )
    back = parse_report(report.encode())
    assert back.sample.step == 7
    assert back.sample.longest_s == pytest.approx(0.3, rel=1e-6)
    assert (back.waiting, back.metrics, back.events) == (report.waiting, report.metrics, report.events)
    assert (back.host, back.total_steps) == (report.host, 100)


def test_a_plain_report_takes_less_than_a_hundred_bytes():
    assert len(Report(Sample(1_000_000, 900, 1.0)).encode()) < 100


@pytest.mark.parametrize(
    "data",
    [b"", b"x" * 40, b"\x02" + bytes(64), Report(Sample()).encode() + b"[1]", Report(Sample()).encode() + b'{"m":3}',
     Report(Sample()).encode() + b'{"w":["a"]}', Report(Sample()).encode() + b"{", bytes(MAX_REPORT_BYTES + 1)],
)  # fmt: skip
def test_invalid_reports_are_rejected(data):
    with pytest.raises(ValueError):
        parse_report(data)


def test_a_sample_holds_whole_steps_only():
    meter = Meter()
    meter.data_s += 0.5
    meter.step_done()
    meter.data_s += 100.0  # of an unfinished step
    sample = meter.pop_sample()
    assert (sample.step, sample.num_steps, sample.data_s) == (1, 1, 0.5)
    meter.step_done()
    assert meter.pop_sample().data_s == 100.0
    assert meter.pop_sample().num_steps == 0


def test_a_script_reports_its_total_number_of_steps(monkeypatch):
    meter = Meter()
    monkeypatch.setattr("hora.telemetry.report.meter", meter)
    report(total_steps=5000, loss=0.5)
    report(loss=0.25)
    assert meter.total_steps == 5000
    assert meter.pop_metrics() == {"loss": 0.25}


def test_blocked_time_is_divided_into_waiting_and_reducing():
    meter = Meter()
    since = time.perf_counter() - 1.0
    meter.transport_s += 0.25
    meter.waited(since, 0.0)
    assert meter.reduce_s == pytest.approx(0.25)
    assert meter.wait_s == pytest.approx(0.75, abs=0.1)


def test_collectives_without_steps_are_counted_too():
    meter = Meter()
    meter.wait_s += 0.5
    assert meter.pop_sample().wait_s == 0.5


def test_metrics_are_the_latest_and_invalid_ones_are_omitted():
    meter = Meter()
    meter.report({"loss": 2.0, "odd": "not a number"})
    meter.report({"loss": 1.0})
    assert meter.pop_metrics() == {"loss": 1.0}
    assert meter.pop_metrics() == {}


def test_the_number_of_metrics_and_events_is_bounded():
    meter = Meter()
    for number in range(1000):
        meter.report({f"m{number}": number})
        meter.event("note", str(number))
    assert len(meter.pop_metrics()) == 64
    assert len(meter.pop_events()) == 64


def test_commits_do_not_displace_other_events():
    meter = Meter()
    meter.event("resumed", "1 rank continues")
    for step in range(1000):
        meter.commit(f"commit at step {step}")
    assert meter.pop_events() == (("resumed", "1 rank continues"), ("commit", "commit at step 999"))


def test_report_is_for_users():
    telemetry.meter.pop_metrics()  # metrics that another test may have left
    report(loss=3.0)
    assert telemetry.meter.pop_metrics() == {"loss": 3.0}
