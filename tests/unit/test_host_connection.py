"""A host's signs of life, seen from the launcher: who does not answer is given up, whom we do not listen to is not."""

from __future__ import annotations

import io
import os
import subprocess
import threading

import pytest

from hora.launch.agent import supervisor
from hora.launch.controller import host as connection
from hora.launch.controller.host import HostConnection
from hora.launch.job import WorkerSpec
from hora.launch.slots import Slot
from waiting import wait_until

ANSWER = supervisor.FRAME.pack(supervisor.ALIVE, supervisor.NO_WORKER, 0)
SPEC = WorkerSpec(worker=0, slot=Slot("far", 0, 0, 0, 1, 1, 1), argv=("true",), env={}, private_files={})
LIMIT_S = 0.06


class Orders(io.RawIOBase):
    """What the launcher sends; every sign of life may be answered."""

    def __init__(self, answers: int | None) -> None:
        super().__init__()
        self._answers = answers
        self.num_beats = 0

    def write(self, data) -> int:
        self.num_beats += bytes(data).count(b'"alive"')
        if self._answers is not None:
            os.write(self._answers, ANSWER)
        return len(data)


class Far:
    """A supervisor elsewhere, played by this test."""

    def __init__(self, *, answers: bool) -> None:
        read_end, self.says = os.pipe()
        self.stdout = os.fdopen(read_end, "rb", buffering=0)
        read_end, self._complains = os.pipe()
        self.stderr = os.fdopen(read_end, "rb", buffering=0)
        self.stdin = Orders(self.says if answers else None)
        self._ended = threading.Event()

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired("far", timeout or 0)
        return -9

    def kill(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            os.close(self.says)
            os.close(self._complains)


class Events:
    def __init__(self) -> None:
        self.console_is_free = threading.Event()
        self.ends = []

    def started(self, worker) -> None: ...

    def exited(self, ended) -> None:
        self.ends.append(ended)

    def output(self, worker, stream, data) -> None:
        """A console that takes its time."""
        self.console_is_free.wait(60)


@pytest.fixture
def opened():
    """Open a host and say that its supervisor runs; closed at the end."""
    hosts = []

    def open_host(far: Far, events: Events) -> HostConnection:
        hosts.append(HostConnection("far", events, process=far, silence_limit_s=LIMIT_S))
        os.write(far.says, supervisor.MARK)
        hosts[-1].start([SPEC])
        return hosts[-1]

    yield open_host
    for host in hosts:
        host.wait(0.01)


def test_a_host_that_does_not_answer_is_named_and_given_up(opened):
    far, events = Far(answers=False), Events()
    opened(far, events)
    wait_until("its worker is given up", lambda: events.ends)
    assert [(ended.worker, ended.code) for ended in events.ends] == [(0, 255)]
    assert "host far has not answered for 0.06 s and was given up; raise --silence-timeout" in events.ends[0].reason


def test_a_host_that_answers_is_kept(opened):
    far, events = Far(answers=True), Events()
    host = opened(far, events)
    wait_until("many beats", lambda: far.stdin.num_beats > 5 * connection._BEATS or host.ended)
    assert not host.ended
    assert events.ends == []


def test_a_host_whose_output_waits_for_a_slow_console_is_kept(opened):
    """It would not answer, but we would not hear it either."""
    far, events = Far(answers=False), Events()
    host = opened(far, events)
    os.write(far.says, supervisor.FRAME.pack(supervisor.STDOUT, 0, 5) + b"words")
    wait_until("many beats", lambda: far.stdin.num_beats > 4 * connection._BEATS or host.ended)
    assert not host.ended
    events.console_is_free.set()


def test_one_that_has_not_started_yet_is_left_to_the_start_timeout(opened):
    far, events = Far(answers=False), Events()
    host = HostConnection("far", events, process=far, silence_limit_s=LIMIT_S)
    wait_until("many beats", lambda: far.stdin.num_beats > 3 * connection._BEATS or host.ended)
    assert not host.ended
    host.wait(0.01)
