"""The controller drops an agent that does not answer, but not one whose console is slow.

No process is started: the test plays the agent at the other end of a real session.
"""

from __future__ import annotations

import contextlib
import threading

import pytest

from hora.launch.agent.protocol import MESSAGES, Join, Output, Ping, Start, Taken, Welcome
from hora.launch.controller import agents
from hora.launch.controller.agents import Agents, credentials
from hora.launch.controller.launcher import HostLauncher
from hora.launch.job import WorkerSpec
from hora.launch.slots import Slot
from hora.net.messages import Pong, pack, unpack
from hora.net.session import ClientSession
from hora.net.wire import connect, new_secret
from hora.version import version
from waiting import wait_until

SECRET = new_secret()
SPEC = WorkerSpec(worker=0, slot=Slot("far", 0, 0, 0, 1, 1, 1), argv=("true",), env={}, private_files={})
LIMIT_S = 0.3


class Far:
    """A remote agent."""

    def __init__(self, where: Agents, *, answers: bool) -> None:
        def reach(limit_s):
            return connect(("127.0.0.1", where.port), credentials(SECRET), timeout_s=limit_s)

        self.session = ClientSession(reach(30), reach)
        self.session.send(*pack(Join(0, "far", 1, version(), [], [])))
        assert isinstance(unpack(MESSAGES, *self.session.receive(limit_s=30)), Welcome)
        self.num_pings, self.num_taken, self.started = 0, 0, threading.Event()
        self._answers = answers
        threading.Thread(target=self._obey, daemon=True).start()

    def _obey(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                match unpack(MESSAGES, *self.session.receive()):
                    case Ping():
                        self.num_pings += 1
                        if self._answers:
                            self.session.send(*pack(Pong()))
                    case Start():
                        self.started.set()
                    case Taken(num_bytes):
                        self.num_taken += num_bytes


class Events:
    def __init__(self) -> None:
        self.console_is_free = threading.Event()
        self.ends = []

    def started(self, worker) -> None: ...

    def exited(self, ended) -> None:
        self.ends.append(ended)

    def output(self, worker, stream, data) -> None:
        """Simulate a slow console."""
        self.console_is_free.wait(60)


@pytest.fixture
def opened():
    """Let an agent join and start a worker on it; close both at the end."""
    with contextlib.ExitStack() as stack:

        def join(events: Events, *, answers: bool) -> Far:
            where = Agents(("127.0.0.1", 0), SECRET, num_nodes=1, silence_limit_s=LIMIT_S)
            stack.callback(where.dismiss, 0)
            far = Far(where, answers=answers)
            stack.callback(far.session.close)
            where.wait(30)
            HostLauncher(agents=where).start([SPEC], events)
            assert far.started.wait(30)
            return far

        yield join


def test_an_unresponsive_host_is_named_and_dropped(opened):
    events = Events()
    opened(events, answers=False)
    wait_until("its worker is given up", lambda: events.ends)
    assert [(ended.worker, ended.code) for ended in events.ends] == [(0, 255)]
    assert "host far has not answered for 0.3 s and was given up; raise --silence-timeout" in events.ends[0].reason


def test_a_responsive_host_is_kept(opened):
    events = Events()
    far = opened(events, answers=True)
    wait_until("many beats", lambda: far.num_pings > 5 * agents.BEATS or events.ends)
    assert events.ends == []


def test_a_host_whose_output_waits_for_a_slow_console_is_kept_and_gets_no_acknowledgement(opened):
    events = Events()
    far = opened(events, answers=True)
    far.session.send(*pack(Output(0, "stdout", b"words")))
    wait_until("many beats", lambda: far.num_pings > 4 * agents.BEATS or events.ends)
    assert events.ends == []
    assert far.num_taken == 0
    events.console_is_free.set()
    wait_until("its output was taken", lambda: far.num_taken == 5)
