"""Jobs that are started by the same command on every node.

`serve_nodes` accepts the nodes of such a job; `serve_node` runs the agent of every node but the first. `find_place`
reads the node's place from flags, or from the variables of the platform (`hora.platforms`).
"""

from __future__ import annotations

import json
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from hora.errors import AuthenticationError
from hora.launch.agent.protocol import Invitation
from hora.launch.controller.agents import Agents, credentials
from hora.launch.controller.succession import Succession
from hora.launch.job import LeadershipLostError
from hora.launch.options import Options
from hora.launch.processes import module_command
from hora.launch.providers.base import Commands, Order, StartError
from hora.launch.slots import HostInfo
from hora.net import sockets
from hora.net.keys import read_secret_file
from hora.net.wire import Credentials
from hora.platforms.detect import detect_node
from hora.platforms.node import Node, meeting_port

if TYPE_CHECKING:
    from hora.launch.ha.leadership import Leadership

_RETURN_LIMIT_S = 10.0


def find_place(options: Options, environ: Mapping[str, str], hostname: str = "") -> Node:
    """Return this node's place. Raises ValueError if it is unknown or incomplete. `hostname`: this machine's."""
    hostname = hostname or socket.gethostname()
    environ = {**environ, "HORA_PORTS": options.ports or ""}
    num_nodes, index, meet, found = options.num_nodes, options.node_rank, options.meet, None
    if num_nodes is None or index is None:
        found = detect_node(environ, hostname)
    if found is None:
        if num_nodes is None or index is None or (meet or environ.get("MASTER_ADDR")) is None:
            missing = "--nnodes" if num_nodes is None else "--node-rank" if index is None else "--meet HOST:PORT"
            raise ValueError(
                f"{missing} is missing: no variables of Kubeflow, SkyPilot, Slurm, LSF, PBS, SageMaker, Open MPI or "
                "PMI tell which node this is"
            )
        found = Node(num_nodes=num_nodes, index=index, host="")
    host, port = _host_and_port(meet, found, environ)
    num_nodes = found.num_nodes if num_nodes is None else num_nodes
    slots = options.slots or found.slots
    if slots is None and options.num_proc is not None:  # equal parts
        slots = -(-options.num_proc // num_nodes)
    index, name = found.index if index is None else index, found.name or hostname
    return replace(found, num_nodes=num_nodes, index=index, host=host, port=port, slots=slots, name=name)


def _host_and_port(meet: str | None, found: Node, environ: Mapping[str, str]) -> tuple[str, int]:
    if meet is None and found.host:
        return found.host, found.port or meeting_port(environ)
    text = meet if meet is not None else environ.get("MASTER_ADDR", "")
    if not text:
        raise ValueError(
            f"nothing says where the nodes meet ({found.platform}); give --meet HOST:PORT, with the first node's name"
        )
    host, _, port = text.partition(":") if text.count(":") == 1 else (text, "", "")
    port = port or environ.get("MASTER_PORT", "") or str(meeting_port(environ))
    if not port.isdecimal() or not int(port) or not host:
        raise ValueError(f"--meet takes HOST:PORT, but it is {text!r}")
    return host, int(port)


class JoiningNodes:
    """Nodes on which the platform has started the same command. Nothing here starts an agent: see `Provider`."""

    def __init__(self, agents: Agents, *, limit_s: float, num_slots: int | None, leadership: Leadership | None) -> None:
        self._agents, self._limit_s, self._num_slots, self._leadership = agents, limit_s, num_slots, leadership

    def hosts(self) -> Sequence[HostInfo]:
        """Return the nodes after all have joined, or enough of them."""
        leadership = self._leadership
        if leadership is not None:
            there = {"host": self._agents.address, "port": self._agents.port, "term": leadership.term}
            leadership.put("where", there)
        if leadership is not None and leadership.state is not None:
            _wait_for_agents(self._agents, leadership, self._agents.return_s)
        else:
            self._agents.wait(self._limit_s, num_slots=self._num_slots)
        return self._agents.hosts()

    def start(self, host: str, order: Order) -> None:
        raise StartError("its platform starts it: it joins by itself")

    def ended(self, host: str, why: str) -> None: ...

    def close(self) -> None: ...


class RestartedNodes:
    """Nodes of a run whose first node's command may be typed again. See `Provider`.

    The first node has an agent as every other, in a process of its own: it outlives the leader's.
    """

    def __init__(self, agents: Agents, place: Node, key: Credentials, options: Options, leader: Succession) -> None:
        self._agents, self._place, self._key, self._options, self._leader = agents, place, key, options, leader
        self._commands = Commands()

    def hosts(self) -> Sequence[HostInfo]:
        """Return the nodes when the run can begin, or go on from what its agents remember."""
        limit_s = float(self._options.effective("start_timeout"))
        invitation = Invitation(
            where=[self._agents.address, self._agents.port],
            key=self._key.secret.hex(),
            speaker=self._key.speaker,
            node=self._place.index,
            name=self._place.name,
            slots=self._place.slots or 1,
            limit_s=limit_s,
            run=self._leader.run,
        )
        command = module_command(sys.executable, "hora.launch.agent.session")
        order = Order(command, json.dumps(invitation._asdict()).encode() + b"\n", limit_s)
        run = partial(self._commands.run, self._place.name, command, order)
        threading.Thread(target=run, name="hora-own-agent", daemon=True).start()
        self._leader.gather(num_slots=self._options.num_proc, limit_s=limit_s, return_s=self._agents.return_s)
        return self._agents.hosts()

    def start(self, host: str, order: Order) -> None:
        raise StartError("its platform starts it: it joins by itself")

    def ended(self, host: str, why: str) -> None: ...

    def close(self) -> None:
        self._commands.close()


def serve_run(options: Options, environ: Mapping[str, str], succession: Succession) -> tuple[Agents, RestartedNodes]:
    """Listen for the nodes of a run whose leader may be started again. All of them join, this one too."""
    place, secret, limits = find_place(options, environ), read_secret(options), options.silence_limits()
    leading: dict[str, Any] = {"elastic": True, "nonce": succession.run, "succession": succession}
    agents = Agents(_meeting_address(place), secret, num_nodes=place.num_nodes, **limits, **leading)
    return agents, RestartedNodes(agents, place, credentials(secret), options, succession)


def serve_nodes(
    options: Options, environ: Mapping[str, str], leadership: Leadership | None = None
) -> tuple[Agents, JoiningNodes]:
    """Listen for the nodes of a job that is started by the same command on every node, of which this is the first."""
    place, secret, limits = find_place(options, environ), read_secret(options), options.silence_limits()
    if leadership is None:
        own, others = HostInfo(place.name, place.slots or 1), place.num_nodes - 1
        where = _meeting_address(place)
        agents = Agents(where, secret, num_nodes=others, own=own, elastic=options.elastic, **limits)
    else:
        from hora.launch.ha.leadership import own_address

        where = (own_address(leadership.store.members), 0)
        names = [str(host) for _, host, *_ in (leadership.state or {}).get("workers", ())]
        leading: dict[str, Any] = {"elastic": True, "nonce": leadership.run, "term": leadership.term, "names": names}
        agents = Agents(where, secret, num_nodes=place.num_nodes, **limits, **leading)
    num_slots, limit_s = options.num_proc if options.elastic else None, float(options.effective("start_timeout"))
    return agents, JoiningNodes(agents, limit_s=limit_s, num_slots=num_slots, leadership=leadership)


def _wait_for_agents(opened: Agents, leadership: Leadership, return_s: float) -> None:
    """Wait for the nodes of the previous leader's workers.

    If none has workers of a run that this process has not seen, that run ended long ago and a new one begins: raise
    LeadershipLostError, to stand for election again.
    """
    assert leadership.state is not None
    alive = {"STARTING", "READY", "WORKING"}
    hosts = {str(host) for _, host, _, state, *_ in leadership.state["workers"] if state in alive}
    opened.wait_for(hosts, _RETURN_LIMIT_S)
    if leadership.followed and not any(opened.workers_at(host) for host in hosts):
        opened.wait_for(hosts, return_s)
    elif not any(opened.workers_at(host) for host in hosts):
        leadership.store.delete("state", term=leadership.term)
        raise LeadershipLostError


def serve_node(
    options: Options, environ: Mapping[str, str], lead: Callable[[Leadership], object] | None = None
) -> int | None:
    """Run the agent of a node other than the first; return its exit status. None on the first node.

    With a store (`HORA_STORE`) every node may `lead` the job.
    """
    place = find_place(options, environ)
    if environ.get("HORA_STORE") and lead is not None:
        from hora.launch.ha.leadership import ElectionLoop

        if not options.elastic:
            raise ValueError("HORA_STORE: a job that outlives its leader is elastic; give --min-np as well")
        return ElectionLoop(options, environ, place, read_secret(options)).run(lead)
    if place.index == 0:
        return None
    from hora.launch.agent.agent import guarded
    from hora.launch.agent.session import serve  # lazy: the first node starts faster

    guarded()
    return serve(place, credentials(read_secret(options)), limit_s=float(options.effective("start_timeout")))


def read_secret(options: Options) -> bytes:
    if options.secret_file is None:
        raise ValueError(
            "the nodes need a secret that they share: make one (umask 077; openssl rand -hex 32 > FILE), bring it to "
            "every node, and give --secret-file FILE or HORA_SECRET_FILE=FILE"
        )
    try:
        return read_secret_file(options.secret_file, named="--secret-file")
    except AuthenticationError as error:
        raise ValueError(str(error)) from None


def _meeting_address(place: Node) -> tuple[str, int]:
    """Return the address at which the first node listens.

    A name that is this machine's only to itself (127.0.1.1) is none that others reach.
    """
    own = [found for found in sockets.resolve(place.host) if sockets.is_local(found)]
    literal = place.host in own
    usable = [found for found in own if literal or not found.startswith("127.")]
    if place.num_nodes == 1 and own:
        usable = own
    return (usable[0] if usable else "0.0.0.0"), place.port
