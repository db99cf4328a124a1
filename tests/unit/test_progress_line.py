"""The line of progress below a cell or in a terminal, and what a notebook shows of an error."""

from __future__ import annotations

import io
import json
import linecache
import sys

import cloudpickle

from hora.errors import JobFailedError
from hora.launch.pickling import pickle_call
from hora.telemetry import Report, Sample
from hora.watch.model import Entry, Run
from hora.watch.progress import ProgressLine, describe, has_place


def _run(num_ranks=2):
    run = Run({"id": "x", "began": 0.0})
    places = [[rank, rank, "alpha"] for rank in range(num_ranks)]
    run.apply(Entry(0.0, "world", -1, json.dumps({"generation": 0, "places": places}).encode()))
    return run


def _trained(total_steps=0, metrics=None):
    run = _run()
    for worker in (0, 1):
        sample = Sample(step=100, num_steps=10, window_s=1.0, step_s=1.0)
        run.apply(Entry(5.0, "report", worker, Report(sample, metrics=metrics or {}, total_steps=total_steps).encode()))
    return run


def test_a_job_in_words():
    assert describe(_run()) == "starting: 0 of 2 ranks are here, 2 ranks"
    assert describe(_trained()) == "2 ranks, step 100, 10 steps/s"
    told = describe(_trained(3100, {"loss": 0.123456, "accuracy": 0.5}))
    assert told == "2 ranks, step 100 of 3,100, 10 steps/s, loss 0.1235, accuracy 0.5, 5 min left"
    run = _trained(100, {"loss": 0.25})
    run.apply(Entry(7260.0, "end", -1, b'{"outcome": "done", "text": ""}'))
    assert describe(run) == "done after 2 h 1 min, 2 ranks, step 100 of 100, loss 0.25"


class _Terminal(io.StringIO):
    def isatty(self):
        return True


def test_other_lines_displace_the_line_in_a_terminal(monkeypatch):
    monkeypatch.setattr("sys.stderr", terminal := _Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    assert has_place()
    line, run = ProgressLine("train"), _trained(3100, {"loss": 0.5})
    line.show(run)
    line.show(run)  # nothing is new
    with line.aside():
        sys.stderr.write("a rank's line\n")
        line.show(_run())  # from another thread: somebody else writes now
    run.apply(Entry(9.0, "end", -1, b'{"outcome": "failed", "text": ""}'))
    line.show(run)
    first, second = "hora: train: 2 ranks, step 100 of 3,10…", "hora: train: failed after 9 s, 2 ranks…"
    assert len(first) == 39
    assert terminal.getvalue() == f"\r\x1b[K{first}\r\x1b[Ka rank's line\n\r\x1b[K{second}\n"


def test_a_file_or_a_pipe_is_no_place(monkeypatch):
    monkeypatch.setattr("sys.stderr", io.StringIO())
    assert not has_place()
    monkeypatch.setattr("sys.stderr", None)
    assert not has_place()


def test_the_cell_of_a_function_travels_with_it():
    name, source = "/tmp/ipykernel_1/no_file.py", "def broken():\n    raise KeyError('island')  # here\n"
    made = {"__name__": "__main__"}
    linecache.cache[name] = (len(source), None, source.splitlines(True), name)
    linecache.cache["/tmp/other_cell.py"] = (1, None, ["token = 'secret'\n"], "/tmp/other_cell.py")
    try:
        exec(compile(source, name, "exec"), made)
        pickled = pickle_call(made["broken"])
        del linecache.cache[name]
        function, args, kwargs = cloudpickle.loads(pickled)
        assert (function.__name__, args, kwargs) == ("broken", (), {})
        assert linecache.getline(name, 2) == "    raise KeyError('island')  # here\n"
        linecache.checkcache(name)  # tracebacks do
        assert linecache.getline(name, 2)
        assert b"secret" not in pickled
    finally:
        linecache.cache.pop(name, None)
        linecache.cache.pop("/tmp/other_cell.py")


def test_a_notebook_shows_the_ranks_traceback_alone():
    error = JobFailedError(
        "many lines", rank=1, exit_code=1, remote_traceback='Traceback:\n  File "x.py", line 1\nE: e\n'
    )
    assert error._render_traceback_() == [
        "JobFailedError: rank 1 of the job has failed:",
        "",
        "Traceback:",
        '  File "x.py", line 1',
        "E: e",
    ]
    assert JobFailedError("killed by SIGKILL", rank=1)._render_traceback_() == ["JobFailedError: killed by SIGKILL"]
