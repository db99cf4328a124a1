"""The process of a node whose job's state is in a store: follows the leader, stands for election when there is none,
leads.

It starts the node's agent, which holds the workers: this process may be killed, and they train on. Whoever leads
prints what the ranks print. It ends with the status of the job.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping

from hora.launch.agent.agent import LEFT
from hora.launch.controller.agents import wait_or_kill
from hora.launch.controller.loop import ended_by_signals
from hora.launch.environment import module_command
from hora.launch.ha.authenticated import AuthenticatedStore
from hora.launch.ha.leadership import Leadership, Over, View, next_step, open_store
from hora.launch.ha.store import StoreError
from hora.launch.job import LeadershipLostError, exit_status
from hora.launch.options import Options
from hora.launch.slots import NodeSpec
from hora.net.wire import derived_secret, new_secret

__all__ = ["ElectionLoop"]

_AGENT_LIMIT_S, _OVER_LIMIT_S = 60.0, 10.0

_log = logging.getLogger("hora.launch")


class ElectionLoop:
    """`place`: this node's. ValueError for a store that cannot be meant."""

    def __init__(self, options: Options, environ: Mapping[str, str], place: NodeSpec, secret: bytes) -> None:
        self._options, self._environ, self._place, self._secret = options, environ, place, secret
        # All nodes find the same keys, which tell nobody else what they are for.
        self._job = derived_secret(secret, f"hora store {place.host}:{place.port}").hex()[:24]
        self._store = AuthenticatedStore(open_store(environ["HORA_STORE"], environ).below(self._job), secret)
        self._poll_s = self._store.ttl_s / 3
        self._leaderless_s = float(options.effective("elastic_timeout"))
        self._left = False
        self._leadership: Leadership | None = None
        self._former = ""  # the run that was over before this one
        self._followed = ""  # the run in which this process has seen a leader

    def run(self, lead: Callable[[Leadership], object]) -> int:
        """Take part in the job until it is over; its status.

        RuntimeError when the store cannot be reached for too long.
        """
        self._former = self._first_look()
        with self._agent() as agent, ended_by_signals() as signals:
            seen_at, complained = time.monotonic(), False
            while True:
                signals.first = lambda: self._leave(agent)
                step: str | Over = "follow"
                try:
                    found = self._store.read()
                    if found.term and "state" in found.values:
                        self._followed = str(found.values["state"]["run"])
                    step = next_step(View(bool(found.term), found.values.get("over"), self._former))
                    seen_at, complained = time.monotonic(), False
                except StoreError as error:
                    if not complained:
                        _log.warning("%s; the ranks go on", error)
                    complained = True
                if isinstance(step, Over):
                    return step.status
                if step == "stand" and not self._left:
                    status = self._stand(lead)
                    if status is not None:
                        return status
                    seen_at = time.monotonic()
                if agent.poll() is not None:
                    return self._without_agent(agent)
                if time.monotonic() > seen_at + self._leaderless_s:
                    raise RuntimeError(
                        f"the store (HORA_STORE) has not answered for {self._leaderless_s:g} s (--elastic-timeout)"
                    )
                time.sleep(self._poll_s)

    def _first_look(self) -> str:
        """The run that was over before this one. RuntimeError when the store cannot be used."""
        deadline = time.monotonic() + float(self._options.effective("start_timeout"))
        while True:
            try:
                return str(self._store.read().values.get("over", {}).get("run", ""))
            except StoreError as error:
                if "refuses" in str(error) or time.monotonic() > deadline:
                    raise RuntimeError(str(error)) from None
                time.sleep(self._poll_s)

    @contextlib.contextmanager
    def _agent(self) -> Iterator[subprocess.Popen[bytes]]:
        order = {
            "node": {"node": self._place.index, "name": self._place.name, "slots": self._place.slots or 1},
            "secret": self._secret.hex(),
            "store": self._environ["HORA_STORE"],
            "job": self._job,
            "leaderless_s": self._leaderless_s,
            "orphaned_s": float(self._options.effective("launcher_timeout")),
            "poll_s": self._poll_s,
            "parent": os.getpid(),
            "former": self._former,
        }
        env = {name: value for name, value in self._environ.items() if name != "HORA_STORE"}
        agent = subprocess.Popen(
            module_command(sys.executable, "hora.launch.ha.following"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
        assert agent.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(json.dumps(order).encode() + b"\n")
                agent.stdin.close()
            yield agent
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that no leader has taken has nothing to wait for
                agent.wait(_OVER_LIMIT_S)
        finally:
            agent.terminate()
            wait_or_kill(agent, _AGENT_LIMIT_S)

    def _leave(self, agent: subprocess.Popen[bytes]) -> None:
        """Asked to end: the ranks here commit and leave, and then another node leads. In a signal's handler."""
        self._left = True
        agent.terminate()
        threading.Thread(target=self._hand_over, args=(agent,), name="hora-hand-over", daemon=True).start()

    def _hand_over(self, agent: subprocess.Popen[bytes]) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(self._leaderless_s)
        if self._leadership is not None:
            self._leadership.give_up()

    def _stand(self, lead: Callable[[Leadership], object]) -> int | None:
        """Stand for election and, if it is won, lead; the job's status when it is over."""
        try:
            leadership = Leadership.won(self._store, self._place.name)
            if leadership is None:
                return None
            state = self._store.read().values.get("state")
        except StoreError as error:
            _log.warning("%s", error)
            return None
        leadership.state = None if state is None else dict(state)
        leadership.run = new_secret().hex() if state is None else str(state["run"])
        leadership.followed, self._followed = leadership.run == self._followed, leadership.run
        self._leadership, status = leadership, 0
        try:
            lead(leadership)
            return 0
        except LeadershipLostError:
            _log.warning("this process does not lead the job any more; its ranks go on")
            status = -1
            return None
        except BaseException as error:
            status = exit_status(error)
            raise
        finally:
            self._leadership = None
            if status >= 0:
                leadership.end(status)
            leadership.resign()

    def _without_agent(self, agent: subprocess.Popen[bytes]) -> int:
        """The agent has ended: because the job is over, as it has heard, because we were asked to end, or it was
        killed.
        """
        if self._left:
            return LEFT
        assert agent.stdout is not None
        said = agent.stdout.read()
        if not said:
            raise RuntimeError("the agent of this node's workers has ended, and they with it")
        return int(said)
