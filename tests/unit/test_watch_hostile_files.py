"""Hostile recordings and timelines: each is shown, in JSON that browsers read, or rejected with an explanation.

The recordings are written here from the format that `hora.watch.recording` documents.
"""

from __future__ import annotations

import itertools
import json
import random
import struct
import zlib
from pathlib import Path

import pytest

from hora.cli.dispatch import main
from hora.watch import view
from hora.watch.recording import read_run
from hora.watch.replay import read_timeline
from simulated_run import Simulation

KINDS = ("world", "report", "joined", "exited", "failed", "line", "event", "stack", "profile", "end")
ODD = (float("nan"), float("inf"), -float("inf"), -1e308, 1e308, 1e300, 1e18, -1.0)
Raw = tuple[float, int, int, bytes]  # when, kind, worker, data


def write_recording(path: Path, facts: bytes, entries: list[Raw]) -> None:
    body = b"".join(struct.pack("<dBiI", at, kind, worker, len(data)) + data for at, kind, worker, data in entries)
    block = zlib.compress(body)
    path.write_bytes(b"HORA-RUN 3\n" + facts + b"\n" + struct.pack("<I", len(block)) + block)


def recorded() -> tuple[dict[str, object], list[Raw]]:
    simulation = Simulation(num_ranks=2, began=1_000_000.0)
    entries = [(one.at, KINDS.index(one.kind), one.worker, one.data) for one in simulation.entries(8.0)]
    last = entries[-1][0]
    entries += [
        (last, KINDS.index("stack"), 0, b'{"threads": [["main", [["f.py", 3, "step", "loss.backward()", "user"]]]]}'),
        (last, KINDS.index("profile"), 1, b'{"num_samples": 2, "seconds": 1.0, "stacks": [[2, []]]}'),
        (last, KINDS.index("exited"), 1, b'{"code": 1, "reason": ""}'),
        (last, KINDS.index("end"), -1, b'{"outcome": "failed", "text": "t"}'),
    ]
    return simulation.facts, entries


def refuse(constant: str) -> float:
    raise AssertionError(f"{constant} is served")


def shown(path: Path) -> bool:
    """Return whether the file is shown; served data must be JSON, and a rejection a ValueError with the path."""
    try:
        run = read_run(path)
    except ValueError as error:
        refusal = str(error)
    else:
        json.loads(view.as_json(view.everything(run)), parse_constant=refuse)
        view.metrics(run).encode(errors="replace")
        return True
    assert str(path) in refusal
    return False


def test_an_intact_recording_is_shown(tmp_path):
    facts, entries = recorded()
    write_recording(tmp_path / "r", json.dumps(facts).encode(), entries)
    assert shown(tmp_path / "r")
    assert read_run(tmp_path / "r").outcome == "failed"


@pytest.mark.parametrize(
    "began", ["null", "[1]", '"x"', "NaN", "Infinity", "-1e300", "1e308", "1" + "0" * 400, "[" * 50_000]
)
def test_a_run_with_an_invalid_start_time_is_rejected(tmp_path, began, capsys):
    path = tmp_path / "r.hora"
    write_recording(path, b'{"began": ' + began.encode() + b"}", recorded()[1])
    assert not shown(path)
    assert main(["view", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"hora view: error: {path} is damaged: ")


@pytest.mark.parametrize(
    "facts", ['{"title": {"a": NaN}}', '{"id": [[[1]]], "title": 5}', '{"title": "\\ud800\\u001b[2J"}']
)
def test_odd_facts_are_shown_or_omitted(tmp_path, facts):
    write_recording(tmp_path / "r", facts.encode(), recorded()[1])
    assert shown(tmp_path / "r")


def test_control_characters_of_a_title_are_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("hora.watch.server.PageServer.join", lambda server: server.close())
    write_recording(tmp_path / "r", b'{"title": "a\\ud800\\u001b[2J\\nb"}', [])
    assert main(["view", str(tmp_path / "r")]) == 0
    assert capsys.readouterr().out.startswith("a  [2J b: http://")


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("world", b'{"generation": 1e999, "places": []}'),
        ("world", b'{"generation": 1, "places": [[0, 1e999, "h"]]}'),
        ("world", b'{"generation": 1' + b"0" * 400 + b', "places": []}'),
        ("exited", b'{"code": 1e999}'),
        ("profile", b'{"num_samples": 1e999, "seconds": 1e999, "stacks": []}'),
        ("profile", b'{"num_samples": 1, "seconds": NaN, "stacks": []}'),
        ("stack", b'{"threads": [["a", [["f", 1e999, "g", "c", "user"]]]]}'),
        ("event", b'{"kind": 1, "text": NaN}'),
        ("event", b"[" * 100_000),
    ],
)
def test_a_hostile_entry_does_not_affect_the_rest(tmp_path, kind, data):
    facts, entries = recorded()
    entries.insert(20, (entries[20][0], KINDS.index(kind), 0, data))
    write_recording(tmp_path / "r", json.dumps(facts).encode(), entries)
    assert shown(tmp_path / "r")
    assert read_run(tmp_path / "r").outcome == "failed"


@pytest.mark.parametrize("at", ODD)
@pytest.mark.parametrize("index", [0, 10, -1])
def test_entries_with_invalid_times_are_omitted(tmp_path, at, index):
    facts, entries = recorded()
    entries[index] = (at, *entries[index][1:])
    write_recording(tmp_path / "r", json.dumps(facts).encode(), entries)
    assert shown(tmp_path / "r")


REPORTS = (
    b'{"t": 1' + b"0" * 400 + b"}",
    b'{"m": {"loss": 1' + b"0" * 400 + b"}}",
    b'{"w": ["allreduce.x", 1e999, []]}',
    b'{"w": ["allreduce.x", 5.0, [[1], {}]]}',
    b'{"h": {"cpu": ' + b"[" * 500 + b"]" * 500 + b"}}",
    b'{"h": {"gpus": [1]}}',
    b'{"m": {"\\ud800": 1.0}}',
)


def mutated(rng: random.Random, entry: Raw) -> Raw:
    at, kind, worker, data = entry
    changed = bytearray(data)
    match rng.randrange(6):
        case 0 if changed:
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        case 1 if changed:
            place = rng.randrange(len(changed))
            changed[place : place + 4] = struct.pack("<f", rng.choice((float("nan"), float("inf"), 3e38, -3e38)))
        case 2:
            kind = rng.randrange(256)
        case 3:
            worker = rng.choice((-1, 0, 1, 2**31 - 1, -(2**31)))
        case 4:
            at = rng.choice((*ODD, at - 1e6, at + 1e6, at + 1e9))
        case 5 if KINDS[min(kind, 9)] == "report":
            changed = changed[:61] + rng.choice(REPORTS)
    return at, kind, worker, bytes(changed)


def test_mutated_recordings_are_shown_or_rejected(tmp_path, cases):
    facts, entries = recorded()
    num_shown = 0
    for case, rng in itertools.islice(cases, 0, None, 20):  # fewer cases, because each writes and reads a file
        changed = list(entries)
        for _ in range(rng.randint(1, 4)):
            index = rng.randrange(len(changed))
            changed[index] = mutated(rng, changed[index])
        write_recording(tmp_path / "r", json.dumps(facts).encode(), changed)
        try:
            num_shown += shown(tmp_path / "r")
        except Exception as error:
            raise AssertionError(case) from error
    assert num_shown


TIMELINES = {
    "pid 1e999": '[{"ph":"B","pid":1e999,"name":"a","ts":1}]',
    "ends at 1e999": '[{"ph":"B","pid":1,"name":"a","ts":1},{"ph":"E","pid":1,"ts":1e999}]',
    "begins at NaN": '[{"ph":"B","pid":1,"name":"a","ts":NaN},{"ph":"E","pid":1,"ts":2}]',
    "400 digits": '[{"ph":"B","pid":1,"name":"a","ts":1' + "0" * 400 + "}]",
    "late for ever": '[{"ph":"B","pid":1,"name":"NEGOTIATE_A","ts":1},{"ph":"X","pid":1,"name":"0","ts":1},'
    '{"ph":"X","pid":1,"name":"1","ts":1e999},{"ph":"E","pid":1,"ts":5}]',
    "5000 digits": '[{"ph":"B","pid":1,"name":"a","ts":1},{"ph":"X","pid":1,"name":"' + "9" * 5000 + '","ts":1}]',
    "began at 1e999": '[{"ph":"M","args":{"start_time_since_epoch_in_micros":1e999}}]',
    "deep": "[" * 100_000,
}


@pytest.mark.parametrize("what", TIMELINES)
def test_hostile_timelines_are_rejected_with_an_explanation(tmp_path, what, capsys):
    path = tmp_path / "timeline.json"
    path.write_text(TIMELINES[what])
    assert main(["view", str(path)]) == 2
    assert capsys.readouterr().err.startswith(f"hora view: error: {path} is neither a recorded run nor a timeline")


def test_a_timeline_with_a_superscript_as_rank_is_shown(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_text(
        '[{"ph":"B","pid":1,"name":"a","ts":1},{"ph":"X","pid":1,"name":"²","ts":1},{"ph":"E","pid":1,"ts":5}]'
    )
    assert json.loads(view.as_json(read_timeline(path)), parse_constant=refuse)["tensors"] == [
        ["tensor 1", [[1, 5, 0, 0]]]
    ]
