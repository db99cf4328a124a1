"""Body of a Spark task: it starts an agent on its machine and forwards messages between the agent and the driver.

The task itself does not run the user's function, because Spark reuses its Python workers: changes to modules, threads,
devices and the environment must not reach the next job. Killing the task (or its executor, or the
driver) ends the agent, and with it the rank. Spark calls `SparkTask`; the driver's end of the session is `driver`.
"""

from __future__ import annotations

import hashlib
import os
import socket
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path

from hora.launch.agent.protocol import (
    MESSAGES,
    Exited,
    Finish,
    Join,
    Message,
    Output,
    Ping,
    Quit,
    Refused,
    Start,
    Started,
    Taken,
    Terminate,
    Welcome,
)
from hora.launch.controller.agents import credentials
from hora.launch.controller.launcher import AgentProcess, LocalProcess, wait_or_kill
from hora.launch.controller.output import Tail
from hora.launch.environment import first_variables, variables
from hora.launch.limits import CONNECT_S, END_S, GRACE_S
from hora.launch.providers.spark import warm_pool
from hora.net.keys import read_held_secret
from hora.net.messages import Frames, Pong, frame, pack, unpack
from hora.net.session import ClientSession
from hora.net.wire import Connection, connect
from hora.version import version

_TAIL_BYTES = 64 * 1024
_AHEAD_BYTES = 1024 * 1024  # of output not yet delivered by the driver; beyond it the rank blocks
_UNSENT_BYTES = 4 * 1024 * 1024  # of output while disconnected; more is dropped


@dataclass(frozen=True, kw_only=True)
class SparkTask:
    """The closure that Spark ships to a task: the driver's address and the secret.

    `secret`: in hexadecimal. `secret_file`: where to read it instead, if the driver is on this machine: Spark shows its
    closures around. `stream_output`: send the rank's output to the driver as it comes, instead of only its end when it
    has failed. `keep_output`: have all of it in the executor's own log as well (the stderr page of Spark's UI).
    """

    address: str
    port: int
    stream_output: bool
    keep_output: bool
    secret: str = field(default="", repr=False)
    secret_file: str = ""

    def __call__(self, task: int) -> None:
        key = credentials(read_held_secret(self.secret_file) if self.secret_file else bytes.fromhex(self.secret))

        def reach(limit_s: float) -> Connection:
            return connect((self.address, self.port), key, timeout_s=limit_s)

        try:
            session = ClientSession(reach(CONNECT_S), reach)
        except OSError as error:
            raise RuntimeError(
                f"task {task} on {socket.gethostname()} cannot reach the driver at "
                f"{self.address}:{self.port} ({error}); "
                "set spark.driver.host to an address of the driver that executors can reach"
            ) from error
        try:
            _Bridge(session, self).serve(task)
        finally:
            session.close()


class _Bridge:
    """Passes messages between the driver and an agent of this machine until the driver says `Quit` or is gone."""

    def __init__(self, session: ClientSession, task: SparkTask) -> None:
        self._session, self._task = session, task
        self._process: AgentProcess | None = None
        self._tails: dict[str, Tail] = {}
        self._lost_bytes = self._ahead = 0
        self._changed = threading.Condition()

    def serve(self, task: int) -> None:
        try:
            self._session.send(*pack(Join(task, host_hash(), 1, version(), [], gpu_addresses())))
            match self._receive():
                case Welcome() as welcome:
                    self._session.limit_s = welcome.return_s
                case Refused(why):
                    raise RuntimeError(f"the driver refused task {task}: {why}")
                case _:
                    return  # Spark has repeated the task after the job
            while True:
                match message := self._receive():
                    case Start():
                        self._start(message)
                    case Terminate():
                        self._order(message)
                    case Ping():
                        self._session.send(*pack(Pong()))
                    case Taken(num_bytes):
                        self._note(-num_bytes)
                    case Quit(0):
                        return
                    case Quit(status):
                        raise RuntimeError(f"the rank of task {task} ended with exit code {status}")
        except (EOFError, OSError):
            return  # the driver is gone or has dropped this task: only the agent is left to end
        finally:
            self._end()

    def _receive(self) -> Message:
        return unpack(MESSAGES, *self._session.receive())

    def _start(self, order: Start) -> None:
        """Start a worker: with the environment that this Python worker was started with, and files Spark shipped."""
        program, *arguments = order.argv
        inherited = first_variables()
        if not program:
            program, inherited["PYTHONPATH"] = sys.executable, python_path()
        env = inherited | order.env
        if self._process is None:
            warm = None
            if order.preload is not None and program == sys.executable:
                warm = warm_pool.agent(order.preload, env)  # whose workers are forks
            self._process = warm or LocalProcess()
            threading.Thread(target=self._forward, args=(self._process,), name="hora-spark-task", daemon=True).start()
        self._order(order._replace(argv=[program, *arguments], env=env, inherit_env=False, preload=None))

    def _order(self, message: Message) -> None:
        if self._process is not None:
            self._process.sock.sendall(frame(message))

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            self._order(Finish(GRACE_S))
            self._order(Quit(0))
        except OSError:
            pass  # it is gone
        wait_or_kill(self._process, END_S)
        self._process.sock.close()

    # ---- in a thread of its own -----------------------------------------------------------------------------

    def _forward(self, process: AgentProcess) -> None:
        frames = Frames(MESSAGES)
        try:
            while data := process.sock.recv(256 * 1024):
                for message in frames.feed(data):
                    self._report(message)
        except (OSError, ValueError):
            pass
        self._session.shutdown()  # the agent is gone: the driver must not wait for this task any more

    def _report(self, message: Message) -> None:
        match message:
            case Output():
                self._output(message)
            case Exited():
                for stream, tail in self._tails.items() if message.code else ():
                    self._session.send(*pack(Output(message.worker, stream, bytes(tail))))
                self._tails.clear()
                self._session.send(*pack(message))
            case Started():
                self._session.send(*pack(message))

    def _output(self, message: Output) -> None:
        data = message.data
        if self._task.keep_output:
            sys.stderr.buffer.write(data)
            sys.stderr.buffer.flush()
        if not self._task.stream_output:
            self._tails.setdefault(message.stream, Tail(_TAIL_BYTES)).add(data)
            return
        if not self._session.connected and self._session.unsent_bytes > _UNSENT_BYTES:
            self._lost_bytes += len(data)
            return
        if self._lost_bytes:
            data = b"\n[hora: %d bytes of output were lost with the connection]\n" % self._lost_bytes + data
            self._lost_bytes = 0
        with self._changed:
            while self._ahead > _AHEAD_BYTES and self._session.connected:
                self._changed.wait(1.0)
        self._note(len(data))
        self._session.send(*pack(message._replace(data=data)))

    def _note(self, num_bytes: int) -> None:
        with self._changed:
            self._ahead += num_bytes
            self._changed.notify_all()


def python_path() -> str:
    """PYTHONPATH for ranks: files that Spark shipped (--py-files) are on sys.path, not in the environment."""
    return os.pathsep.join(path for path in sys.path if path)


def host_hash(salt: str | None = None) -> str:
    """Return an id of the host, its namespaces and, on YARN, the container: processes with the same id can share
    memory.
    """
    links = [Path(f"/proc/self/ns/{kind}") for kind in ("ipc", "mnt", "net", "uts")]
    spaces = [os.readlink(link) for link in links if link.is_symlink()]
    facts = [socket.gethostname(), *spaces, variables().get("CONTAINER_ID", ""), *([salt] if salt else [])]
    return f"{socket.gethostname().split('.')[0]}-{hashlib.sha256('|'.join(facts).encode()).hexdigest()[:32]}"


def gpu_addresses() -> list[str]:
    """In a task: the GPUs that Spark gave it."""
    from pyspark import TaskContext

    context = TaskContext.get()
    assert context is not None, "a Spark task without its context"
    resources = context.resources() or {}
    return [str(address) for address in resources["gpu"].addresses] if "gpu" in resources else []
