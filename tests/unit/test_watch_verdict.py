"""Verdicts: the slow rank, the part and the line; kept when the rank recovers, the job ends, and in a recording."""

from __future__ import annotations

import json

import pytest

from hora.telemetry import Report, Sample
from hora.watch import view
from hora.watch.lateness import find_line
from hora.watch.model import Entry, Run
from hora.watch.recording import Recorder, read_run
from simulated_run import Simulation, Slowness

SLEEP = ["/home/me/train.py", 31, "train", "time.sleep(0.05)", "user"]
STEP = ["/home/me/train.py", 32, "train", "optimizer.step()", "user"]
WAIT = ["/x/hora/engine/queue.py", 9, "wait", "", "engine"]
SLOW_PROFILE = [[70, [SLEEP]], [30, [WAIT, STEP]]]
ORDINARY_PROFILE = [[90, [WAIT, STEP]], [10, [["/x/site-packages/torch/optim.py", 3, "step", "", "library"], STEP]]]


def _profile(at: float, worker: int, stacks: object) -> Entry:
    return Entry(at, "profile", worker, json.dumps({"num_samples": 100, "seconds": 2.0, "stacks": stacks}).encode())


def _entries(simulation: Simulation) -> list[Entry]:
    """Return a run with a slow rank 1, profiles of both ranks, and its end."""
    began = simulation.began
    entries = list(simulation.entries(40.0))
    entries += [_profile(began + 30.0, 1, SLOW_PROFILE), _profile(began + 30.1, 0, ORDINARY_PROFILE)]
    entries.sort(key=lambda entry: entry.at)
    return [*entries, Entry(began + 40.0, "end", -1, json.dumps({"outcome": "done"}).encode())]


def _recorded(tmp_path, simulation: Simulation) -> Run:
    recorder = Recorder(tmp_path / "run.hora", simulation.facts)
    for entry in _entries(simulation):
        recorder.record(entry)
    recorder.close()
    return read_run(tmp_path / "run.hora")


def test_a_recorded_run_keeps_the_verdict_and_its_line(tmp_path):
    slow = Slowness(1, 1.4, part="between", begin=10.0)
    run = _recorded(tmp_path, Simulation(num_ranks=2, slow=[slow]))
    (verdict,) = view.head(run)["past"]
    assert verdict["rank"] == 1
    assert verdict["cause"].endswith("% of it between backward and step")
    assert verdict["slowdown"] == pytest.approx(1.4, abs=0.06)
    assert verdict["until"] == round(run.began + 40.0)
    assert verdict["line"]["own"] == SLEEP
    assert verdict["line"]["share"] == 0.7
    assert verdict["line"]["other"] == 0
    notes = [event.text for event in run.events if event.kind == "stall"]
    assert len(notes) == 1
    assert "slower than rank 0, " in notes[0]


def test_a_profile_that_arrives_before_the_verdict_finds_its_line():
    """A replay may name a slow rank later than the live page that requested the profile."""
    simulation = Simulation(num_ranks=2, slow=[Slowness(1, 1.4, part="between", begin=10.0)])
    run = Run(simulation.facts)
    for entry in simulation.entries(20.0):
        run.apply(entry)
    run.apply(_profile(run.now, 1, SLOW_PROFILE))
    run.apply(_profile(run.now, 0, ORDINARY_PROFILE))
    assert not run.episodes
    run.look(run.now)
    assert run.episodes[-1].line is not None
    assert run.episodes[-1].line.own == SLEEP


def test_a_slow_rank_is_compared_with_the_only_other_one_or_with_the_median(tmp_path):
    for num_ranks, than in ((2, "rank 0"), (3, "the median")):
        run = _recorded(tmp_path, Simulation(num_ranks=num_ranks, slow=[Slowness(1, 1.4)]))
        assert [verdict["than"] for verdict in view.head(run)["past"]] == [than]


def test_a_rank_that_recovers_leaves_its_worst_finding(tmp_path):
    run = _recorded(tmp_path, Simulation(num_ranks=4, slow=[Slowness(2, 1.5, begin=8.0, end=24.0)]))
    (verdict,) = view.head(run)["past"]
    assert verdict["rank"] == 2
    assert verdict["slowdown"] == pytest.approx(1.5, abs=0.06)
    assert verdict["until"] < run.began + 36.0


@pytest.mark.parametrize(("pause_s", "num_verdicts"), [(8.0, 1), (30.0, 2)])
def test_a_rank_that_is_soon_slow_again_keeps_its_verdict(pause_s, num_verdicts):
    slow = [Slowness(2, 1.5, begin=5.0, end=20.0), Slowness(2, 1.5, begin=20.0 + pause_s)]
    simulation = Simulation(num_ranks=4, slow=slow)
    run, closed = Run(simulation.facts), False
    for number, entry in enumerate(simulation.entries(75.0)):
        run.apply(entry)
        if number % 4 == 0:
            run.look(run.now)
            closed |= any(verdict.until is not None for verdict in run.episodes)
    assert closed
    assert len(run.episodes) == num_verdicts
    assert run.episodes[-1].until is None


def test_the_line_is_the_one_that_distinguishes_the_slow_rank():
    profiles = {
        rank: {"at": at, "num_samples": 100, "stacks": stacks}
        for rank, at, stacks in ((1, 5.0, SLOW_PROFILE), (0, 6.0, ORDINARY_PROFILE))
    }
    line = find_line(profiles, 1, {1})
    assert line is not None
    assert (line.own, line.share, line.usual, line.other) == (SLEEP, 0.7, 0.0, 0)
    assert find_line(profiles, 3, {3}) is None
    assert find_line({1: {"at": 0.0, "num_samples": 0, "stacks": []}}, 1, {1}) is None


def test_a_profile_of_another_time_is_not_compared():
    profiles = {
        1: {"at": 5.0, "num_samples": 100, "stacks": SLOW_PROFILE},
        0: {"at": 50.0, "num_samples": 100, "stacks": [[100, [SLEEP]]]},
    }
    line = find_line(profiles, 1, {1})
    assert line is not None
    assert line.other is None
    assert line.own == SLEEP


def test_ranks_that_drift_apart_stay_in_the_verdict(tmp_path):
    """One event of rank 0, in the head of the page and of a recording, however many other events follow."""
    text = (
        "the ranks have drifted apart, since step 21: learning rate 0.001 on rank 1, 0.01 on rank 0: average the loss"
    )
    simulation = Simulation(num_ranks=2)
    recorder = Recorder(tmp_path / "run.hora", simulation.facts)
    for entry in _entries(simulation):
        recorder.record(entry)
        if entry.kind == "world":
            report = Report(Sample(), events=(("drift", text), *[("commit", "saved")] * 60))
            recorder.record(Entry(entry.at, "report", 0, report.encode()))
    recorder.close()
    run = read_run(tmp_path / "run.hora")
    assert [one["text"] for one in view.head(run)["drifts"]] == [text]
    assert [event.rank for event in run.events if event.kind == "drift"] == [0]
