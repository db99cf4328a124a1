"""Leadership of a job whose state is in a store: elections, leases, and the state for the next leader.

The process of every node stands for election (`ElectionLoop`); the winner leads while it renews its lease. A leader
that cannot renew it (the store is unreachable, the process was stopped) must stop giving orders and detects this by its
own clock: `check` runs before every decision. State that must survive is written to the store, which refuses former
leaders, before any worker acts on it.

    following --no leader--> standing --won--> leading --lease lost--> following
    any --the job is over--> over
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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hora.launch.agent.agent import LEFT
from hora.launch.controller.launcher import wait_or_kill
from hora.launch.ha.etcd import Etcd
from hora.launch.ha.kubernetes import LeaseStore
from hora.launch.ha.store import AuthenticatedStore, Contents, JobStore, LeaderTerm, StoreError
from hora.launch.job import LeadershipLostError, exit_status
from hora.launch.options import Options
from hora.launch.processes import ended_by_signals, module_command
from hora.net import sockets
from hora.net.wire import derived_secret, new_secret
from hora.platforms.node import Node

if TYPE_CHECKING:
    from hora.launch.controller.agents import Agents
    from hora.launch.controller.launcher import HostLauncher

_OVER_S = 120  # how long the other nodes can read the job's outcome

_log = logging.getLogger("hora.launch")


def now_s() -> float:
    """Return seconds of a clock that includes suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def open_store(url: str, environ: Mapping[str, str]) -> Etcd | LeaseStore:
    """Open the store that `HORA_STORE` names. ValueError, without the password, if the URL is invalid.

    `etcd://user:password@host:2379,host2:2379/prefix`; `etcds://`, or `?ca=FILE&cert=FILE&key=FILE`, is TLS. Inside
    Kubernetes `kubernetes://name`: a Lease and a Secret of that name. `?ttl=3` says after how many seconds a leader
    that does not renew its lease is replaced.
    """
    return LeaseStore.from_url(url, environ) if url.startswith("kubernetes:") else Etcd.from_url(url)


def own_address(hosts: Iterable[tuple[str, int]]) -> str:
    """Return the address of this machine for other nodes: the one from which it reaches these hosts."""
    for host, _ in hosts:
        for found in sockets.resolve(host):
            with contextlib.suppress(OSError):
                return sockets.source_address(found)
    return "127.0.0.1"


def next_step(found: Contents, former: str) -> str | int:
    """Decide what a node that does not lead does next: `follow`, `stand` for election, or end with the job's status.

    `former`: the run of the job that had already ended when the node started.
    """
    over = found.values.get("over")
    if over is not None and over["run"] != former:
        return int(over["status"])
    return "follow" if found.term else "stand"


class Leadership:
    """A term as leader, until it is resigned or lost. `term`: its number, greater than all before.

    `run`: the id of the job's run; `state`: saved by the previous leader, None for the first one. `followed`: this
    process has seen that one, so the run did not end long ago. `agents` and `launcher`: of this leader, once it has
    them.
    """

    agents: Agents
    launcher: HostLauncher
    leaderless_s = 0.0  # the workers' relay waits

    def __init__(self, store: JobStore, leader: LeaderTerm, *, since_s: float) -> None:
        self.store, self.term = store, leader.term
        self.state: dict[str, Any] | None = None
        self.run, self.followed = "", False
        self._lost: Callable[[], None] = lambda: None
        self._leader, self._ttl_s = leader, store.ttl_s
        self._valid_until = since_s + store.ttl_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="hora-leadership", daemon=True)

    @classmethod
    def won(cls, store: JobStore, name: str) -> Leadership | None:
        """Stand for election; return None if another process leads. Raises StoreError."""
        since_s = now_s()
        leader = store.lead(name)
        if leader is None:
            return None
        leadership = cls(store, leader, since_s=since_s)
        leadership._thread.start()
        return leadership

    def check(self) -> None:
        """Raise LeadershipLostError unless this process certainly leads."""
        if self._over.is_set() or now_s() >= self._valid_until:
            raise LeadershipLostError

    def watch(self, lost: Callable[[], None]) -> None:
        """Call `lost`, from any thread, when this process no longer leads."""
        self._lost = lost

    def save(self, state: Mapping[str, Any]) -> None:
        """Save the state for the next leader. Raises LeadershipLostError if this process no longer leads."""
        self.put("state", {**state, "run": self.run})

    def put(self, key: str, value: Mapping[str, Any], *, lasting_s: int = 0) -> None:
        """Write a value for the other nodes. LeadershipLostError: another leads, or it cannot be written in time."""
        while True:
            self.check()
            try:
                if self.store.put(key, value, term=self.term, lasting_s=lasting_s):
                    return
                raise LeadershipLostError
            except StoreError as error:
                _log.warning("%s; trying again", error)
                time.sleep(self._ttl_s / 10)

    def end(self, status: int) -> None:
        """The job is over: the other nodes end with this status."""
        try:
            self.put("over", {"run": self.run, "status": status}, lasting_s=_OVER_S)
            self.store.delete("state", term=self.term)
        except (LeadershipLostError, StoreError) as error:
            _log.warning("the other nodes could not be told that the job is over (%s)", error or type(error).__name__)

    def resign(self) -> None:
        """Give up the leadership. Idempotent."""
        self._over.set()
        self._thread.join(self._ttl_s + 10.0)
        with contextlib.suppress(StoreError):  # it expires by itself
            self.store.resign(self._leader)

    def abandon(self) -> None:
        """Tell the controller that the leadership is lost. Thread-safe."""
        if not self._over.is_set():
            self._over.set()
            self._lost()

    def _renew(self) -> None:
        while not self._over.wait(self._ttl_s / 3):
            asked_s = now_s()
            try:
                if not self.store.renew(self._leader):
                    break
                self._valid_until = asked_s + self._ttl_s
            except StoreError as error:
                if now_s() < self._valid_until:
                    continue
                _log.warning("%s", error)
                break
        self.abandon()


_AGENT_LIMIT_S, _OVER_LIMIT_S = 60.0, 10.0


class ElectionLoop:
    """The process of a node: follows the leader and stands for election. ValueError: the store's URL is invalid."""

    def __init__(self, options: Options, environ: Mapping[str, str], place: Node, secret: bytes) -> None:
        self._options, self._environ, self._place, self._secret = options, environ, place, secret
        # All nodes derive the same keys, which reveal nothing about the job.
        self._job = derived_secret(secret, f"hora store {place.host}:{place.port}").hex()[:24]
        self._store = AuthenticatedStore(open_store(environ["HORA_STORE"], environ).below(self._job), secret)
        self._poll_s = self._store.ttl_s / 3
        self._leaderless_s = float(options.effective("elastic_timeout"))
        self._left = False
        self._leadership: Leadership | None = None
        self._former = ""  # the run that was over before this one
        self._followed = ""  # the run in which this process has seen a leader

    def run(self, lead: Callable[[Leadership], object]) -> int:
        """Take part until the job is over; return its exit status. RuntimeError: the store is silent for too long."""
        self._former = self._first_look()
        with self._agent() as agent, ended_by_signals() as signals:
            seen_at, complained = time.monotonic(), False
            while True:
                signals.first = lambda: self._leave(agent)
                step: str | int = "follow"
                try:
                    found = self._store.read()
                    if found.term and "state" in found.values:
                        self._followed = str(found.values["state"]["run"])
                    step = next_step(found, self._former)
                    seen_at, complained = time.monotonic(), False
                except StoreError as error:
                    if not complained:
                        _log.warning("%s; the ranks go on", error)
                    complained = True
                if isinstance(step, int):
                    return step
                if step == "stand" and not self._left:
                    if self._stand(lead):
                        return 0
                    seen_at = time.monotonic()
                if agent.poll() is not None:
                    return self._without_agent(agent)
                if time.monotonic() > seen_at + self._leaderless_s:
                    raise RuntimeError(
                        f"the store (HORA_STORE) has not answered for {self._leaderless_s:g} s (--elastic-timeout)"
                    )
                time.sleep(self._poll_s)

    def _first_look(self) -> str:
        """Return the run that ended before this one. Raises RuntimeError if the store cannot be used."""
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
            module_command(sys.executable, "hora.launch.ha.following", self._job, str(self._place.index)),
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
            with contextlib.suppress(subprocess.TimeoutExpired):  # an agent without a leader has nothing to wait for
                agent.wait(_OVER_LIMIT_S)
        finally:
            agent.terminate()
            wait_or_kill(agent, _AGENT_LIMIT_S)

    def _leave(self, agent: subprocess.Popen[bytes]) -> None:
        """Handle a request to end, in a signal handler: the ranks here commit and leave, then another node leads."""
        self._left = True
        agent.terminate()

        def hand_over() -> None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                agent.wait(self._leaderless_s)
            if self._leadership is not None:
                self._leadership.abandon()

        threading.Thread(target=hand_over, name="hora-hand-over", daemon=True).start()

    def _stand(self, lead: Callable[[Leadership], object]) -> bool:
        """Stand for election and lead if it is won; return whether the job has succeeded."""
        try:
            leadership = Leadership.won(self._store, self._place.name)
            if leadership is None:
                return False
            state = self._store.read().values.get("state")
        except StoreError as error:
            _log.warning("%s", error)
            return False
        leadership.state = None if state is None else dict(state)
        leadership.run = new_secret().hex() if state is None else str(state["run"])
        leadership.followed, self._followed = leadership.run == self._followed, leadership.run
        self._leadership, status = leadership, 0
        try:
            lead(leadership)
            return True
        except LeadershipLostError:
            _log.warning("this process does not lead the job any more; its ranks go on")
            status = -1
            return False
        except BaseException as error:
            status = exit_status(error)
            raise
        finally:
            self._leadership = None
            if status >= 0:
                leadership.end(status)
            leadership.resign()

    def _without_agent(self, agent: subprocess.Popen[bytes]) -> int:
        """Handle the agent's end: the job is over, this process was asked to end, or the agent was killed."""
        if self._left:
            return LEFT
        assert agent.stdout is not None
        said = agent.stdout.read()
        if not said:
            raise RuntimeError("the agent of this node's workers has ended, and they with it")
        return int(said)
