"""The nodes of a job that is started without ssh: by the same command on every node, or inside a Slurm allocation.

`open_nodes` is where `start` asks whether this is such a job; `serve_node` is what a node other than the first does instead of
starting one.
"""

from __future__ import annotations

import contextlib
import glob
import os
import socket
from collections.abc import Iterator, Mapping

from hora.errors import AuthenticationError, JobFailedError
from hora.launch.agent.agents import Agents
from hora.launch.agent.place import Machine, Place, find_place
from hora.launch.agent.srun import allocation, start_agents
from hora.launch.options import Options
from hora.launch.slots import HostInfo
from hora.net import address
from hora.net.secret_file import read_secret_file
from hora.net.wire import new_secret

__all__ = ["open_nodes", "serve_node"]


@contextlib.contextmanager
def open_nodes(options: Options, environ: Mapping[str, str]) -> Iterator[Agents | None]:
    """The nodes of this job, all of them there, until it is over; None for a job whose hosts are reached otherwise."""
    silence_s = float(options.effective("silence_timeout"))
    return_s = float(options.effective("launcher_timeout")) if options.elastic else 0.0
    if options.joins:
        place = _place(options, environ)
        where, secret = _meeting_address(place), _secret(options)
        own = HostInfo(place.name, place.slots or 1)
        opened = Agents(
            where,
            secret,
            num_nodes=place.num_nodes - 1,
            silence_limit_s=silence_s,
            own=own,
            elastic=options.elastic,
            return_s=return_s,
        )
        starting: contextlib.AbstractContextManager[object] = contextlib.nullcontext()
    else:
        allocated = allocation(options, environ)
        if allocated is None:
            yield None
            return
        secret = new_secret()
        opened = Agents(
            (allocated.address(), 0),
            secret,
            num_nodes=len(allocated.hosts),
            silence_limit_s=silence_s,
            return_s=return_s,
        )
        starting = start_agents(allocated, opened, secret, environ, limit_s=float(options.effective("start_timeout")))
    status = 1
    with starting:
        try:
            elastic = options.num_proc if options.elastic else None
            opened.wait(float(options.effective("start_timeout")), num_slots=elastic)
            yield opened
            status = 0
        except JobFailedError as error:
            status = error.exit_code or 1
            raise
        except SystemExit as leaving:
            status = leaving.code if isinstance(leaving.code, int) else 1
            raise
        finally:
            opened.dismiss(status)


def serve_node(options: Options, environ: Mapping[str, str]) -> int | None:
    """Be the agent of a node that is not the first, to the end; its exit status. None on the first node."""
    place = _place(options, environ)
    if place.index == 0:
        return None
    from hora.launch.agent.node import join  # the first node starts faster without

    return join(place, _secret(options), limit_s=float(options.effective("start_timeout")))


def _place(options: Options, environ: Mapping[str, str]) -> Place:
    place = find_place(
        environ,
        Machine(hostname=socket.gethostname(), num_cores=len(os.sched_getaffinity(0)), num_gpus=_count_gpus(environ)),
        num_nodes=options.num_nodes,
        index=options.node_rank,
        meet=options.meet,
        slots=options.slots,
    )
    if place.slots is None and options.num_proc is not None:  # equal parts
        return Place(**{**place.__dict__, "slots": -(-options.num_proc // place.num_nodes)})
    return place


def _count_gpus(environ: Mapping[str, str]) -> int:
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([item for item in visible.split(",") if item.strip() and item.strip() != "-1"])
    return len(glob.glob("/dev/nvidia[0-9]*"))


def _secret(options: Options) -> bytes:
    if options.secret_file is None:
        raise ValueError(
            "the nodes need a secret that they share: make one (umask 077; openssl rand -hex 32 > FILE), bring it to every "
            "node, and give --secret-file FILE or HORA_SECRET_FILE=FILE"
        )
    try:
        return read_secret_file(options.secret_file, named="--secret-file")
    except AuthenticationError as error:
        raise ValueError(str(error)) from None


def _meeting_address(place: Place) -> tuple[str, int]:
    """Return the address at which the first node listens.

    A name that is this machine's only to itself (127.0.1.1) is none that others reach.
    """
    own = [found for found in address.resolve(place.host) if address.is_local(found)]
    literal = place.host in own
    usable = [found for found in own if literal or not found.startswith("127.")]
    if place.num_nodes == 1 and own:
        usable = own
    return (usable[0] if usable else "0.0.0.0"), place.port
