"""A timeline file for the page: spans by tensor, late ranks, truncated and invalid files."""

from __future__ import annotations

import json

import pytest

from hora.events import Timeline
from hora.watch.replay import is_timeline, read_timeline


def _event(phase, at, name=None, pid=1):
    return {"ph": phase, "ts": at, "pid": pid} | ({} if name is None else {"name": name})


EVENTS = [
    {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 5_000_000}},
    {"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "allreduce.w"}},
    _event("B", 100, "NEGOTIATE_ALLREDUCE"),
    _event("X", 100, "0"),
    _event("X", 140, "2"),
    _event("X", 175, "1"),
    _event("E", 180),
    _event("B", 180, "ALLREDUCE"),
    _event("B", 190, "MEMCPY_IN_FUSION_BUFFER"),
    _event("E", 200),
    _event("E", 260),
]


def test_spans_of_a_tensor_and_the_last_rank(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(json.dumps(EVENTS))
    assert is_timeline(path)
    found = read_timeline(path)
    assert found["began"] == 5.0
    assert found["kinds"] == ["NEGOTIATE_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "ALLREDUCE"]
    assert found["tensors"] == [["allreduce.w", [(100, 180, 0, 0), (180, 260, 2, 0), (190, 200, 1, 1)]]]
    assert found["late"] == [[1, 1, 75]]


@pytest.mark.parametrize("num_lost", [2, 3, 10, 30])
def test_a_killed_jobs_file_may_be_truncated(tmp_path, num_lost):
    path = tmp_path / "timeline.json"
    text = "[\n" + ",\n".join(map(json.dumps, [*EVENTS, _event("B", 300, "ALLREDUCE")])) + ",\n]"
    path.write_text(text[:-num_lost])
    assert read_timeline(path)["late"] == [[1, 1, 75]]


def test_horas_own_timelines_are_read(tmp_path):
    timeline = Timeline(str(tmp_path / "t.json"))
    for member in (1, 0):
        timeline.arrived(["a", "b"], "ALLREDUCE", member)
    with timeline.running(["a", "b"], ["ALLREDUCE"], [{"dtype": "float32"}] * 2):
        pass
    timeline.close()
    found = read_timeline(tmp_path / "t.json")
    assert [name for name, _ in found["tensors"]] == ["a", "b"]
    assert [(rank, count) for rank, count, _ in found["late"]] == [(0, 2)]


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '{"a": 1}', "[", '[{"ph": "E"}]', '[{"ph": "B", "pid": []}]'])
def test_other_files_are_rejected(tmp_path, text):
    path = tmp_path / "timeline.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="neither a recorded run nor a timeline"):
        read_timeline(path)
