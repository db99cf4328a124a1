"""A Slurm allocation as hosts: its nodes and slots, and an agent on each node, started by `srun`."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hora.launch.options import Options
from hora.launch.processes import output_of
from hora.launch.providers.base import Commands, Order, StartError
from hora.launch.slots import HostInfo
from hora.net import sockets
from hora.platforms import slurm

_ASK_LIMIT_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """The nodes of the current Slurm job and their slots. It has one component, unless it is heterogeneous."""

    job: str
    hosts: tuple[HostInfo, ...]
    components: tuple[slurm.Component, ...]

    def address(self) -> str:
        """Return this machine's address for the nodes."""
        for host in self.hosts:
            for target in sockets.resolve(host.hostname) or _node_addresses(host.hostname):
                with contextlib.suppress(OSError):
                    return sockets.source_address(target)
        raise RuntimeError(
            f"there is no way from here to the nodes of Slurm job {self.job}; do their names have addresses?"
        )


def allocation(options: Options, environ: Mapping[str, str]) -> Allocation | None:
    """Return the allocation for a job: the current one, unless hosts are named or it is only this machine."""
    job = slurm.job(environ)
    named = options.hosts or options.hostfile or options.host_discovery_script
    if not job or named or slurm.in_step(environ) or shutil.which("srun", path=environ.get("PATH")) is None:
        return None
    nodes = slurm.job_nodes(environ)
    if not nodes or nodes == [slurm.own_node(environ)]:  # a batch script on its only node
        return None
    components = tuple(slurm.components(environ))
    counts = [count for component in components for count in component.counts]
    return Allocation(job=job, hosts=_slots(nodes, counts, options.num_proc), components=components)


def _slots(nodes: list[str], counts: list[tuple[int, int]], num_proc: int | None) -> tuple[HostInfo, ...]:
    """Return one slot per task of the job, or per core if there are too few tasks."""
    tasks, cores = [tasks for tasks, _ in counts], [cores for _, cores in counts]
    chosen = cores if num_proc is not None and sum(tasks) < num_proc else tasks
    if num_proc is not None and sum(chosen) < num_proc:
        raise ValueError(
            f"-np {num_proc}, but the Slurm job has {sum(tasks)} tasks and {sum(cores)} cores on {len(nodes)} nodes; "
            "ask for fewer processes, or for more tasks (sbatch --nodes … --ntasks-per-node …)"
        )
    return tuple(HostInfo(name, slots) for name, slots in zip(nodes, chosen, strict=True))


def _node_addresses(name: str) -> list[str]:
    """Ask Slurm for the addresses of a node whose name is not in the name service."""
    shown = output_of(["scontrol", "--oneliner", "show", "node", name], limit_s=_ASK_LIMIT_S)
    words = [word.partition("=")[2] for word in shown.split() if word.startswith("NodeAddr=")]
    return [found for word in words for found in sockets.resolve(word)]


class SlurmNodes:
    """Starts agents by `srun`, one step for each node, in the current allocation: see `Provider`."""

    def __init__(self, allocated: Allocation, environ: Mapping[str, str]) -> None:
        self._allocated = allocated
        self._env = slurm.for_a_step(environ)
        self._commands = Commands()

    def hosts(self) -> Sequence[HostInfo]:
        return self._allocated.hosts

    def start(self, host: str, order: Order) -> None:
        status, said = self._commands.run(host, [*self._step(host), *order.command], order, env=self._env)
        raise StartError(f"srun ended with status {status}: {said}".rstrip(": "))

    def ended(self, host: str, why: str) -> None:
        self._commands.end(host)

    def close(self) -> None:
        self._commands.close()

    def _step(self, host: str) -> list[str]:
        """Return the srun command of a step with one task, with all the job's resources on this node."""
        components = self._allocated.components
        number, component = next((n, one) for n, one in enumerate(components) if host in one.nodes)
        gpus = component.gpus_of(host)
        return [
            "srun",
            f"--het-group={number}" if len(components) > 1 else f"--jobid={self._allocated.job}",
            "--nodes=1",
            "--ntasks=1",
            f"--nodelist={host}",
            *([f"--gpus={gpus}"] if gpus else []),
            "--quiet",
            "--overlap",  # the batch script's own resources, and all of them
            "--mem=0",
            "--cpu-bind=none",
            "--kill-on-bad-exit=0",  # the controller decides what a lost node means
            "--job-name=hora",
        ]
