"""The protocol between a job's controller and the agents on its nodes: typed messages.

They travel on an authenticated session (`hora.net.session`), or as frames on the socket between a controller and an
agent of its own machine (`hora.net.messages`).

    agent:       Join -> Started, Output, Exited … -> Finished
    controller:  Welcome or Refused -> Start, Terminate … -> Finish -> Quit
"""

from __future__ import annotations

from typing import Any, NamedTuple

from hora.net.messages import Pong

VERSION = 5


class Invitation(NamedTuple):
    """The line of JSON on the standard input of an agent that a provider has started."""

    where: list[Any]  # the controller's address and port
    key: str  # in hexadecimal
    speaker: int  # whose key that is: this node's number; -1: one for all nodes
    node: int
    name: str
    slots: int
    limit_s: float  # for the connection
    answer_s: float | None = 60.0  # for the controller's answer
    run: str = ""  # of a job whose leader may be started again: only one agent of this node serves it
    gpus: list[str] = []  # noqa: RUF012 - never changed
    lifeline: bool = False  # standard input stays open as long as its starter lives; the agent ends with that
    copies: bool = False  # the workers' output goes to the agent's standard error as well
    streams: bool = True  # output is sent as it comes; otherwise only its end, of a worker that has failed


class Join(NamedTuple):
    """An agent introduces its node."""

    node: int
    name: str
    slots: int
    version: str
    workers: list[int]  # those that run here, of a job that has lost its leader
    gpus: list[str]
    run: str = ""  # of that job
    term: int = 0  # from here on: what that leader asked the agent to `Remember` last
    saved: int = 0
    memory: str = ""
    protocol: int = VERSION


class Welcome(NamedTuple):
    """The node is part of the job's run."""

    name: str
    run: str
    executable: str  # the controller's Python
    silence_s: float  # of the controller, after which the agent ends
    return_s: float  # for coming back after the connection broke
    elastic: bool = False
    term: int = 0
    meeting: int = 0  # the port of the rendezvous
    leaderless_s: float = 0.0  # how long an agent keeps its workers without a leader; 0: it ends with its leader


class Refused(NamedTuple):
    """The node may not join. `forget`: not with its workers, which another leader has replaced, but without them."""

    why: str
    forget: bool = False


class Start(NamedTuple):
    """Start a worker."""

    worker: int
    argv: list[str]
    env: dict[str, str]
    inherit_env: bool  # `env` is added to the agent's own environment
    cwd: str | None
    private_files: dict[str, str]  # contents in hexadecimal, by the variable that names the file
    preload: list[str] | None  # it may be forked from a process that has loaded these modules; None: execute it


class Terminate(NamedTuple):
    """End these workers and their descendants: SIGTERM, SIGKILL after the grace time."""

    workers: list[int]
    grace_s: float


class Finish(NamedTuple):
    """End everything that is left."""

    grace_s: float


class Quit(NamedTuple):
    """The job is over: the agent ends with this exit status."""

    status: int


class Remember(NamedTuple):
    """The state that the next leader needs, should this one die. `saved`: counts what a leader of this `term` saves."""

    term: int
    saved: int
    memory: str


class MeetAt(NamedTuple):
    """The rendezvous of the workers has this port."""

    port: int


class Taken(NamedTuple):
    """This many bytes of output were delivered. An agent that is far ahead stops reading its workers' pipes."""

    num_bytes: int


class Ping(NamedTuple):
    """A heartbeat of the controller."""


class Started(NamedTuple):
    """A worker's process runs."""

    worker: int
    pid: int


class Output(NamedTuple):
    """Some bytes of a worker's `stdout` or `stderr`."""

    worker: int
    stream: str
    data: bytes


class Exited(NamedTuple):
    """A worker's process has ended, and all its output was sent. Death by signal s is code 128 + s."""

    worker: int
    code: int
    reason: str = ""  # why it never ran, if so


class Remembered(NamedTuple):
    """The agent has this state, and loses it only with its workers."""

    term: int
    saved: int


class Leaving(NamedTuple):
    """The agent received SIGTERM: its workers are to commit and leave."""


class Finished(NamedTuple):
    """No process is left on the node. The agent waits for `Quit`."""


Order = Welcome | Refused | Start | Terminate | Finish | Quit | MeetAt | Remember | Taken | Ping  # of a controller
Report = Join | Pong | Started | Output | Exited | Remembered | Leaving | Finished  # of an agent
Message = Order | Report
MESSAGES: dict[str, type[Message]] = {kind.__name__: kind for kind in Message.__args__}
