"""From options to a running job: the entry point of `horovodrun`, `hora run`, `run()` and local `HorovodRunner`s.

`start` finds the hosts, makes the job with a place for every rank, opens the launcher and calls the controller; the
functions below follow that order. Not here: parsing flags (`options`), placement (`slots`), starting processes
(`controller.launcher`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import Job, JobResult, OutputOptions, Watching
from hora.launch.options import Options
from hora.launch.slots import HostInfo, get_host_assignments, lsf_hosts, parse_host_files, parse_hosts
from hora.net import sockets

if TYPE_CHECKING:
    from hora.launch.controller.agents import Agents
    from hora.launch.controller.hosts import ElasticSpec  # jobs that never change size start faster without
    from hora.launch.ha.leadership import Leadership

_log = logging.getLogger("hora.launch")


def start(
    options: Options,
    environ: Mapping[str, str],
    *,
    function: bytes | None = None,
    executable: str | None = None,
    adjust: Callable[[Job], Job] = lambda job: job,
    leadership: Leadership | None = None,
) -> JobResult:
    """Run the command of `options`, or the pickled `function`, to its end. `adjust` may change the job.

    Raises ValueError for a request that cannot be met, JobFailedError if a worker fails.
    """
    if function is None and not options.command:
        raise ValueError("there is no command to run: put it after the options, for example: python train.py")
    for sentence in options.without_effect():
        _log.warning("%s", sentence)
    with contextlib.ExitStack() as stack:
        nodes: Agents | None = None  # whose agents connect by themselves
        if options.joins or environ.get("SLURM_JOB_ID"):
            from hora.launch.providers.join import open_nodes  # imported only here: other jobs start faster without it

            nodes = stack.enter_context(open_nodes(options, environ, leadership))
        elastic = elastic_spec(options, environ, nodes) if options.elastic else None
        job = adjust(make_job(options, environ, elastic, nodes, function=function, executable=executable))
        hostnames = [slot.hostname for slot in job.slots]
        launcher = stack.enter_context(open_launcher(hostnames, options, environ, nodes))
        if elastic is None:
            return run_job(job, launcher)
        if leadership is not None:
            assert nodes is not None
            leadership.agents, leadership.launcher = nodes, launcher
            job = replace(job, id=leadership.run)
        result = run_job(job, launcher, replace(elastic, local_only=launcher.local_only), leadership)
        values = [value for value in result.results if value is not None]
        return replace(result, results=tuple(values[: elastic.limits.min_num_proc]))


def find_hosts(options: Options, environ: Mapping[str, str], nodes: Agents | None = None) -> list[HostInfo]:
    """Return the hosts of a job: its nodes, the given hosts, those of the current LSF job, or this machine."""
    if nodes is not None:
        return nodes.hosts()
    if options.hostfile is not None:
        return parse_hosts(parse_host_files(options.hostfile))
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if environ.get("LSB_JOBID") and (allocated := lsf_hosts(environ)):
        return allocated
    return [HostInfo("localhost", options.num_proc or 1)]


def elastic_spec(options: Options, environ: Mapping[str, str], nodes: Agents | None = None) -> ElasticSpec:
    """Return an elastic job's limits. Raises ValueError if the job could never recover from a failure."""
    from hora.launch.controller.hosts import DiscoveryScript, ElasticSpec

    script = None
    if options.host_discovery_script is not None:
        script = DiscoveryScript(options.host_discovery_script, default_slots=options.slots)
    hosts = script.run() if script is not None else find_hosts(options, environ, nodes)
    if (options.hosts or options.hostfile) and len({host.hostname for host in hosts}) < 2:
        raise ValueError(
            "an elastic job with a fixed list of hosts cannot go on with fewer than 2 hosts, but it has "
            f"{','.join(map(str, hosts))}; add hosts to -H, leave -H out, or give a --host-discovery-script"
        )
    num_proc = options.num_proc or sum(host.slots for host in hosts) or options.min_num_proc or 1
    if script is None and nodes is None:
        get_host_assignments(hosts, num_proc)  # a fixed list never grows: fail now if it is too short
    timeout_s = float(options.effective("elastic_timeout"))
    return ElasticSpec(
        limits=Limits(
            num_proc=num_proc,
            min_num_proc=options.min_num_proc or num_proc,
            max_num_proc=options.max_num_proc,
            reset_limit=options.reset_limit,
            elastic_timeout_s=timeout_s,
            stuck_s=max(timeout_s / 2, 1.0),
            lost_s=float(options.effective("launcher_timeout")),
        ),
        hosts=tuple(hosts),
        script=nodes if script is None else script,
        cooldown_range=options.cooldown_range,
        leave_s=float(options.effective("leave_timeout")),
    )


def make_job(
    options: Options,
    environ: Mapping[str, str],
    elastic: ElasticSpec | None = None,
    nodes: Agents | None = None,
    *,
    function: bytes | None = None,
    executable: str | None = None,
) -> Job:
    """Return the job of `options`: exactly `-np` ranks, or one per slot of an elastic job's first hosts."""
    if elastic is None:
        hosts: Sequence[HostInfo] = find_hosts(options, environ, nodes)
        num_proc = options.num_proc or sum(host.slots for host in hosts)
    else:
        # A discovery script may know of no host yet.
        hosts = elastic.hosts or (HostInfo("localhost", elastic.limits.num_proc),)
        num_proc = sum(host.slots for host in hosts)
    slots = tuple(get_host_assignments(hosts, num_proc, num_proc))
    env = {**environ, "PYTHONUNBUFFERED": "1", **options.worker_env()}
    if not options.nics and nodes is None and all(sockets.is_local(name) for name in {slot.hostname for slot in slots}):
        env.setdefault("HOROVOD_GLOO_IFACE", "lo")
        env.setdefault("NCCL_SOCKET_IFNAME", "lo")
        # All ranks share this machine's cores, whatever its names.
        env.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // num_proc, 1)))
        if importlib.util.find_spec("mpi4py") is not None:
            env.setdefault("HORA_MPI", "1")
    if elastic is not None:
        env |= elastic.limits.worker_env()
    return Job(
        slots=slots,
        command=options.command if function is None else (),
        function=function,
        env=env,
        cwd=_directory(),
        executable=executable or sys.executable,
        output=OutputOptions(timestamp=bool(options.prefix_output_with_timestamp), directory=options.output_filename),
        start_timeout_s=float(options.effective("start_timeout")),
        verbose=bool(options.verbose),
        secret=None if nodes is None else nodes.job_secret,
        watching=Watching.wanted(
            environ, page=options.dashboard, listen=options.dashboard_address, record=options.record
        ),
    )


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError("the directory you are in does not exist any more; go to another one and try again") from None


@contextlib.contextmanager
def open_launcher(
    hostnames: Iterable[str], options: Options, environ: Mapping[str, str], nodes: Agents | None = None
) -> Iterator[HostLauncher]:
    """Yield the launcher for these hosts: of this machine, of agents that ssh starts, or of agents that have joined."""
    remote = [name for name in dict.fromkeys(hostnames) if not sockets.is_local(name)]
    if nodes is not None:
        yield HostLauncher(agents=nodes, listen=nodes.address)
    elif not remote and not options.nics:
        yield HostLauncher()
    else:
        from hora.launch.providers.ssh import Ssh, open_hosts, reachable_address  # local jobs start faster without

        ssh = Ssh.from_environ(environ, port=options.ssh_port, identity_file=options.ssh_identity_file)
        listen = sockets.interface_address(options.nics) if options.nics else reachable_address(remote, ssh)
        limits = {"limit_s": float(options.effective("start_timeout")), **options.silence_limits()}
        with open_hosts(remote, ssh, listen, verbose=bool(options.verbose), **limits) as agents:
            yield HostLauncher(agents=agents, listen=listen)
