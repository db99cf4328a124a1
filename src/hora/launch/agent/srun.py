"""A Slurm allocation as hosts: which nodes and slots it has, and an agent on each of them, started by one `srun`.

The agents' secret goes through srun's standard input, which Slurm brings to every task. Called by `nodes`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from hora import slurm
from hora.launch.agent.agents import Agents
from hora.launch.environment import module_command
from hora.launch.host.connection import wait_or_kill
from hora.launch.options import Options
from hora.launch.slots import HostInfo
from hora.net import address

__all__ = ["Allocation", "allocation", "start_agents"]

_ASK_LIMIT_S = 30.0
_END_LIMIT_S = 30.0
# What the batch script was asked for is not what this step shall have: one task on each node, with all that is there.
_NOT_FOR_THE_STEP = (
    "SLURM_NTASKS",
    "SLURM_NPROCS",
    "SLURM_NTASKS_PER_NODE",
    "SLURM_CPUS_PER_TASK",
    "SLURM_TASKS_PER_NODE",
)


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of the Slurm job that we are in, and the processes that each may run."""

    job: str
    hosts: tuple[HostInfo, ...]

    def address(self) -> str:
        """Our address that its nodes reach."""
        for host in self.hosts:
            for target in address.resolve(host.hostname) or _node_addresses(host.hostname):
                with contextlib.suppress(OSError):
                    return address.source_address(target)
        raise RuntimeError(
            f"there is no way from here to the nodes of Slurm job {self.job}; do their names have addresses?"
        )


def allocation(options: Options, environ: Mapping[str, str]) -> Allocation | None:
    """The allocation that a job shall use: the one we are in, unless hosts are named or it is this machine alone."""
    job = environ.get("SLURM_JOB_ID")
    named = options.hosts or options.hostfile or options.host_discovery_script
    in_a_step = environ.get("SLURM_STEP_ID", environ.get("SLURM_STEPID")) is not None
    if not job or named or in_a_step or shutil.which("srun", path=environ.get("PATH")) is None:
        return None
    nodes = slurm.node_names(environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST") or "")
    if not nodes or nodes == [environ.get("SLURMD_NODENAME")]:  # a batch script on its only node
        return None
    return Allocation(job=job, hosts=_slots(nodes, options.num_proc, environ))


def _slots(nodes: list[str], num_proc: int | None, environ: Mapping[str, str]) -> tuple[HostInfo, ...]:
    """One for each task that the job was given; for each core, where there are not enough of those."""
    tasks = slurm.tasks_per_node(environ.get("SLURM_TASKS_PER_NODE", "")) or [1] * len(nodes)
    cores = slurm.tasks_per_node(environ.get("SLURM_JOB_CPUS_PER_NODE", "")) or tasks
    for name, counts in (("SLURM_TASKS_PER_NODE", tasks), ("SLURM_JOB_CPUS_PER_NODE", cores)):
        if len(counts) != len(nodes):
            raise ValueError(
                f"{name} speaks of {len(counts)} nodes, but the Slurm job has {len(nodes)}: {', '.join(nodes)}"
            )
    chosen = cores if num_proc is not None and sum(tasks) < num_proc else tasks
    if num_proc is not None and sum(chosen) < num_proc:
        raise ValueError(
            f"-np {num_proc}, but the Slurm job has {sum(tasks)} tasks and {sum(cores)} cores on {len(nodes)} nodes; ask for "
            "fewer processes, or for more tasks (sbatch --nodes … --ntasks-per-node …)"
        )
    return tuple(HostInfo(name, slots) for name, slots in zip(nodes, chosen, strict=True))


def _node_addresses(name: str) -> list[str]:
    """What Slurm knows of a node whose name is not in the name service."""
    try:
        shown = subprocess.run(
            ["scontrol", "--oneliner", "show", "node", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_LIMIT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return []
    words = [word.partition("=")[2] for word in shown.stdout.split() if word.startswith("NodeAddr=")]
    return [found for word in words for found in address.resolve(word)]


@contextlib.contextmanager
def start_agents(
    allocated: Allocation, agents: Agents, secret: bytes, environ: Mapping[str, str], *, limit_s: float
) -> Iterator[None]:
    """An agent on every node, until the block ends."""
    num_nodes = len(allocated.hosts)
    command = [
        "srun",
        f"--jobid={allocated.job}",
        f"--nodes={num_nodes}",
        f"--ntasks={num_nodes}",
        "--ntasks-per-node=1",
        f"--nodelist={','.join(host.hostname for host in allocated.hosts)}",
        "--quiet",
        "--overlap",  # the batch script's own resources, and all of them
        "--cpu-bind=none",
        "--kill-on-bad-exit=0",  # the controller decides what a lost node means
        "--job-name=hora",
        *module_command(sys.executable, "hora.launch.agent.node"),
    ]
    env = {name: value for name, value in environ.items() if name not in _NOT_FOR_THE_STEP}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True)
    assert process.stdin is not None
    order = {
        "host": agents.address,
        "port": agents.port,
        "nodes": [host.hostname for host in allocated.hosts],
        "slots": [host.slots for host in allocated.hosts],
        "secret": secret.hex(),
        "limit_s": limit_s,
    }
    agents.watch_starter(lambda: _how_it_ended(process))
    try:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
        yield
    finally:
        with contextlib.suppress(OSError):
            process.stdin.close()
        if process.poll() is None:
            _wait_or_terminate(process)


def _how_it_ended(process: subprocess.Popen[bytes]) -> str:
    code = process.poll()
    return "" if code is None else f"srun, which starts the agents of the nodes, ended with status {code}"


def _wait_or_terminate(process: subprocess.Popen[bytes]) -> None:
    """srun ends when its tasks have; a SIGTERM makes it end them."""
    try:
        process.wait(_END_LIMIT_S)
    except subprocess.TimeoutExpired:
        process.terminate()
        wait_or_kill(process, _END_LIMIT_S)
