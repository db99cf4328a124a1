"""Body of a Spark task: it starts an agent on its machine, and returns when that has ended.

The task itself does not run the user's function, because Spark reuses its Python workers: changes to modules, threads,
devices and the environment must not reach the next job. Killing the task (or its executor, or the driver) ends the
agent, and with it the rank. Spark calls `SparkTask`; the agent connects to the driver (`driver`).
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from hora.launch.agent.protocol import Invitation
from hora.launch.controller.agents import credentials
from hora.launch.environment import first_variables, variables
from hora.launch.limits import CONNECT_S, END_S, KILLED_S
from hora.launch.processes import family, is_stopped, module_command, send_signal, send_to_all
from hora.launch.providers.spark import warm_pool
from hora.launch.providers.spark.no_driver import FILES
from hora.launch.tail import Tail
from hora.net.keys import read_held_secret

_SHOWN_BYTES = 4096


@dataclass(frozen=True, kw_only=True)
class SparkTask:
    """The closure that Spark ships to a task: the driver's address and the secret."""

    address: str
    port: int
    stream_output: bool  # send the rank's output to the driver as it comes; otherwise only its end when it has failed
    keep_output: bool  # have all of it in the executor's own log as well (the stderr page of Spark's UI)
    preload: tuple[str, ...] | None = None  # the rank may be forked from a process that has loaded these modules
    secret: str = field(default="", repr=False)  # in hexadecimal
    secret_file: str = ""  # where to read it instead, if the driver is on this machine: Spark shows its closures around

    def __call__(self, task: int) -> None:
        """Run an agent to its end. RuntimeError, after which Spark may start the task again: its status is an error."""
        key = credentials(read_held_secret(self.secret_file) if self.secret_file else bytes.fromhex(self.secret))
        invitation = Invitation(
            where=[self.address, self.port],
            key=key.secret.hex(),
            speaker=key.speaker,
            node=task,
            name=host_hash(),
            slots=1,
            limit_s=CONNECT_S,
            answer_s=None,  # a copy of a running task waits until Spark ends one of them
            gpus=gpu_addresses(),
            lifeline=True,
            copies=self.keep_output,
            streams=self.stream_output,
        )
        status, said = self._run(invitation)
        if "cannot connect" in said:
            said += "; set spark.driver.host to an address of the driver that executors can reach"
        if status:
            agent = f"the agent of task {task} on {socket.gethostname()}"
            raise RuntimeError(f"{agent} ended with exit code {status}: {said}".removesuffix(": "))

    def _run(self, invitation: Invitation) -> tuple[int, str]:
        """Run an agent to its end; return its status and what it has complained of. It ends with this task."""
        from pyspark import SparkFiles

        files = {FILES: SparkFiles.getRootDirectory()}
        agent: subprocess.Popen[bytes] | warm_pool.WarmAgent
        if self.preload is None:
            agent = subprocess.Popen(
                module_command(sys.executable, "hora.launch.agent.session"),
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                env=first_variables() | {"PYTHONPATH": python_path()} | files,
                start_new_session=True,
            )
            assert agent.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                agent.stdin.write(json.dumps(invitation._asdict()).encode() + b"\n")
                agent.stdin.flush()
        else:
            agent = warm_pool.agent(self.preload, python_path(), invitation, files)
        complaints = Tail(_SHOWN_BYTES)
        assert agent.stdin is not None
        assert agent.stderr is not None
        try:
            with agent.stderr:
                while words := os.read(agent.stderr.fileno(), 64 * 1024):
                    complaints.add(words)
                    if self.keep_output:
                        sys.stderr.buffer.write(words)
                        sys.stderr.buffer.flush()
            lines = complaints.text.splitlines()
            return agent.wait(), next((line for line in reversed(lines) if line.startswith("hora: node")), "")
        finally:
            agent.stdin.close()  # its lifeline
            _end(agent)


def _end(agent: subprocess.Popen[bytes] | warm_pool.WarmAgent) -> None:
    """Wait for an agent that is about to end; have its guardian kill it after the time limit."""
    try:
        agent.wait(END_S)
    except subprocess.TimeoutExpired:
        if is_stopped(agent.pid):
            send_to_all(family(agent.pid), signal.SIGKILL)
        elif agent.pid:
            send_signal(agent.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            agent.wait(KILLED_S)


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
