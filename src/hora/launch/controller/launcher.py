"""The launcher for hosts: an agent on each of them starts the workers, forwards their output and ends them.

`AgentHandle` sends orders to one agent and passes its reports on to the job's events; the messages are in
`agent.protocol`. `LocalAgent` is the agent of this machine: a child process at the other end of a socket. Agents on
other nodes connect by themselves (`agents`). Without them all workers run on this machine, under one agent, and nothing
listens off loopback.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

from hora.launch.agent.protocol import (
    MESSAGES,
    Exited,
    Finish,
    Finished,
    Join,
    Message,
    Output,
    Ping,
    Quit,
    Start,
    Started,
    Taken,
    Terminate,
)
from hora.launch.environment import variables
from hora.launch.job import LaunchEvents, WorkerSpec
from hora.launch.limits import END_S, GRACE_S, KILLED_S
from hora.launch.processes import family, is_stopped, send_to_all
from hora.launch.slots import HostInfo
from hora.launch.tail import Tail
from hora.net.messages import Frames, frame, pack
from hora.net.session import SessionPeer

BEATS = 6  # heartbeats within the time after which a silent node is dropped
_READ_BYTES, _TAIL_BYTES = 256 * 1024, 4096
# Variables that another machine must not get: functions of our shell, our directories and devices, a foreign secret.
_PRIVATE = re.compile(r"BASH_FUNC_.*|OLDPWD|.*CUDA_VISIBLE_DEVICES|_HOROVOD_SECRET_KEY")

# Isolated and without site-packages, which is faster.
_RUN_AGENT = """
import sys
sys.path.append(sys.argv.pop(1))
from hora.launch.agent.agent import serve_locally
sys.exit(serve_locally())
"""


def wait_or_kill(process: subprocess.Popen[Any] | LocalProcess, limit_s: float) -> int:
    """Return the exit status of a process that is about to end. Kill it after the time limit."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(KILLED_S)


class AgentHandle:
    """One agent. States: expected (orders are queued) -> joined -> over.

    `workers`: those that were ever started there: reports about others are invalid. `inherit_env`: they inherit the
    agent's environment. `number`, `host`, `gpus`: its node's number, machine and GPUs, as the agent says.
    """

    inherit_env = True
    lost_exit_code = 255  # of workers whose agent is gone
    forks_one = False  # a single worker is forked, too, if it may be

    def __init__(
        self,
        name: str,
        slots: int = 1,
        workers: Collection[int] = (),
        *,
        number: int = -1,
        host: str = "",
        gpus: Sequence[str] = (),
    ) -> None:
        self.name, self.slots, self.workers = name, slots, set(workers)
        self.number, self.host, self.gpus = number, host or name, tuple(gpus)
        self.leaving = self.dismissed = False
        self.joining: Join | None = None  # how it has introduced itself
        self.remembered = (0, 0)  # the term and number of the newest state that it has (`succession`)
        self.complaints = Tail(_TAIL_BYTES)
        self.peer: SessionPeer | None = None
        self.failed = ""  # the message of a job whose provider could not start this agent
        self.status: int | None = None  # once it is over
        self._events: LaunchEvents | None = None
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._unsent: list[Message] = []
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._has_fork_server = self.forks_one
        self._ended: str | None = None  # why nothing can be started here any more
        self._finished = threading.Event()
        self._reported = threading.Event()
        self._unanswered = 0  # heartbeats since the last report

    # ---- orders ---------------------------------------------------------------------------------------------

    def look_after(self, events: LaunchEvents, ours: Collection[int] = ()) -> None:
        """Report to these events from now on. `ours`: workers that already run there for this controller."""
        self._events, self._running = events, set(ours)
        threading.Thread(target=self._deliver, name=f"hora-agent {self.name}", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Return whether the agent is gone or out of reach; exits may still be reported."""
        return self.status is not None or self._ended is not None

    @property
    def address(self) -> str:
        """Return the address from which the agent has connected."""
        return "unknown" if self.peer is None else self.peer.host

    def dismiss(self, status: int) -> None:
        """Have the agent end everything, and then itself with this status. Does not wait."""
        self.dismissed = True
        self.send(Quit(status))

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        assert self._events is not None
        # A single worker is not worth a fork server, but a new worker of an elastic job may use an existing one.
        wanted = len(workers) > 1 or any(spec.forks_one for spec in workers)
        self._has_fork_server = self._has_fork_server or wanted
        with self._lock:
            ended = self._ended
            if ended is None:
                self._running |= {spec.worker for spec in workers}
                self.workers |= self._running
        for spec in workers:
            if ended is not None:
                self._events.exited(Exited(worker=spec.worker, code=self.lost_exit_code, reason=ended))
                continue
            order = Start(
                worker=spec.worker,
                argv=list(spec.argv),
                env=dict(spec.env),
                inherit_env=self.inherit_env,
                cwd=spec.cwd,
                private_files={name: data.hex() for name, data in spec.private_files.items()},
                preload=list(spec.preload) if spec.preload is not None and self._has_fork_server else None,
            )
            self.send(order)

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        """End these workers, and whatever those that have ended left running. Does not wait."""
        with self._lock:
            chosen = sorted(self.workers.intersection(workers))
        if chosen and not self.ended:
            self.send(Terminate(chosen, grace_s))

    def finish(self) -> None:
        """End every worker and descendant that is left. Does not wait. Idempotent."""
        self.send(Finish(GRACE_S))

    def abandon(self) -> None:
        """Stop reporting: another controller supervises this node."""
        with self._lock:
            self._running.clear()
            self._events = None
        self._finished.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until no process is left there; after the time limit, hang up, which ends the agent."""
        if self._events is not None and not self._finished.wait(timeout_s):
            self.kill()

    def kill(self) -> None:
        """Hang up, which ends the agent."""
        if self.peer is not None:
            self.peer.close()

    def send(self, message: Message) -> None:
        """Send a message once the agent has joined. Dropped if the agent is gone."""
        with self._lock:
            if self.peer is None:
                self._unsent.append(message)
            else:
                self.peer.send(*pack(message))

    def beat(self, silence_limit_s: float) -> None:
        """Send a heartbeat; drop an agent that has answered none within the limit. It counts heartbeats, not seconds,
        in case this process was stopped.
        """
        if self.peer is None or self._events is None or self._ended is not None:
            return
        self._unanswered += 1
        if self._unanswered <= BEATS + 1:
            self.send(Ping())
            return
        self._ended = (
            f"host {self.name} has not answered for {silence_limit_s:g} s and was given up; raise "
            "--silence-timeout (HORA_SILENCE_TIMEOUT) if it may be so busy"
        )
        self.kill()

    # ---- as `Agents` see it -----------------------------------------------------------------------------------

    def join(self, peer: SessionPeer) -> None:
        with self._lock:
            self.peer = peer
            for message in self._unsent:
                peer.send(*pack(message))
            self._unsent.clear()

    def enqueue(self, message: Message) -> None:
        """Queue a report of the agent."""
        self._unanswered = 0
        self._inbox.put(message)

    def lost(self, status: int) -> None:
        """The agent is gone."""
        if self.status is None:
            self.status = status
            self._inbox.put(None)

    # ---- in a thread of its own: a console may be slow --------------------------------------------------------

    def _deliver(self) -> None:
        try:
            while (message := self._inbox.get()) is not None:
                self._report(message)
                if isinstance(message, Output):
                    self.send(Taken(len(message.data)))
        except ValueError as error:
            self.blame(error)
        self._report_end(255 if self.status is None else self.status, joined=self.peer is not None)

    def blame(self, error: Exception) -> None:
        """Drop a node that sends invalid messages: it may be compromised, and must not fill the controller's memory."""
        self.complaints.add(f"it sent what no agent sends ({error})".encode())
        self.kill()

    def _report(self, message: Message) -> None:
        events = self._events
        if events is None:  # another controller supervises this node
            return
        if isinstance(message, Started | Output | Exited) and message.worker not in self.workers:
            raise ValueError(f"a message about worker {message.worker}, which is not there")
        match message:
            case Started(worker):
                events.started(worker)
            case Output(worker, stream, data):
                events.output(worker, "stdout" if stream == "stdout" else "stderr", data)
            case Exited(worker):
                with self._lock:
                    ours = worker in self._running
                    self._running.discard(worker)
                if ours:
                    events.exited(message)
            case Finished():
                self._finished.set()

    def _report_end(self, status: int, *, joined: bool) -> None:
        why = self._ended or self._why_ended(status, joined=joined)
        with self._lock:
            self._ended = why
            orphans, self._running = sorted(self._running), set()
            events = self._events
        for worker in orphans:
            assert events is not None  # a node without events runs nothing for this controller
            events.exited(Exited(worker, self.lost_exit_code, why))
        self._finished.set()
        self._reported.set()

    def _why_ended(self, status: int, *, joined: bool) -> str:
        complaints = bytes(self.complaints).decode(errors="replace").strip()
        happened = "ended unexpectedly" if joined else "did not start"
        return f"the agent on host {self.name} {happened} (exit status {status})" + f": {complaints}" * bool(complaints)


class LocalProcess:
    """An agent process in its own session: Ctrl-C in a terminal reaches only the controller, which ends the workers."""

    def __init__(self) -> None:
        source = str(Path(__file__).resolve().parents[3])
        self.sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _RUN_AGENT, source],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                start_new_session=True,
                bufsize=0,
            )
        self.wait = self._process.wait
        # A stopped agent reads nothing: its controller must not wait for it without a limit.
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(END_S), 0))

    def kill(self) -> None:
        """Have the guardian kill the agent unless that ends in time; kill them all if the guardian is stopped."""
        if is_stopped(self._process.pid):
            send_to_all(family(self._process.pid), signal.SIGKILL)
        else:
            self._process.terminate()

    def complaints(self) -> bytes:
        """Return what the process has written to its standard error."""
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        return self._process.stderr.read(_TAIL_BYTES) or b""

    def close(self) -> None:
        """Release the pipes of a process that has ended."""
        assert self._process.stderr is not None
        self.sock.close()
        self._process.stderr.close()


class LocalAgent(AgentHandle):
    """An agent on this machine, which it starts."""

    inherit_env = False

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self._process = LocalProcess()
        self._sending = threading.Lock()

    @property
    def ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0)
            return True
        return self._ended is not None

    def send(self, message: Message) -> None:
        # If the agent is gone, the reader notices and reports all its workers as ended.
        with contextlib.suppress(OSError), self._sending:
            try:
                self._process.sock.sendall(frame(message))
            except BlockingIOError:
                self.complaints.add(b"it has not read its orders")
                self.kill()
                self._process.sock.shutdown(socket.SHUT_WR)  # only a part of the message is there

    def finish(self) -> None:
        self.send(Quit(0))

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait until all is over; after the time limit, kill the agent, which takes its workers with it."""
        wait_or_kill(self._process, timeout_s)
        self._reported.wait(KILLED_S)

    def _deliver(self) -> None:
        frames, joined = Frames(MESSAGES), False
        try:
            while data := self._process.sock.recv(_READ_BYTES):
                for message in frames.feed(data):
                    joined = joined or isinstance(message, Join)
                    self._report(message)
        except OSError:
            pass  # it is gone
        except ValueError as error:
            self.blame(error)
        status = self._process.wait()
        self.complaints.add(self._process.complaints())
        self._process.close()
        self._report_end(status, joined=joined)


class RemoteAgents(Protocol):
    """The agents of other nodes. `nodes`: their workers start with the environment of their agent."""

    nodes: bool
    is_own: Callable[[str], bool]  # whether this host is the machine where we run, which needs no such agent

    def agent(self, hostname: str) -> AgentHandle:
        """Return the agent of a host. One that is gone has ended already."""

    def reach(self, host: HostInfo) -> AgentHandle:
        """Return the agent of a host; start one if there is none."""


@dataclass
class _Reported:
    """LaunchEvents that a launcher passes on, with the host where a worker has ended."""

    events: LaunchEvents
    ended: Callable[[Exited], None]

    def output(self, worker: int, stream: str, data: bytes) -> None:
        self.events.output(worker, stream, data)

    def started(self, worker: int) -> None:
        self.events.started(worker)

    def exited(self, ended: Exited) -> None:
        self.events.exited(ended)
        self.ended(ended)


class HostLauncher:
    """Starts workers on this machine, or on all hosts of `agents`, this machine included.

    `listen`: the address at which all of them reach this process; `bind`: where it listens, if that is another one.
    `route`: returns the agent of a worker, and what that is to start, if not its host's agent the same. `ended`: called
    with an agent's name and the end of one of its workers, until the job is over.
    """

    def __init__(
        self,
        *,
        agents: RemoteAgents | None = None,
        listen: str = "127.0.0.1",
        bind: str = "",
        route: Callable[[WorkerSpec], tuple[str, WorkerSpec]] | None = None,
        ended: Callable[[str, Exited], None] | None = None,
    ) -> None:
        self.bind_address, self.advertised_address = bind or listen, listen
        self._agents, self._route, self._ended, self._closing = agents, route, ended, False
        self._hosts: dict[str, AgentHandle] = {}
        self._former: list[AgentHandle] = []  # they have ended, or are about to, and have exits to report

    @property
    def local_only(self) -> bool:
        """Return whether workers can be started on this machine only."""
        return self._agents is None

    def start(self, workers: Sequence[WorkerSpec], events: LaunchEvents) -> None:
        by_host: dict[str, list[WorkerSpec]] = {}
        for spec in workers:
            name, adapted = self._routed(spec)
            by_host.setdefault(name, []).append(adapted)
        # Open all connections before starting workers, so that the agents start in parallel.
        for name, specs in by_host.items():
            if name in self._hosts and self._hosts[name].ended:  # it was disconnected or killed and may be back
                self._former.append(self._hosts.pop(name))
            if name not in self._hosts:
                host = HostInfo(name, specs[0].slot.local_size)
                is_own = self._agents is None or self._agents.is_own(name)
                self._hosts[name] = LocalAgent(name) if is_own or not self._agents else self._agents.reach(host)
                self._hosts[name].look_after(self._reported(name, events))
        for name, specs in by_host.items():
            self._hosts[name].start(specs)

    def _routed(self, spec: WorkerSpec) -> tuple[str, WorkerSpec]:
        """Return the name of the agent that starts this worker, and what it is to start."""
        if self._route is not None:
            return self._route(spec)
        if self._agents is None:
            return "localhost", spec
        name = spec.slot.hostname
        return name, spec if self._agents.is_own(name) else self._for_elsewhere(spec)

    def _reported(self, name: str, events: LaunchEvents) -> LaunchEvents:
        ended = self._ended
        if ended is None:
            return events
        return _Reported(events, lambda exited: None if self._closing else ended(name, exited))

    def adopt(self, workers: Mapping[str, Collection[int]], events: LaunchEvents) -> list[int]:
        """Supervise an earlier leader's workers, by host; report those that have ended, return those never started."""
        assert self._agents is not None
        never_started: set[int] = set()
        for name, numbers in workers.items():
            host = self._agents.agent(name)
            if host.ended:
                for number in numbers:
                    events.exited(Exited(number, 255, f"its node, {name}, has not come to the new leader"))
                continue
            known = host.workers.intersection(numbers)
            self._hosts[name] = host
            host.look_after(events, known)
            never_started.update(known.symmetric_difference(numbers))
        return sorted(never_started)

    def abandon(self) -> None:
        """Release all workers: another leader supervises them."""
        for host in self._release():
            host.abandon()

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        chosen = list(workers)
        for host in self._hosts.values():
            host.terminate(chosen, grace_s=grace_s)

    def close(self) -> None:
        self._closing = True
        hosts = self._release()
        for host in hosts:
            host.finish()
        limit = time.monotonic() + GRACE_S + KILLED_S
        for host in hosts:
            host.wait(max(limit - time.monotonic(), 0.1))

    def _release(self) -> list[AgentHandle]:
        hosts, self._hosts, self._former = [*self._former, *self._hosts.values()], {}, []
        return hosts

    def _for_elsewhere(self, spec: WorkerSpec) -> WorkerSpec:
        env = {name: value for name, value in spec.env.items() if not _PRIVATE.fullmatch(name)}
        if self._agents is None or not self._agents.nodes:
            return replace(spec, env=env)
        # Of this process's environment, pass only what the job adds.
        inherited = variables()
        return replace(spec, env={n: value for n, value in env.items() if inherited.get(n) != value}, cwd=None)
