"""From options to a running job: the entry point of `horovodrun`, `hora run`, `run()` and local `HorovodRunner`s.

`start` is the sequence of every job: serve -> provider.start -> loop -> close. The functions below follow that order.
Not here: parsing flags (`options`), placement (`slots`), how an agent is started (`providers`).
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from hora.config import changed_environment
from hora.launch.controller.launcher import HostLauncher
from hora.launch.controller.loop import Leadership, run_job
from hora.launch.controller.policy import Limits
from hora.launch.job import Job, JobResult, OutputOptions, Watching
from hora.launch.options import Options
from hora.launch.ports import check_ports
from hora.launch.preload import modules_to_preload
from hora.launch.processes import ended_by_signals
from hora.launch.program import Program
from hora.launch.providers.base import Provider
from hora.launch.providers.local import ThisMachine
from hora.launch.slots import HostInfo, get_host_assignments, parse_host_files, parse_hosts
from hora.net import sockets
from hora.net.wire import new_secret
from hora.platforms import lsf, slurm

if TYPE_CHECKING:
    from hora.launch.controller.agents import Agents
    from hora.launch.controller.hosts import DiscoveryScript, ElasticSpec  # jobs of a fixed size start faster without
    from hora.launch.controller.succession import Succession
    from hora.launch.ha.leadership import Leadership as StoredLeadership

_log = logging.getLogger("hora.launch")


def start(
    options: Options,
    environ: Mapping[str, str],
    *,
    function: bytes | None = None,
    executable: str | None = None,
    adjust: Callable[[Job], Job] = lambda job: job,
    provider: Provider | None = None,
    listen: str | None = None,
    leadership: StoredLeadership | None = None,
) -> JobResult:
    """Run the command of `options`, or the pickled `function`, to its end. `adjust` may change the job.

    `provider`: starts the agents, instead of the one that options and environment ask for. They reach this process at
    the address `listen`. Raises ValueError for a request that cannot be met, JobFailedError if a worker fails.
    """
    if function is None and not options.command:
        raise ValueError("there is no command to run: put it after the options, for example: python train.py")
    for sentence in options.without_effect():
        _log.warning("%s", sentence)
    with contextlib.ExitStack() as stack:
        if options.ports is not None:
            stack.enter_context(changed_environment({"HORA_PORTS": options.ports}))  # this process listens, too
        script = _discovery(options)
        agents: Agents | None
        succession = _succession(options)
        if succession is not None:
            from hora.launch.providers.join import serve_run

            agents, provider = serve_run(options, environ, succession)
        elif provider is None:
            provider, agents = _choose(options, environ, script, leadership)
        else:
            agents = _serve(provider, options, listen or "127.0.0.1")
        stack.callback(provider.close)
        if agents is not None:
            stack.enter_context(agents.serving())
        hosts = provider.hosts()
        page = Watching.wanted(environ, page=options.dashboard, listen=options.dashboard_address)
        most = options.max_num_proc if options.elastic else options.num_proc
        check_ports(
            {host.hostname: min(host.slots, most or host.slots) for host in hosts},
            {**environ, **options.worker_env()},
            has_agents=agents is not None,
            has_page=page is not None and page.page,
        )
        if agents is not None and agents.nodes:  # the job's hosts are those that have joined
            _start_agents(agents, hosts, options)
            hosts = agents.hosts()
        elastic = elastic_spec(options, hosts, script, agents) if options.elastic else None
        job = adjust(make_job(options, environ, elastic, hosts, agents, function=function, executable=executable))
        if agents is not None:
            job = replace(job, platform=type(provider).__name__)
        if agents is not None and not agents.nodes:
            _start_agents(agents, hosts, options)
        launcher = HostLauncher() if agents is None else HostLauncher(agents=agents, listen=agents.address)
        if elastic is None:
            return run_job(job, launcher)
        leads: Leadership | None = succession or leadership
        if leads is not None:
            assert agents is not None
            leads.agents, leads.launcher = agents, launcher
            # Ranks must find the rendezvous of the next leader, too; a store tells their node where it is.
            job = replace(job, id=leads.run, port=0 if succession is None else agents.port + 1)
        result = run_job(job, launcher, elastic, leads)
        values = [value for value in result.results if value is not None]
        return replace(result, results=tuple(values[: elastic.limits.min_num_proc]))


def _succession(options: Options) -> Succession | None:
    """Return this process's time as the leader of the run that `--run-id` names. ValueError: it cannot be led on."""
    if options.run_id is None:
        return None
    if not (options.joins and options.elastic):
        raise ValueError(
            "--run-id: a launcher can be started again only for an elastic job of nodes that join; add --join (or "
            "--nnodes) and --min-np, or leave --run-id out"
        )
    if not re.fullmatch(r"[\w.-]{1,64}", options.run_id, re.ASCII):
        raise ValueError(f"--run-id takes up to 64 letters, digits, dots, dashes or underscores: {options.run_id!r}")
    from hora.launch.controller.succession import Succession

    return Succession(options.run_id, float(options.effective("leader_timeout")))


def _discovery(options: Options) -> DiscoveryScript | None:
    if options.host_discovery_script is None:
        return None
    from hora.launch.controller.hosts import DiscoveryScript

    return DiscoveryScript(options.host_discovery_script, default_slots=options.slots)


def _choose(
    options: Options, environ: Mapping[str, str], script: DiscoveryScript | None, leadership: StoredLeadership | None
) -> tuple[Provider, Agents | None]:
    """Return the provider that options and environment ask for, and its agents; None: all ranks are on this machine.

    Each platform's module is imported only where it is used: other jobs start faster without.
    """
    if options.joins:
        from hora.launch.providers.join import serve_nodes

        agents, joining = serve_nodes(options, environ, leadership)
        return joining, agents
    if slurm.job(environ):
        from hora.launch.providers.slurm import SlurmNodes, allocation

        allocated = allocation(options, environ)
        if allocated is not None:
            provider: Provider = SlurmNodes(allocated, environ)
            return provider, _serve(provider, options, allocated.address(), nodes=True)
    hosts = find_hosts(options, environ) if script is None else script.run()
    if not options.elastic:  # the others are not needed
        slots = get_host_assignments(hosts, *[options.num_proc or sum(host.slots for host in hosts)] * 2)
        used = {slot.hostname for slot in slots}
        hosts = [host for host in hosts if host.hostname in used]
    remote = [host.hostname for host in hosts if not sockets.is_local(host.hostname)]
    if not remote and not options.nics:
        return ThisMachine(hosts), None
    from hora.launch.providers.ssh import Ssh, SshHosts, reachable_address

    ssh = Ssh.from_environ(environ, port=options.ssh_port, identity_file=options.ssh_identity_file)
    listen = sockets.interface_address(options.nics) if options.nics else reachable_address(remote, ssh)
    provider = SshHosts(hosts, ssh, verbose=bool(options.verbose))
    return provider, _serve(provider, options, listen, is_own=sockets.is_local)


def _serve(
    provider: Provider,
    options: Options,
    listen: str,
    *,
    nodes: bool = False,
    is_own: Callable[[str], bool] = lambda hostname: False,
) -> Agents:
    """Listen for the agents that this provider will start."""
    from hora.launch.controller.agents import Agents

    limit_s = float(options.effective("start_timeout"))
    limits = {"start_limit_s": limit_s, **options.silence_limits()}
    return Agents((listen, 0), new_secret(), provider=provider, nodes=nodes, is_own=is_own, **limits)


def _start_agents(agents: Agents, hosts: Sequence[HostInfo], options: Options) -> None:
    """Have an agent started on each of these hosts; an elastic job begins as soon as enough nodes have joined."""
    if options.joins:
        return
    num_slots = options.num_proc if options.elastic and agents.nodes else None
    with ended_by_signals():
        agents.start_on(hosts, num_slots=num_slots)


def find_hosts(options: Options, environ: Mapping[str, str]) -> list[HostInfo]:
    """Return the hosts of a job: the given hosts, those of the current LSF job, or this machine."""
    if options.hostfile is not None:
        return parse_hosts(parse_host_files(options.hostfile))
    if options.hosts is not None:
        return parse_hosts(options.hosts)
    if lsf.in_job(environ) and (allocated := lsf.hosts(environ)):
        return [HostInfo.from_string(f"{name}:{slots}") for name, slots in allocated]
    return [HostInfo("localhost", options.num_proc or 1)]


def elastic_spec(
    options: Options,
    hosts: Sequence[HostInfo],
    script: DiscoveryScript | None = None,
    agents: Agents | None = None,
) -> ElasticSpec:
    """Return an elastic job's limits. Raises ValueError if the job could never recover from a failure."""
    from hora.launch.controller.hosts import ElasticSpec

    nodes = agents if agents is not None and agents.nodes else None
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
        local_only=agents is None,
        cooldown_range=options.cooldown_range,
        leave_s=float(options.effective("leave_timeout")),
        forgiven=options.spares or 0,
    )


def make_job(
    options: Options,
    environ: Mapping[str, str],
    elastic: ElasticSpec | None,
    hosts: Sequence[HostInfo],
    agents: Agents | None = None,
    *,
    function: bytes | None = None,
    executable: str | None = None,
) -> Job:
    """Return the job of `options`: exactly `-np` ranks, or one per slot of an elastic job's first hosts."""
    if elastic is None:
        num_proc = options.num_proc or sum(host.slots for host in hosts)
    else:
        # A discovery script may know of no host yet.
        hosts = hosts or (HostInfo("localhost", elastic.limits.num_proc),)
        num_proc = sum(host.slots for host in hosts)
    slots = tuple(get_host_assignments(hosts, num_proc, num_proc))
    env = {**environ, "PYTHONUNBUFFERED": "1", **options.worker_env()}
    nodes = agents if agents is not None and agents.nodes else None
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
        preload=_preload(options) if function is None and options.spares and elastic is not None else None,
        forks_one=bool(options.spares),
        secret=None if nodes is None else nodes.job_secret,
        watching=Watching.wanted(
            environ,
            page=options.dashboard,
            listen=options.dashboard_address,
            record=options.record,
            verdict=options.verdict,
        ),
    )


def _preload(options: Options) -> tuple[str, ...] | None:
    """Return the modules of the command that each host's fork server loads; None: its ranks cannot be forked."""
    program = Program.of(options.command)
    if program is None:
        raise ValueError(
            "--spares needs a command of the form `python SCRIPT …` or `python -m MODULE …`, which a process that has "
            f"imported torch can begin, but it is: {' '.join(options.command)}"
        )
    modules = modules_to_preload(program.text())
    if modules is None:
        _log.warning(
            "--spares: %s sets variables that torch reads when it is imported, so new ranks import it again; set them "
            "in the environment of the command instead",
            program.name,
        )
    return modules


def _directory() -> str:
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ValueError("the directory you are in does not exist any more; go to another one and try again") from None
