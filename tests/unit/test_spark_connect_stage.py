"""The client of a Connect job: silence is only logged, an interrupt reaches the cluster, errors are named."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from hora.errors import JobFailedError
from hora.launch.providers.spark.connect import Query, _result, _Watch


class Session:
    """Replaces a Connect session; its one query takes as long as the test wants."""

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


class Log:
    """Replaces the client's log server; `calls` first tasks have connected."""

    def __init__(self, calls: int) -> None:
        self.calls = calls


def query(session):
    return Query(session, lambda batches: iter(()), num_tasks=2, name="job", barrier=True)


def test_silence_is_logged_and_the_job_continues(caplog):
    session = Session([("result", 1, b"b"), ("result", 0, b"a"), ("stdout", 0, b"x")])
    asked = query(session)
    watch = _Watch(Log(0), asked.tag, 2, limit_s=0.0)

    def watch_once():
        watch()
        session.go_on.set()

    assert asked.run(watch_once) == {"result": b"ab", "stdout": b"x"}
    assert f"nothing was heard of the first task of {asked.tag}" in caplog.text
    assert session.interrupted == []


def test_an_interrupt_reaches_the_cluster():
    def interrupt():
        raise KeyboardInterrupt

    session = Session([])
    asked = query(session)
    with pytest.raises(KeyboardInterrupt):
        asked.run(interrupt)
    assert session.interrupted == [asked.tag]


def test_a_job_restarted_by_spark_is_ended():
    session = Session([])
    asked = query(session)
    with pytest.raises(JobFailedError, match="lost an executor"):
        asked.run(_Watch(Log(2), asked.tag, 2, limit_s=60.0))
    assert session.interrupted == [asked.tag]


def test_a_failed_query_fails_the_job():
    session = Session([], RuntimeError("no such cluster"))
    session.go_on.set()
    with pytest.raises(JobFailedError, match="Spark job has failed: no such cluster"):
        query(session).run()
    with pytest.raises(JobFailedError, match="no result"):
        _result({})


def test_a_client_that_cannot_interrupt_gets_the_required_version():
    with pytest.raises(ValueError, match=r"Spark 3\.5 or newer"):
        query(object())


def test_a_client_older_than_spark_3_5_is_rejected_with_an_explanation():
    with pytest.raises(ValueError, match=r"need Spark 3\.5 or newer.*classic mode"):
        query(object())
