"""The client of a Connect job: silence is said and ends nothing, an interrupt reaches the cluster, errors have a name."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hora.errors import JobFailedError
from hora.launch.spark.connect import _result, _Stage


class Session:
    """Stands in for a Connect session whose one query takes as long as the test wants."""

    def __init__(self, rows: list[Any], error: Exception | None = None) -> None:
        self.rows, self.error, self.go_on, self.interrupted = rows, error, threading.Event(), []

    def addTag(self, tag):  # noqa: N802 - Spark's name
        self.tag = tag

    def interruptTag(self, tag):  # noqa: N802 - Spark's name
        self.interrupted.append(tag)
        self.go_on.set()

    def range(self, *_):
        return self

    def mapInArrow(self, *_, barrier):  # noqa: N802 - Spark's name
        assert barrier
        return self

    def collect(self):
        assert self.go_on.wait(60)
        if self.error is not None:
            raise self.error
        return self.rows


class Tasks:
    num_proc = 2


class Quiet(threading.Event):
    """Never set; lets the query end once it has been asked for."""

    def __init__(self, session, what=lambda: None):
        super().__init__()
        self._session, self._what = session, what

    def is_set(self):
        self._what()
        threading.Timer(0.5, self._session.go_on.set).start()
        return False


def test_silence_is_said_and_the_job_goes_on(caplog):
    session = Session([("result", 1, b"b"), ("result", 0, b"a"), ("stdout", 0, b"x")])
    rows = _Stage(session, Tasks(), "tag").run(0.0, Quiet(session))
    assert rows == {"result": b"ab", "stdout": b"x"}
    assert "nothing was heard of the first task of tag" in caplog.text
    assert session.interrupted == []


def test_an_interrupt_reaches_the_cluster():
    def interrupt():
        raise KeyboardInterrupt

    session = Session([])
    with pytest.raises(KeyboardInterrupt):
        _Stage(session, Tasks(), "tag").run(0.0, Quiet(session, interrupt))
    assert session.interrupted == ["tag"]


def test_a_failed_query_is_a_failed_job():
    session = Session([], RuntimeError("no such cluster"))
    session.go_on.set()
    with pytest.raises(JobFailedError, match="Spark job has failed: no such cluster"):
        _Stage(session, Tasks(), "tag").run(60.0, threading.Event())
    with pytest.raises(JobFailedError, match="no result"):
        _result({})
