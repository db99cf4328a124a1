"""The reporter of a rank: samples, pending operations, stacks on demand, and its end without a launcher."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest

from hora import engine, labs
from hora.telemetry import Meter
from hora.telemetry.parsing import parse_report, parse_stacks
from hora.telemetry.reporter import Machine, Reporter
from hora.telemetry.stacks import current_line, current_stacks, profile, rank_condition


class _Launcher:
    def __init__(self, num_answers=10**9):
        self.messages, self.left, self.news = [], num_answers, threading.Event()

    def take(self, kind, data):
        if self.left == 0:
            raise ConnectionError("gone")
        self.left -= 1
        self.messages.append((kind, data))
        self.news.set()


def test_reports_are_sent_periodically_and_the_rest_at_the_end():
    launcher, meter = _Launcher(), Meter()
    reporter = Reporter(meter, launcher.take, machine=True)
    meter.step_done()
    meter.report({"loss": 1.5})
    reporter.start(0.02)
    assert launcher.news.wait(10)
    meter.step_done()
    reporter.stop()
    reports = [parse_report(data) for kind, data in launcher.messages]
    assert sum(report.sample.num_steps for report in reports) == 2
    assert reports[0].metrics == {"loss": 1.5}
    assert reports[0].host["memory_total"] > reports[0].host["memory"] > 0
    assert reports[0].sample.memory_bytes > 1e6


def test_a_report_names_the_operation_that_the_training_thread_waits_in():
    meter = Meter()
    reporter = Reporter(meter, _Launcher().take, machine=False)
    meter.blocked = ("allreduce.g", time.perf_counter() - 3.0, [0, 1])
    name, waited_s, ranks = reporter.report().waiting
    assert (name, ranks) == ("allreduce.g", (0, 1))
    assert waited_s == pytest.approx(3.0, abs=1.0)
    meter.blocked = ("allreduce.g", time.perf_counter(), [])  # every collective waits briefly
    assert reporter.report().waiting is None


def test_unsent_events_are_left_to_the_next_reporter():
    meter = Meter()
    meter.event("lost", "rank 1")
    meter.event("resumed", "1 rank continues")
    first = Reporter(meter, _Launcher(num_answers=0).take, machine=False)
    first.start(0.01)
    first._thread.join(10)
    assert Reporter(meter, _Launcher().take, machine=False).report().events == (
        ("lost", "rank 1"),
        ("resumed", "1 rank continues"),
    )


def test_the_reporter_ends_quietly_without_a_launcher():
    reporter = Reporter(Meter(), _Launcher(num_answers=1).take, machine=False)
    reporter.start(0.01)
    reporter._thread.join(10)
    assert not reporter._thread.is_alive()
    reporter.answer({"question": "stack"})


def test_stacks_name_the_line_of_each_thread():
    waiting, go_on = threading.Event(), threading.Event()

    def stuck_here():
        waiting.set()
        go_on.wait(30)

    thread = threading.Thread(target=stuck_here, name="stuck")
    thread.start()
    waiting.wait(10)
    launcher = _Launcher()
    asking = threading.Thread(
        target=Reporter(Meter(), launcher.take, machine=False).answer, args=({"question": "stack"},)
    )
    asking.start()
    asking.join(10)
    go_on.set()
    thread.join()
    ((kind, data),) = launcher.messages
    assert kind == "stack"
    threads = dict(map(tuple, json.loads(data)["threads"]))
    assert next(iter(threads)) == "MainThread"
    assert ("stuck_here", "go_on.wait(30)") in [(name, code) for _, _, name, code, _ in threads["stuck"]]
    assert "test_stacks_name_the_line" in parse_stacks(data).text


def test_a_profile_finds_the_busiest_frame():
    answers = []
    thread = threading.Thread(target=lambda: answers.append(json.loads(profile(0.5))))
    thread.start()
    until = time.monotonic() + 0.7
    while time.monotonic() < until:
        time.sleep(0.05)
    thread.join()
    (found,) = answers
    assert found["num_samples"] > 3
    count, frames = found["stacks"][0]
    assert count > 0.5 * found["num_samples"]
    assert frames[0][2] == "test_a_profile_finds_the_busiest_frame"


def test_a_measured_link_is_reported_with_the_machine():
    measured, launcher = Meter(), _Launcher()
    assert "link" not in Reporter(measured, launcher.take, machine=True).report().host
    measured.link_bytes_per_s = 12.5e6
    assert Reporter(measured, launcher.take, machine=True).report().host["link"] == 12_500_000
    assert not Reporter(measured, launcher.take, machine=False).report().host


def test_unknown_questions_are_ignored():
    launcher = _Launcher()
    reporter = Reporter(Meter(), launcher.take, machine=False)
    reporter.answer({"question": "dance"})
    reporter.answer({})
    assert launcher.messages == []


def test_the_asking_threads_own_frames_are_omitted():
    assert "current_stacks" not in current_stacks().decode()


def test_a_machine_is_described():
    machine = Machine()
    time.sleep(0.05)
    facts = machine.facts()
    assert facts["num_cpus"] >= 1
    assert facts["memory_total"] > 1e8
    assert facts["net_in"] >= 0
    json.dumps(facts)


def test_a_frame_without_a_line_number_is_shown_at_the_start_of_its_function():
    began, done = threading.Event(), threading.Event()
    code = compile("began.set(); done.wait(60)", "made_up.py", "exec").replace(co_linetable=b"")
    thread = threading.Thread(target=exec, args=(code, {"began": began, "done": done}), name="without a line")
    thread.start()
    assert began.wait(60)
    try:
        stacks = dict(json.loads(current_stacks())["threads"])
    finally:
        done.set()
        thread.join()
    assert ["made_up.py", 1, "<module>", "", "user"] in stacks["without a line"]


@pytest.mark.parametrize(
    "file",
    [
        "train.py",
        "/home/me/hora/train.py",
        "/home/me/hora/engine/train.py",
        "/home/me/horovod/examples/train.py",
        "/srv/lib/python3-projects/train.py",
        "/srv/site-packages-mirror/train.py",
        str(Path(labs.__file__).with_name("train.py")),
    ],
)
def test_a_users_line_is_named_whatever_its_folder_is_called(file):
    found = {}
    exec(compile("line = current_line()", file, "exec"), {"current_line": current_line}, found)
    assert found["line"] == f"{file}:1 in <module>"


def test_frames_say_where_their_code_comes_from():
    """A frame of the engine under one of torch under one of the script."""
    files = {
        "engine": engine.__file__,
        "torch": str(Path(pytest.__file__).parents[1] / "torch" / "optim" / "sgd.py"),
        "standard": threading.__file__,
        "script": "/home/me/hora/engine/train.py",
    }
    began, done = threading.Event(), threading.Event()
    names: dict[str, object] = {"inner": lambda: (began.set(), done.wait(60))}
    for name, file in files.items():
        exec(compile(f"def {name}(inner=inner): inner()", file, "exec"), names)
        names["inner"] = names[name]
    thread = threading.Thread(target=names["inner"], name="nested")
    thread.start()
    assert began.wait(60)
    try:
        frames = dict(json.loads(current_stacks())["threads"])["nested"]
    finally:
        done.set()
        thread.join()
    origins = {name: origin for _, _, name, _, origin in frames if name in files}
    assert origins == {"engine": "engine", "torch": "library", "standard": "library", "script": "user"}


def test_the_condition_that_only_some_ranks_meet_is_named(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "def log():\n    return rank_condition()\n\nif hvd.rank() == 0:\n    only_there = log()\neverywhere = log()\n"
    )

    class hvd:  # noqa: N801
        rank = staticmethod(lambda: 0)

    found = {"hvd": hvd, "rank_condition": rank_condition}
    exec(compile(file.read_text(), str(file), "exec"), found)
    assert found["only_there"] == f"`if hvd.rank() == 0:` at {file}:4"
    assert found["everywhere"] == ""


def test_a_stack_that_waits_in_a_collective_ends_at_the_line_that_called_it():
    user, ours, engine = (
        ["train.py", 7, "main", "hvd.barrier()", "user"],
        ["ops.py", 331, "barrier", "", "library"],
        ["queue.py", 9, "wait", "", "engine"],
    )
    stacks = parse_stacks(json.dumps({"threads": [["MainThread", [engine, ours, user]]]}).encode())
    assert stacks.text == '  File "train.py", line 7, in main\n    hvd.barrier()'
    stacks = parse_stacks(json.dumps({"threads": [["MainThread", [ours, user]]]}).encode())
    assert stacks.text.endswith('File "ops.py", line 331, in barrier'), "a rank that computes, somewhere in a library"
