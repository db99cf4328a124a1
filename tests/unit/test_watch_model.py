"""The model of a run: states, pending operations, membership, bounded memory, and an equal recording."""

from __future__ import annotations

import json

import pytest

from hora.telemetry import Report, Sample
from hora.watch import view
from hora.watch.model import Entry, Grid, Run
from hora.watch.recording import Recorder, read_entries, read_run
from simulated_run import Simulation, Slowness


def _after(simulation: Simulation, duration_s: float) -> Run:
    run = Run(simulation.facts)
    for entry in simulation.entries(duration_s):
        run.apply(entry)
    run.look(run.now)
    return run


def _entry(at: float, kind: str, worker: int, news: object) -> Entry:
    return Entry(at, kind, worker, json.dumps(news).encode())


def _started(num_ranks: int = 3, **facts: object) -> Run:
    run = Run({"id": "x", "began": 0.0, **facts})
    run.apply(_entry(0.0, "world", -1, {"generation": 0, "places": [[w, w, "alpha"] for w in range(num_ranks)]}))
    return run


def test_the_states_of_a_job_as_text():
    run = _started(2)
    assert run.state() == ("starting", "starting: 0 of 2 ranks are here")
    run.apply(Entry(1.0, "joined", 0, b""))
    assert run.state()[1] == "starting: 1 of 2 ranks are here"
    for worker in (0, 1):
        run.apply(Entry(2.0, "report", worker, Report(Sample(1, 1, 1.0, 0.5)).encode()))
    assert run.state() == ("training", "training")
    run.apply(Entry(3.0, "report", 0, Report(Sample(1, 0, 1.0), waiting=("allreduce.g", 0.9, ())).encode()))
    run.look(12.0)
    assert run.state() == ("waiting", "waiting for rank 1")
    run.apply(_entry(13.0, "end", -1, {"outcome": "failed", "text": "rank 1: ValueError"}))
    assert run.state() == ("failed", "failed")


def test_an_elastic_job_re_forms():
    run = _started(3, elastic=True)
    for worker in range(3):
        run.apply(Entry(2.0, "report", worker, Report(Sample(1, 1, 1.0, 0.5)).encode()))
    run.apply(_entry(3.0, "exited", 1, {"code": 137, "reason": "killed by signal SIGKILL"}))
    assert run.state() == ("re-forming", "re-forming: rank 1 is lost")
    run.apply(_entry(4.0, "world", -1, {"generation": 1, "places": [[0, 0, "alpha"], [2, 1, "alpha"]]}))
    assert run.state()[0] == "re-forming"
    run.apply(Entry(5.0, "report", 2, Report(Sample(2, 1, 1.0, 0.5)).encode()))
    assert run.state() == ("training", "training")
    assert [size for _, _, size in run.worlds] == [3, 2]
    assert [event.kind for event in run.events] == ["lost", "world"]


def test_pending_operations_name_present_and_missing_ranks():
    run = _started(4)
    for worker in range(4):
        waiting = ("allreduce.g", 5.0, ()) if worker != 2 else None
        run.apply(Entry(10.0, "report", worker, Report(Sample(1, 0, 1.0), waiting=waiting).encode()))
    run.look(10.0)
    (operation,) = run.pending()
    assert (operation.name, operation.there, operation.missing) == ("allreduce.g", (0, 1, 3), (2,))
    assert operation.waited_s == pytest.approx(5.0)


def test_an_operation_of_a_process_set_waits_only_for_its_members():
    run = _started(4)
    run.apply(Entry(10.0, "report", 0, Report(Sample(1, 0, 1.0), waiting=("allreduce.g", 5.0, (0, 3))).encode()))
    run.look(10.0)
    assert run.pending()[0].missing == (3,)


def test_a_hang_names_the_missing_rank():
    run = _after(Simulation(hangs_at=(20.0, 3)), 30.0)
    assert run.state() == ("waiting", "waiting for rank 3")


def test_invalid_entries_are_rejected_without_effect():
    run = _started()
    for entry in (
        Entry(1.0, "nonsense", 0, b""),
        Entry(1.0, "report", 0, b"short"),
        Entry(1.0, "world", 0, b"{}"),
        Entry(1.0, "stack", 0, b'{"threads": [[1]]}'),
        Entry(1.0, "event", 0, b"[" * 5000),
        Entry(1.0, "exited", 0, b"null"),
    ):
        with pytest.raises(ValueError):
            run.apply(entry)
    assert run.state()[0] == "starting"
    run.apply(Entry(2.0, "report", 99, Report(Sample()).encode()))  # a worker without a rank


def test_lines_and_events_are_bounded():
    run = _started()
    for number in range(6000):
        run.apply(Entry(1.0, "line", 0, b"o" + b"x" * 5000))
        run.note(1.0, "note", 0, str(number))
    assert len(run.lines) == 4000
    assert max(len(line.text) for line in run.lines) < 2100
    assert len(run.events) == 1000


def test_a_grid_never_grows():
    grid = Grid(0.0, bin_s=1.0, num_bins=8)
    for second in range(100):
        grid.add(0, second, Sample(second, 2, 1.0, 1.0, longest_s=second, num_samples=5.0))
        grid.add_metric("loss", second, second)
    assert grid.num_used <= 8
    assert grid.bin_s == 16.0
    cells = [grid.cell(0, index) for index in range(grid.num_used)]
    assert sum(cell.num_steps for cell in cells) == 200
    assert sum(cell.num_samples for cell in cells) == 500
    assert [cell.longest_s for cell in cells] == [15, 31, 47, 63, 79, 95, 99]
    assert grid.metric("loss", 0) == pytest.approx(7.5)
    assert grid.cell(1, 0) is None


def test_a_recording_yields_the_same_run(tmp_path):
    simulation = Simulation(num_ranks=4, slow=[Slowness(1, 1.3, begin=30.0)], lost_at=(60.0, 3))
    recorder, run = Recorder(tmp_path / "run.hora", simulation.facts), Run(simulation.facts)
    looked_at = run.began
    for entry in simulation.entries(120.0):
        run.apply(entry)
        recorder.record(entry)
        if run.now - looked_at >= 1.0:  # as a live page does
            looked_at = run.now
            run.look(run.now)
    recorder.close()
    run.look(run.now)
    assert view.head(run)["past"]
    assert json.dumps(view.everything(read_run(tmp_path / "run.hora"))) == json.dumps(view.everything(run))


def test_a_truncated_recording_is_read_up_to_the_cut(tmp_path):
    simulation = Simulation(num_ranks=2)
    recorder = Recorder(tmp_path / "run.hora", simulation.facts)
    entries = list(simulation.entries(60.0))
    for entry in entries:
        recorder.record(entry)
    recorder.close()
    data = (tmp_path / "run.hora").read_bytes()
    (tmp_path / "cut.hora").write_bytes(data[:-100])
    found = list(read_entries(tmp_path / "cut.hora")[1])
    assert 0 < len(found) < len(entries)
    assert found == entries[: len(found)]


@pytest.mark.parametrize("data", [b"", b"PK\3\4", b"HORA-RUN 2\n", b"HORA-RUN 2\n[]\n", b"HORA-RUN 2\n{" + b"x" * 99])
def test_other_files_are_not_recordings(tmp_path, data):
    (tmp_path / "file").write_bytes(data)
    with pytest.raises(ValueError, match=str(tmp_path)):
        read_run(tmp_path / "file")


def test_a_recording_is_private(tmp_path):
    Recorder(tmp_path / "run.hora", {}).close()
    assert (tmp_path / "run.hora").stat().st_mode & 0o077 == 0


def test_beyond_its_limit_a_recording_drops_output_first(tmp_path):
    recorder = Recorder(tmp_path / "run.hora", {}, max_bytes=1000)
    for second in range(200):
        recorder.record(Entry(float(second), "line", 0, b"o" + str(hash(str(second))).encode() * 20))
        recorder.record(Entry(float(second), "joined", 0, b""))
    recorder.close()
    kinds = [entry.kind for entry in read_entries(tmp_path / "run.hora")[1]]
    assert kinds.count("line") < kinds.count("joined")


def test_prometheus_text():
    run = _after(Simulation(num_ranks=4, slow=[Slowness(1, 1.5)]), 30.0)
    text = view.metrics(run)
    assert "# TYPE hora_step_seconds gauge" in text
    assert 'hora_state{job_id="0000000000000000",state="training"} 1' in text
    assert 'hora_straggler_slowdown_ratio{job_id="0000000000000000",rank="1",part="data"} 1.5' in text
    for line in text.splitlines():
        assert line.startswith("#") or float(line.rpartition(" ")[2]) is not None


def test_prometheus_labels_are_escaped():
    run = Run({"id": 'a"b\\c\nd', "began": 0.0})
    assert 'job_id="a\\"b\\\\c\\nd"' in view.metrics(run)


def test_all_data_is_valid_json_even_when_the_loss_is_nan():
    run = _started(1)
    run.apply(Entry(1.0, "report", 0, Report(Sample(1, 1, 1.0, 0.5), metrics={"loss": float("nan")}).encode()))
    assert view.everything(run)["columns"]["metrics"]["loss"][-1] is None
    json.dumps(view.everything(run), allow_nan=False)
