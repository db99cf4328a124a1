"""A Connect client receives the log of its job's first task, and rejects connections without the key.

If the client cannot be reached, the lines are returned at the end.
"""

from __future__ import annotations

import functools
import io

import pytest

from hora.errors import AuthenticationError
from hora.launch.controller.output import OutputWriter
from hora.launch.job import OutputOptions
from hora.launch.providers.spark.connect import ClientLogSink, Invitation, LiveLog, LogStream
from hora.net.wire import Credentials, connect, new_secret
from waiting import wait_until


def to_streams(stdout, stderr):
    return functools.partial(OutputWriter(OutputOptions(prefix=False, stdout=stdout, stderr=stderr), {}).feed, 0)


def test_lines_reach_the_client_while_the_job_runs():
    out, err = io.StringIO(), io.BytesIO()
    callers = []
    with LiveLog("127.0.0.1", to_streams(out, err), callers.append) as log:
        assert log.invitation.address == "127.0.0.1"
        home = ClientLogSink(log.invitation)
        wait_until("the client has heard of the job", lambda: log.calls == 1)
        stdout, stderr = LogStream(home, "stdout"), LogStream(home, "stderr")
        for stream, text in ((stdout, "grüße\n"), (stderr, "oh\n")):
            stream.write(text.encode())
            stream.flush()
        wait_until("the lines are there", lambda: (out.getvalue(), err.getvalue()) == ("grüße\n", b"oh\n"))
        assert home.close() == {}
        log.show({"stdout": b"late\n", "result": b"1"})
    assert callers == ["127.0.0.1"]
    assert out.getvalue() == "grüße\nlate\n"


def test_a_connection_without_the_key_is_rejected():
    out = io.StringIO()
    with LiveLog("127.0.0.1", to_streams(out, out)) as log:
        where = (log.invitation.address, log.invitation.port)
        with pytest.raises((AuthenticationError, OSError)):
            connect(where, Credentials(new_secret(), log.invitation.job), timeout_s=5.0)
        assert log.calls == 0
    assert out.getvalue() == ""


def test_unsent_lines_are_kept_for_the_end():
    home = ClientLogSink(Invitation("", 0, "job", new_secret()))
    home.write("stdout", b"a line\n")
    assert home.close() == {"stdout": b"a line\n"}
