"""The nodes of a job that is started without ssh: by the same command on every node, or inside a Slurm allocation.

`open_nodes` is where `start` asks whether this is such a job; `serve_node` is what a node other than the first does
instead of starting one.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from hora.errors import AuthenticationError
from hora.launch.controller.agents import Agents, credentials
from hora.launch.job import LeadershipLostError, exit_status
from hora.launch.options import Options
from hora.launch.providers.platforms import Machine, find_place
from hora.launch.providers.slurm import allocation, start_agents
from hora.launch.slots import HostInfo, NodeSpec
from hora.net import address
from hora.net.keys import read_secret_file
from hora.net.wire import new_secret

if TYPE_CHECKING:
    from hora.launch.ha.leadership import Leadership

__all__ = ["find_node", "open_nodes", "read_secret", "serve_node"]

_RETURN_LIMIT_S = 10.0


@contextlib.contextmanager
def open_nodes(
    options: Options, environ: Mapping[str, str], leadership: Leadership | None = None
) -> Iterator[Agents | None]:
    """The nodes of this job, all of them there, until it is over; None for a job whose hosts are reached otherwise.

    `leadership`: this process leads a job whose agents outlive their leader, perhaps after another one.
    """
    limits = options.silence_limits()
    starting: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    if leadership is not None:
        from hora.launch.ha.leadership import own_address

        where, num_nodes = (own_address(leadership.store.members), 0), find_node(options, environ).num_nodes
        names = [str(host) for _, host, *_ in (leadership.state or {}).get("workers", ())]
        leading: dict[str, Any] = {"elastic": True, "nonce": leadership.run, "term": leadership.term, "names": names}
        opened = Agents(where, read_secret(options), num_nodes=num_nodes, **limits, **leading)
    elif options.joins:
        place = find_node(options, environ)
        own, others = HostInfo(place.name, place.slots or 1), place.num_nodes - 1
        where, secret = _meeting_address(place), read_secret(options)
        opened = Agents(where, secret, num_nodes=others, own=own, elastic=options.elastic, **limits)
    else:
        allocated = allocation(options, environ)
        if allocated is None:
            yield None
            return
        secret = new_secret()
        opened = Agents((allocated.address(), 0), secret, num_nodes=len(allocated.hosts), **limits)
        starting = start_agents(allocated, opened, secret, environ, limit_s=float(options.effective("start_timeout")))
    status = 1
    with starting:
        try:
            if leadership is not None:
                there = {"host": opened.address, "port": opened.port, "term": leadership.term}
                leadership.save("where", there)
            if leadership is not None and leadership.state is not None:
                _wait_for_agents(opened, leadership, limits["return_s"])
            else:
                elastic = options.num_proc if options.elastic else None
                opened.wait(float(options.effective("start_timeout")), num_slots=elastic)
            yield opened
            status = 0
        except LeadershipLostError:
            opened.abandon()
            raise
        except BaseException as error:
            status = exit_status(error)
            raise
        finally:
            opened.dismiss(status)


def _wait_for_agents(opened: Agents, leadership: Leadership, return_s: float) -> None:
    """Wait for the nodes whose workers the leader before this one had.

    None has any, of a run that this process has not seen: it ended long ago, and a new one begins. LeadershipLostError
    then: stand for election again.
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
    """Be the agent of a node that is not the first, to the end; its exit status. None on the first node.

    With a store (`HORA_STORE`) every node may `lead` the job.
    """
    place = find_node(options, environ)
    if environ.get("HORA_STORE") and lead is not None:
        from hora.launch.ha.election import ElectionLoop

        if not options.elastic:
            raise ValueError("HORA_STORE: a job that outlives its leader is elastic; give --min-np as well")
        return ElectionLoop(options, environ, place, read_secret(options)).run(lead)
    if place.index == 0:
        return None
    from hora.launch.agent.agent import guarded
    from hora.launch.agent.session import serve  # the first node starts faster without

    guarded()
    return serve(place, credentials(read_secret(options)), limit_s=float(options.effective("start_timeout")))


def find_node(options: Options, environ: Mapping[str, str]) -> NodeSpec:
    place = find_place(
        environ,
        Machine(hostname=socket.gethostname(), num_cores=len(os.sched_getaffinity(0)), num_gpus=_count_gpus(environ)),
        num_nodes=options.num_nodes,
        index=options.node_rank,
        meet=options.meet,
        slots=options.slots,
    )
    if place.slots is None and options.num_proc is not None:  # equal parts
        return NodeSpec(**{**place.__dict__, "slots": -(-options.num_proc // place.num_nodes)})
    return place


def _count_gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    return len(glob.glob("/dev/nvidia[0-9]*"))


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


def _meeting_address(place: NodeSpec) -> tuple[str, int]:
    """Return the address at which the first node listens.

    A name that is this machine's only to itself (127.0.1.1) is none that others reach.
    """
    own = [found for found in address.resolve(place.host) if address.is_local(found)]
    literal = place.host in own
    usable = [found for found in own if literal or not found.startswith("127.")]
    if place.num_nodes == 1 and own:
        usable = own
    return (usable[0] if usable else "0.0.0.0"), place.port
