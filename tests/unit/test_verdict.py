"""The verdict of a run and the comparison of two: from simulated jobs, live and recorded, as text and as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hora.cli.dispatch import main
from hora.telemetry import Meter, Report, Sample
from hora.watch.compare import load_verdict
from hora.watch.model import Entry, Run
from hora.watch.recording import Recorder
from hora.watch.verdict import PHASES, Verdict, make_verdict, read_verdict
from simulated_run import Simulation, Slowness


def _run(simulation: Simulation, duration_s: float = 30.0, outcome: str = "done") -> Run:
    run = Run(simulation.facts)
    for entry in simulation.entries(duration_s):
        run.apply(entry)
        if entry.kind == "report":
            run.look(entry.at)
    run.apply(Entry(run.now, "end", -1, json.dumps({"outcome": outcome}).encode()))
    return run


def _verdict(simulation: Simulation, duration_s: float = 30.0) -> Verdict:
    return make_verdict(_run(simulation, duration_s))


def _record(path: Path, simulation: Simulation, duration_s: float = 30.0) -> Path:
    recorder = Recorder(path, simulation.facts)
    for entry in simulation.entries(duration_s):
        recorder.record(entry)
    recorder.record(Entry(simulation.began + duration_s, "end", -1, json.dumps({"outcome": "done"}).encode()))
    recorder.close()
    return path


def test_the_phases_of_a_step_add_up_to_it():
    verdict = _verdict(Simulation(noise=0.0, num_ranks=4))
    assert verdict.step is not None
    assert sum(spread.mean for spread in verdict.phases.values()) == pytest.approx(verdict.step.mean, rel=0.01)
    assert verdict.phases["backward"].mean == pytest.approx(0.5 * 210, rel=0.02)
    assert verdict.num_ranks == 4
    assert verdict.num_hosts == 2


@pytest.mark.parametrize("part", ["data", "forward", "backward", "optimizer"])
def test_the_slow_rank_is_named_with_its_part_and_what_to_try(part):
    verdict = _verdict(Simulation(slow=[Slowness(3, 1.4, part=part, begin=10.0)]), 40.0)
    assert [one["rank"] for one in verdict.slow] == [3]
    assert verdict.slow[0]["part"] == part
    assert verdict.advice == verdict.slow[0]["advice"]
    text = verdict.text(80)
    assert "slow: rank 3 on alpha was 1.4" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_a_rank_that_waits_for_anothers_data_has_no_slow_backward():
    """Its backward contains a collective, in which it waits for the rank whose data is late."""
    meter = Meter()
    began, blocked_s = 10.0, meter.blocked_s
    meter.wait_s += 0.8  # in backward: a batch norm of all ranks
    meter.backward_done(began, began + 1.0, began + 1.0, blocked_s)
    assert meter.backward_s == pytest.approx(0.2)
    meter.wait_s += 0.5  # after backward: the mean of the losses
    meter.backward_done(began, began + 0.2, began + 0.8, blocked_s + 0.8)
    assert meter.backward_s == pytest.approx(0.4)
    assert meter.between_s == pytest.approx(0.1)


def test_a_rank_that_starts_late_is_not_a_slow_one_of_the_steps_that_follow():
    simulation = Simulation(num_ranks=2, noise=0.0)
    run = Run(simulation.facts)
    for entry in simulation.entries(30.0):
        if entry.kind == "report" and entry.at - run.began < 1.5:
            late = entry.worker == 1
            sample = Sample(1, 1, 1.0, 20.0, wait_s=0.1 if late else 19.8, backward_s=0.1)
            entry = entry._replace(data=Report(sample).encode())
        run.apply(entry)
    verdict = make_verdict(run)
    assert verdict.slow == []
    assert verdict.phases["wait"].mean < 0.05 * verdict.step.mean


def test_a_heavy_batch_now_and_then_is_named_on_average():
    slow = [Slowness(1, 3.0, part="forward", begin=at, end=at + 1.2) for at in range(4, 40, 7)]
    verdict = _verdict(Simulation(num_ranks=4, slow=slow), 40.0)
    assert [one["rank"] for one in verdict.slow] == [1]
    assert "on average" in verdict.text()


def test_noise_names_no_rank_and_says_so():
    verdict = _verdict(Simulation())
    assert verdict.slow == []
    assert "nothing stands out" in verdict.text()


def test_a_death_and_what_it_cost():
    simulation = Simulation(num_ranks=4, lost_at=(10.0, 2))
    run = Run(simulation.facts)
    told = False
    for entry in simulation.entries(30.0):
        run.apply(entry)
        if entry.kind == "world" and run.generation == 1 and not told:
            told = True
            text = "3 ranks continue: 3.21 s from the last step before the change to the first one after it"
            run.apply(Entry(entry.at + 3.0, "report", 0, Report(Sample(), events=(("resumed", text),)).encode()))
    verdict = make_verdict(run)
    assert [(one["rank"], one["cost_s"]) for one in verdict.losses] == [(2, 3.21)]
    assert "lost: rank 2 on" in verdict.text()
    assert "killed by signal SIGKILL; this cost the others 3.2 s" in " ".join(verdict.text().split())


def _growing(per_s: float) -> Run:
    run = Run({"began": 0.0, "title": "train.py"})
    places = [[worker, worker, "alpha"] for worker in range(2)]
    run.apply(Entry(0.0, "world", -1, json.dumps({"generation": 0, "places": places}).encode()))
    for second in range(1, 200):
        for worker in range(2):
            size = 1e9 + (per_s * second if worker else 0.0)
            sample = Sample(second, 1, 1.0, 1.0, memory_bytes=size)
            run.apply(Entry(float(second), "report", worker, Report(sample).encode()))
    return run


def test_memory_that_grows_all_the_time_is_reported():
    (grown,) = make_verdict(_growing(2e6)).memory
    assert grown["rank"] == 1
    assert grown["bytes_per_min"] == pytest.approx(120e6, rel=0.05)
    assert not make_verdict(_growing(0.0)).memory


def test_a_job_without_steps_has_a_verdict():
    run = Run({"began": 5.0, "title": "train.py"})
    run.apply(Entry(6.0, "end", -1, b'{"outcome": "done"}'))
    assert "no step of an optimizer was measured" in make_verdict(run).text()


def test_text_of_ranks_cannot_move_the_cursor():
    run = Run({"began": 5.0, "title": "train\x1b[2J.py"})
    assert "\x1b" not in make_verdict(run).text()


def test_a_recording_and_its_json_have_the_verdict_of_the_live_run(tmp_path):
    slow = [Slowness(1, 1.5, begin=8.0)]
    live = _verdict(Simulation(slow=slow))
    recorded = load_verdict(_record(tmp_path / "run.hora", Simulation(slow=slow)))
    assert recorded.phases == live.phases
    assert [one["rank"] for one in recorded.slow] == [one["rank"] for one in live.slow] == [1]
    (tmp_path / "verdict.json").write_text(live.to_json())
    assert read_verdict(tmp_path / "verdict.json") == live


def _compare(*arguments: object) -> int:
    return main(["compare", *map(str, arguments)])


def test_two_runs_of_the_same_training_differ_by_noise(tmp_path, capsys):
    runs = [_record(tmp_path / f"{seed}.hora", Simulation(seed=seed)) for seed in (1, 2)]
    assert _compare(*runs, "--max-step-time-regression", "5%") == 0
    assert "changed" not in capsys.readouterr().out


def test_a_phase_that_takes_longer_is_found_and_fails_the_gate(tmp_path, capsys):
    before = _record(tmp_path / "before.hora", Simulation(seed=1))
    slow = [Slowness(rank, 1.2, part="backward") for rank in range(8)]
    after = tmp_path / "after.json"
    after.write_text(_verdict(Simulation(seed=2, slow=slow)).to_json())
    assert _compare(before, after, "--max-step-time-regression", "5%") == 1
    printed = capsys.readouterr()
    lines = {line.split("  ")[0]: line for line in printed.out.splitlines()}
    assert lines["backward"].endswith("changed")
    assert not lines[PHASES["optimizer"]].endswith("changed")
    assert "% longer, more than the 5 % that are allowed" in printed.err
    assert all(len(line) <= 80 for line in printed.out.splitlines())
    assert _compare(before, after, "--max-step-time-regression", "0.5") == 0
    assert _compare(after, before, "--max-step-time-regression", "5%") == 0  # faster


def test_runs_that_cannot_be_compared_are_refused(tmp_path, capsys):
    eight = _record(tmp_path / "eight.hora", Simulation())
    four = _record(tmp_path / "four.hora", Simulation(num_ranks=4))
    assert _compare(eight, four) == 2
    assert "the first had 8 ranks, the second 4" in capsys.readouterr().err
    short = _record(tmp_path / "short.hora", Simulation(), 4.0)
    assert _compare(eight, short) == 2
    assert "let it train longer" in capsys.readouterr().err
    other = json.loads(_verdict(Simulation()).to_json())
    other["bytes_per_step"] *= 2
    (tmp_path / "other.json").write_text(json.dumps(other))
    assert _compare(eight, tmp_path / "other.json") == 2
    assert "other models" in capsys.readouterr().err
    assert _compare(eight, tmp_path / "other.json", "--other-model") == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"HORA-RUN 2\n{}\n", "recorded by another version of Hora"),
        (b'{"format": "hora-verdict 7"}', "written by another version of Hora"),
        (b'{"format": "hora-verdict 1"}', "a damaged verdict"),
        (b'{"format": "hora-verdict 1", "phases": {"data": 1}, "step": null}', "a damaged verdict"),
        (b"[]", "neither a recorded run nor a verdict"),
        (b"\x00" * 100, "neither a recorded run nor a verdict"),
    ],
)
def test_files_of_other_kinds_and_versions_are_named(tmp_path, capsys, content, said):
    good, bad = _record(tmp_path / "good.hora", Simulation()), tmp_path / "bad"
    bad.write_bytes(content)
    assert _compare(good, bad) == 2
    assert said in capsys.readouterr().err
