"""The agents of a job, seen from the controller: orders go out, and what agents report reaches the job's events.

`AgentHandle` is one agent. `LocalAgent` is one on this machine, which is a child at the other end of a socket. `Agents`
takes those of other nodes, whatever has started them: an agent connects, proves that it holds the nodes' secret, or a
key of its own, and says which node it is. Its connection is a session: in an elastic job an agent that was cut off
comes back to it. The messages are in `agent.protocol`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Protocol

from hora.errors import StartTimeoutError
from hora.launch.agent.protocol import (
    VERSION,
    Bye,
    Exited,
    Finish,
    Finished,
    Frames,
    Join,
    Leaving,
    MeetAt,
    Message,
    Output,
    Ping,
    Refused,
    Start,
    Started,
    Taken,
    Terminate,
    Welcome,
    frame,
    pack,
    unpack,
)
from hora.launch.controller.output import Tail
from hora.launch.job import LaunchEvents, WorkerExit, WorkerSpec
from hora.launch.slots import HostInfo
from hora.net.server import Server
from hora.net.session import SessionPeer, Sessions
from hora.net.wire import ANYBODY, Credentials, Header, derived_secret, new_secret
from hora.version import version

__all__ = [
    "AgentHandle",
    "AgentProcess",
    "Agents",
    "LocalAgent",
    "LocalProcess",
    "credentials",
    "end_starter",
    "start_agent",
    "wait_or_kill",
]

Nodes = Mapping[str, tuple[int, int]]  # number and slots by name

_BEATS = 6  # in the time after which a silent node is dropped
_CUT_LIMIT_S = 30  # a node beyond a cut cable, of which its kernel would tell
_MAX_NAME_CHARS = 255
_BYE_LIMIT_S, _KILL_LIMIT_S = 20.0, 30.0
_CLOSE_SLACK_S = 15.0  # after SIGKILL everything is a matter of milliseconds, even on a busy machine
_READ_BYTES, _TAIL_BYTES = 256 * 1024, 4096

# Isolated and without site-packages, which is faster.
_RUN_AGENT = """
import sys
sys.path.append(sys.argv.pop(1))
from hora.launch.agent.agent import serve_locally
sys.exit(serve_locally())
"""


class Child(Protocol):
    """A process that can be waited for: `subprocess.Popen`, or something like it."""

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def wait_or_kill(process: Child, limit_s: float) -> int:
    """Return the exit status of a process that is about to end; one that has not ended in time is killed."""
    try:
        return process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait(_CLOSE_SLACK_S)


def credentials(secret: bytes, speaker: int = ANYBODY) -> Credentials:
    """Return the credentials that an agent and the controller prove to one another: of all nodes, or of one that was
    given a key of its own.
    """
    purpose = "hora nodes" if speaker == ANYBODY else f"hora node {speaker}"
    return Credentials(derived_secret(secret, purpose), "nodes", speaker)


def start_agent(
    command: Sequence[str], where: tuple[str, int], key: Credentials, nodes: Nodes, *, limit_s: float, **rest: Any
) -> subprocess.Popen[bytes]:
    """Run a command that starts `agent.session` somewhere, and tell that on its standard input where to go.

    `nodes`: those that the command may start.
    """
    process = subprocess.Popen(list(command), stdin=subprocess.PIPE, start_new_session=True, **rest)
    order = {"where": where, "key": key.secret.hex(), "speaker": key.speaker, "nodes": nodes, "limit_s": limit_s}
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError), process.stdin:
        process.stdin.write(json.dumps(order).encode() + b"\n")
    return process


def end_starter(process: subprocess.Popen[bytes], limit_s: float) -> None:
    """Wait for a process that ends with the agents it has started; a SIGTERM makes srun end them."""
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        process.terminate()
        wait_or_kill(process, _KILL_LIMIT_S)


class AgentHandle:
    """One agent. Expected (orders wait) -> joined -> over.

    `workers`: those that it had before it joined. `inherit_env`: its workers' environment is added to its own.
    """

    inherit_env = True
    lost_exit_code = 255  # of workers whose agent is gone

    def __init__(self, name: str, slots: int = 1, workers: Collection[int] = ()) -> None:
        self.name, self.slots, self.workers = name, slots, frozenset(workers)
        self.leaving = False
        self.complaints = Tail(_TAIL_BYTES)
        self.peer: SessionPeer | None = None
        self.starter: subprocess.Popen[bytes] | None = None  # the process that starts the agent
        self.status: int | None = None  # once it is over
        self._events: LaunchEvents | None = None
        self._lock = threading.Lock()
        self._running: set[int] = set()
        self._own = set(workers)  # workers that were ever started here: the agent reports on no other
        self._unsent: list[Message] = []
        self._inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._has_fork_server = False
        self._ended: str | None = None  # why nothing can be started here any more
        self._finished = threading.Event()
        self._reported = threading.Event()
        self._num_heard = self._num_seen = self._unanswered = 0

    # ---- orders ---------------------------------------------------------------------------------------------

    def look_after(self, events: LaunchEvents, ours: Collection[int] = ()) -> None:
        """Report to these events from now on. `ours`: workers that run there already, for this controller."""
        self._events, self._running = events, set(ours)
        threading.Thread(target=self._deliver, name=f"hora-agent {self.name}", daemon=True).start()

    @property
    def ended(self) -> bool:
        """Return whether the agent is gone or out of reach; exits may still be reported."""
        return self.status is not None or self._ended is not None

    @property
    def over(self) -> bool:
        """Return whether the agent is gone and everything that it reported has been passed on."""
        return self._reported.is_set()

    def start(self, workers: Sequence[WorkerSpec]) -> None:
        assert self._events is not None
        # One worker alone is not worth a fork server, but an elastic job's newcomer may come from the one there is.
        self._has_fork_server = self._has_fork_server or len(workers) > 1
        with self._lock:
            ended = self._ended
            if ended is None:
                self._running |= {spec.worker for spec in workers}
                self._own |= self._running
        for spec in workers:
            if ended is not None:
                self._events.exited(WorkerExit(worker=spec.worker, code=255, reason=ended))
            else:
                self.send(self._order(spec))

    def _order(self, spec: WorkerSpec) -> Start:
        return Start(
            worker=spec.worker,
            argv=list(spec.argv),
            env=dict(spec.env),
            inherit_env=self.inherit_env,
            cwd=spec.cwd,
            private_files={name: data.hex() for name, data in spec.private_files.items()},
            preload=list(spec.preload) if spec.preload is not None and self._has_fork_server else None,
        )

    def terminate(self, workers: Iterable[int], *, grace_s: float) -> None:
        with self._lock:
            chosen = sorted(self._running.intersection(workers))
        if chosen:
            self.send(Terminate(chosen, grace_s))

    def clear_up(self, worker: int, *, grace_s: float) -> None:
        """End what a worker that has ended has left running. Does not wait."""
        self.send(Terminate([worker], grace_s))

    def finish(self, *, grace_s: float) -> None:
        """End every worker and descendant that is left. Does not wait. Idempotent."""
        self.send(Finish(grace_s))

    def abandon(self) -> None:
        """Report nothing any more: another controller looks after this node."""
        with self._lock:
            self._running.clear()
            self._events = _NoEvents()
        self._finished.set()

    def wait(self, timeout_s: float) -> None:
        """Wait until no process is left there; after the time limit, hang up, which ends the agent."""
        if self._events is not None and not self._finished.wait(timeout_s):
            self.kill()

    def kill(self) -> None:
        if self.peer is not None:
            self.peer.close()
        if self.starter is not None:
            self.starter.kill()

    def send(self, message: Message) -> None:
        """Tell the agent something, as soon as it has joined. Dropped if it is gone."""
        with self._lock:
            if self.peer is None:
                self._unsent.append(message)
            else:
                self.peer.send(*pack(message))

    def beat(self, silence_limit_s: float) -> None:
        """Send a sign of life; drop an agent that has answered none for so long. Beats are counted, not seconds: time
        in which this process did not run is nobody's silence.
        """
        answered = self._num_heard != self._num_seen or self.peer is None or self._events is None
        self._unanswered, self._num_seen = 0 if answered else self._unanswered + 1, self._num_heard
        if self._unanswered > _BEATS and self._ended is None:
            self._ended = (
                f"host {self.name} has not answered for {silence_limit_s:g} s and was given up; raise "
                "--silence-timeout (HORA_SILENCE_TIMEOUT) if it may be so busy"
            )
            self.kill()
        elif self.peer is not None and self._events is not None:
            self.send(Ping())

    # ---- as `Agents` see it -----------------------------------------------------------------------------------

    def join(self, peer: SessionPeer) -> None:
        with self._lock:
            self.peer = peer
            for message in self._unsent:
                peer.send(*pack(message))
            self._unsent.clear()

    def take(self, message: Message) -> None:
        """Something that the agent reports."""
        self._num_heard += 1
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
        """Drop a node that may have been taken over: it must not hold up the controller, nor fill its memory."""
        self.complaints.add(f"it sent what no agent sends ({error})".encode())
        self.kill()

    def _report(self, message: Message) -> None:
        events = self._events
        assert events is not None
        if isinstance(message, Started | Output | Exited) and message.worker not in self._own:
            raise ValueError(f"a message about worker {message.worker}, which is not there")
        match message:
            case Started(worker):
                events.started(worker)
            case Output(worker, stream, data):
                events.output(worker, "stdout" if stream == "stdout" else "stderr", data)
            case Exited(worker, code, reason):
                with self._lock:
                    ours = worker in self._running
                    self._running.discard(worker)
                if ours:
                    events.exited(WorkerExit(worker=worker, code=code, reason=reason))
            case Finished():
                self._finished.set()

    def _report_end(self, status: int, *, joined: bool) -> None:
        why = self._ended or self._why_ended(status, joined=joined)
        with self._lock:
            self._ended = why
            orphans, self._running = sorted(self._running), set()
            events = self._events
        assert events is not None
        for worker in orphans:
            events.exited(WorkerExit(worker=worker, code=self.lost_exit_code, reason=why))
        self._finished.set()
        self._reported.set()

    def _why_ended(self, status: int, *, joined: bool) -> str:
        complaints = bytes(self.complaints).decode(errors="replace").strip()
        happened = "ended unexpectedly" if joined else "did not start"
        return f"the agent on host {self.name} {happened} (exit status {status})" + f": {complaints}" * bool(complaints)


class _NoEvents:
    """Implements LaunchEvents for nobody."""

    def output(self, worker: int, stream: str, data: bytes) -> None: ...
    def started(self, worker: int) -> None: ...
    def exited(self, ended: WorkerExit) -> None: ...


class AgentProcess(Child, Protocol):
    """An agent's process on this machine, and the socket that is its standard input."""

    sock: socket.socket
    stderr: IO[bytes] | None


class LocalProcess:
    """A new one. Its own session: Ctrl-C in a terminal reaches the controller only, which ends the workers in order."""

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
        self.stderr = self._process.stderr
        self.wait, self.kill = self._process.wait, self._process.kill


class LocalAgent(AgentHandle):
    """An agent on this machine. `process`: one that runs already; else one is started."""

    inherit_env = False

    def __init__(self, name: str, process: AgentProcess | None = None) -> None:
        super().__init__(name)
        self._process: AgentProcess = process or LocalProcess()
        self._sending = threading.Lock()

    @property
    def ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(0)
            return True
        return self._ended is not None

    def send(self, message: Message) -> None:
        # When the agent is gone the reader knows, and reports all its workers as ended.
        with contextlib.suppress(OSError), self._sending:
            self._process.sock.sendall(frame(message))

    def finish(self, *, grace_s: float) -> None:
        super().finish(grace_s=grace_s)
        self.send(Bye(0))

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout_s: float) -> None:
        """Wait until all is over; after the time limit, kill the agent, which takes its workers with it."""
        wait_or_kill(self._process, timeout_s)
        if self._events is not None:
            self._reported.wait(_CLOSE_SLACK_S)
        self._process.sock.close()
        if self._process.stderr is not None:
            self._process.stderr.close()

    def _deliver(self) -> None:
        frames, joined = Frames(), False
        try:
            while data := self._read():
                for message in frames.feed(data):
                    joined = joined or isinstance(message, Join)
                    self._report(message)
        except ValueError as error:
            self.blame(error)
        status = self._process.wait()
        if self._process.stderr is not None:
            os.set_blocking(self._process.stderr.fileno(), False)
            with contextlib.suppress(BlockingIOError):
                self.complaints.add(self._process.stderr.read(_TAIL_BYTES) or b"")
        self._report_end(status, joined=joined)

    def _read(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._process.sock.recv(_READ_BYTES)
        return b""


class Agents:
    """Takes agents at `where` (port 0: any) until closed. `num_nodes`: how many to expect, ourselves not counted.

    `own`: this machine's name and slots, if the job may use it too, as its first host. `silence_limit_s`: after so long
    a silence of ours a node ends its workers. `elastic`: an agent that is asked to end lets its ranks commit and leave
    first. `return_s`: how long one that was cut off may take to come back. `nonce`, `term` and `names`: of a job whose
    leaders change, and of all nodes that ever joined one of them.

    `brings_environment`: a node's workers have the environment and the folder of its agent.
    """

    brings_environment = True

    def __init__(
        self,
        where: tuple[str, int],
        secret: bytes,
        *,
        num_nodes: int,
        silence_limit_s: float,
        own: HostInfo | None = None,
        elastic: bool = False,
        return_s: float = 0.0,
        nonce: str = "",
        term: int = 0,
        names: Iterable[str] = (),
    ) -> None:
        self.nonce, self._term, self._meeting = nonce or new_secret().hex(), term, 0
        self._secret, self.job_secret = secret, derived_secret(secret, f"hora job {self.nonce}")
        self._num_nodes, self._own = num_nodes, own
        self._elastic, self._silence_limit_s, self._return_s = elastic, silence_limit_s, return_s
        self._first_index = 0 if own is None else 1
        self._nodes: dict[int, AgentHandle] = {}
        self._names = set(names)  # of all that have ever joined
        self._changed = threading.Condition()
        self._refused = ""
        self._starter_ended: Callable[[], str] = lambda: ""
        self._listener: Callable[[Sequence[HostInfo]], None] | None = None
        self._own_address = "" if where[0] in ("", "0.0.0.0") else where[0]
        sessions = Sessions(self, limit_s=return_s)
        self._server = Server(sessions, name="hora-agents", silence_limit_s=_CUT_LIMIT_S)
        sessions.serve(self._server)
        try:
            self.port = self._server.listen(where)
        except OSError as error:
            self._server.close()
            raise OSError(f"cannot listen at {where[0]}:{where[1]} for the nodes: {error.strerror}") from None
        self._server.start(self._credentials)
        self._server.call(self._beat)

    def _credentials(self, speaker: int) -> Credentials:
        return credentials(self._secret)

    @property
    def address(self) -> str:
        """Our address under which the agents have reached us."""
        return self._own_address or "127.0.0.1"

    def hosts(self) -> list[HostInfo]:
        """The nodes that are there, ours first, in their order."""
        with self._changed:
            nodes = [node for _, node in sorted(self._nodes.items()) if not node.leaving]
        return ([] if self._own is None else [self._own]) + [HostInfo(node.name, node.slots) for node in nodes]

    def is_own(self, hostname: str) -> bool:
        """Return whether this host is the machine where we run, which has no agent."""
        return self._own is not None and hostname == self._own.hostname

    def wait(self, limit_s: float, *, num_slots: int | None = None) -> None:
        """Wait until all nodes have joined, or as many as have `num_slots`; StartTimeoutError says which have not."""
        deadline = time.monotonic() + limit_s
        with self._changed:
            while not self._enough(num_slots):
                problem = self._refused or self._starter_ended()
                if problem:
                    raise RuntimeError(problem)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise StartTimeoutError(self._who_is_missing(limit_s))
                self._changed.wait(min(left_s, 1.0))

    def _enough(self, num_slots: int | None) -> bool:
        if num_slots is not None:
            return sum(host.slots for host in self.hosts()) >= num_slots
        return len(self._nodes) >= self._num_nodes

    def _who_is_missing(self, limit_s: float) -> str:
        wanted = range(self._first_index, self._first_index + self._num_nodes)
        missing = ", ".join(str(index) for index in wanted if index not in self._nodes)
        return (
            f"Timed out waiting for the nodes to join. Node {missing} did not come to port {self.port}: start the "
            f"same command there, with the same secret file. Timeout after {limit_s:g} seconds (--start-timeout)."
        )

    def wait_for(self, names: Collection[str], limit_s: float) -> None:
        """Wait until these nodes are there; those that do not come in time are gone."""
        with self._changed:
            self._changed.wait_for(lambda: {node.name for node in self._nodes.values()} >= set(names), limit_s)

    def workers_at(self, hostname: str) -> Collection[int]:
        """The workers that a node had before it joined us, those that have ended included."""
        with self._changed:
            return next((node.workers for node in self._nodes.values() if node.name == hostname), ())

    def meet_at(self, port: int) -> None:
        """Tell the nodes, those too that join later, where our rendezvous is."""
        with self._changed:
            self._meeting = port
            nodes = list(self._nodes.values())
        for node in nodes:
            node.send(MeetAt(port))

    def abandon(self) -> None:
        """Another one leads the job: let go of the nodes, whose workers live on."""
        with self._changed:
            nodes = list(self._nodes.values())
        self._server.close()
        for node in nodes:
            node.lost(255)

    def watch_starter(self, ended: Callable[[], str]) -> None:
        """Have `wait` ask whether what starts the agents has ended: then it says how, else nothing."""
        self._starter_ended = ended

    def agent(self, hostname: str) -> AgentHandle:
        """The agent of a node. One that is gone has ended already."""
        with self._changed:
            there = (node for node in self._nodes.values() if node.name == hostname and not node.ended)
            return next(there, None) or self._absent(hostname)

    def _absent(self, hostname: str) -> AgentHandle:
        node = AgentHandle(hostname)
        node.lost(255)
        return node

    def _beat(self) -> None:
        """In the server's thread: signs of life, to all."""
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.beat(self._silence_limit_s)
        self._server.call_at(time.monotonic() + self._silence_limit_s / _BEATS, self._beat)

    # ---- hosts of an elastic job (`discovery.HostWatch`) --------------------------------------------------

    def watch(self, known: Sequence[HostInfo], changed: Callable[[Sequence[HostInfo]], None]) -> None:
        with self._changed:
            self._listener = changed
            hosts = self.hosts()
        if hosts != list(known):
            changed(hosts)

    def close(self) -> None:
        """Tell of changes no more. The nodes stay."""
        self._listener = None

    def dismiss(self, status: int) -> None:
        """The job is over: the agents end with this status. Returns when they have gone, or should have."""
        with self._changed:
            nodes = list(self._nodes.values())
        for node in nodes:
            node.send(Bye(status))
        deadline = time.monotonic() + _BYE_LIMIT_S
        with self._changed:
            while self._nodes and time.monotonic() < deadline:
                self._changed.wait(0.2)
        self._server.close()
        for node in nodes:
            node.lost(255)

    # ---- in the server's thread -----------------------------------------------------------------------------------

    def message(self, peer: SessionPeer, header: Header, payload: bytes) -> None:
        if peer.number < 0:
            if header.get("op") == "join":  # as earlier versions of Hora did
                self._refuse(peer, int(header["node"]), str(header["name"]), self._other_version(header.get("version")))
                return
            joining = unpack(header, payload)
            if not isinstance(joining, Join):
                raise ValueError(f"{type(joining).__name__} before it has joined")
            self._join(peer, joining)
            return
        node = self._nodes[peer.number]
        try:
            message = unpack(header, payload)
        except (ValueError, RecursionError) as error:
            node.blame(error)
            return
        if isinstance(message, Leaving):
            node.leaving = True
            self._tell()
        else:
            node.take(message)

    def _join(self, peer: SessionPeer, joining: Join) -> None:
        index, name = joining.node, joining.name[:_MAX_NAME_CHARS]
        problem = self._problem(peer, joining)
        if problem:
            self._refuse(peer, index, name, problem, comes_again=bool(joining.run))
            return
        with self._changed:
            node = self._nodes[index] = self._admitted(index, name, joining)
            peer.number = index
            self._own_address = self._own_address or str(peer.sock.getsockname()[0])
            meeting = self._meeting
        welcome = Welcome(
            name=node.name,
            run=self.nonce,
            executable=sys.executable,
            silence_s=self._silence_limit_s,
            return_s=self._return_s,
            elastic=self._elastic,
            term=self._term,
            meeting=meeting,
        )
        peer.send(*pack(welcome))
        with self._changed:
            node.join(peer)
            self._changed.notify_all()
        self._tell()

    def _refuse(self, peer: SessionPeer, index: int, name: str, why: str, *, comes_again: bool = False) -> None:
        if not comes_again:
            self._refused = self._refused or f"node {index} ({name[:_MAX_NAME_CHARS]}, {peer.host}): {why}"
        header, payload = pack(Refused(why))
        peer.send({**header, "why": why}, payload)  # where earlier versions look for it
        with self._changed:
            self._changed.notify_all()

    def _admitted(self, index: int, name: str, joining: Join) -> AgentHandle:
        known = joining.run == self.nonce
        name = name if known else self._new_name(name, index)
        self._names.add(name)
        return AgentHandle(name, joining.slots, joining.workers if known else ())

    def _new_name(self, name: str, index: int) -> str:
        """A host's name of its own, for two nodes of one name, and for one that comes back: its old name may be
        barred.
        """
        choices = itertools.chain([name, f"{name}-{index}"], (f"{name}-{index}-{turn}" for turn in itertools.count(2)))
        return next(choice for choice in choices if choice not in self._names and not self.is_own(choice))

    def _problem(self, peer: SessionPeer, joining: Join) -> str:
        if (joining.version, joining.protocol) != (version(), VERSION):
            return self._other_version(joining.version)
        return self._misplaced(peer, joining.node, joining.slots)

    def _other_version(self, theirs: object) -> str:
        return f"it has Hora {theirs}, but the first node has {version()}; install the same version on every node"

    def _misplaced(self, peer: SessionPeer, index: int, slots: int) -> str:
        last = self._first_index + self._num_nodes - 1
        if not self._first_index <= index <= last:
            return f"the nodes that may join are {self._first_index} to {last}; check --nnodes and --node-rank"
        if index in self._nodes:
            return "another node of that number has joined already; give each its own --node-rank"
        if not 0 < slots < 100_000:
            return f"it offers {slots} slots"
        return ""

    def closed(self, peer: SessionPeer) -> None:
        with self._changed:
            node = self._nodes.get(peer.number)
            if node is None or node.peer is not peer:  # another one has its number now
                return
            del self._nodes[peer.number]
            self._changed.notify_all()
        node.lost(255)
        self._tell()

    def _tell(self) -> None:
        if self._listener is not None:
            self._listener(self.hosts())
