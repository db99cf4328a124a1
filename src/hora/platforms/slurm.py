"""Slurm's variables: the world of a step's task, the node of `srun --ntasks-per-node=1`, the nodes of an allocation."""

from __future__ import annotations

import itertools
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from hora.platforms.meeting import tcp_endpoint
from hora.platforms.node import Node, meeting_port
from hora.platforms.reading import gpus, integer, text, whole_number
from hora.world import RendezvousEndpoint, World

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_MAX_NODES = 1_000_000
_PORTS = range(20000, 40000)  # of the first node
# A step of agents differs from the batch script's request: one task per node, with all of the node's resources.
_NOT_FOR_THE_STEP = re.compile(
    r"SLURM_(NTASKS(_PER_(NODE|CORE|GPU|SOCKET))?|NPROCS|(CPUS|GPUS|TRES)_PER_TASK|TASKS_PER_NODE)"
    r"(_(HET|PACK)_GROUP_\d+)?"  # of a component: the new and the old name of the same
)


def detect(env: Mapping[str, str]) -> World | None:
    """Return the world of a task of a step; inside `sbatch` or `salloc` alone only one process runs."""
    if not ("SLURM_PROCID" in env or "SLURM_NTASKS" in env) or not in_step(env):
        return None
    rank, size = integer(env, "SLURM_PROCID"), integer(env, "SLURM_NTASKS")
    local_rank, local_size, cross_rank, cross_size = _place(env, rank, size)
    return World(
        rank=rank,
        size=size,
        local_rank=local_rank,
        local_size=local_size,
        cross_rank=cross_rank,
        cross_size=cross_size,
        hostname=socket.gethostname(),
        launcher="slurm",
        rendezvous=_endpoint(env, one_host=local_size >= size) if size > 1 else RendezvousEndpoint(),
    )


def _endpoint(env: Mapping[str, str], *, one_host: bool) -> RendezvousEndpoint:
    job = run_name(env, with_step=True)
    return tcp_endpoint(env, "slurm", job=job, one_host=one_host, address=lambda: _first_node(env), name=f"slurm {job}")


def _first_node(env: Mapping[str, str]) -> str:
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
    return next(iter(nodes_of(listed)), "127.0.0.1")


def _place(env: Mapping[str, str], rank: int, size: int) -> tuple[int, int, int, int]:
    """Return local rank and size, cross rank and size."""
    # In the order of the node list. `SLURM_NTASKS_PER_NODE` is only the limit that the user requested.
    listed = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    counts = counts_of(listed)
    if sum(counts) != size:
        raise ValueError(f"the Slurm variables disagree: {size} tasks, but {listed!r} tasks per node")
    ends = list(itertools.accumulate(counts))  # the default distribution: blocks of ranks
    index = integer(env, "SLURM_NODEID", sum(end <= rank for end in ends))
    if not 0 <= index < len(counts):
        raise ValueError(f"SLURM_NODEID is {index}, but there are {len(counts)} nodes: {listed!r} tasks per node")
    local_rank = integer(env, "SLURM_LOCALID", rank - (ends[index] - counts[index]))
    with_such_a_rank = [number for number, count in enumerate(counts) if count > local_rank]
    return local_rank, counts[index], sum(number < index for number in with_such_a_rank), len(with_such_a_rank)


def run_name(env: Mapping[str, str], *, with_step: bool) -> str:
    """Return a name that no other run of this cluster has; empty outside a job. Each step of a job is a run."""
    allocation = env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID", "")
    if not allocation:
        return ""
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", "")
    restarts = env.get("SLURM_RESTART_COUNT", "0")  # a requeued job keeps its number
    return ".".join((allocation, restarts, *([step] if with_step else [])))


def job(env: Mapping[str, str]) -> str:
    """Return the number of the current job; empty outside of one."""
    return env.get("SLURM_JOB_ID", "")


def in_step(env: Mapping[str, str]) -> bool:
    """Return whether this process belongs to a step (`srun`), not to the batch script."""
    return "SLURM_STEP_ID" in env or "SLURM_STEPID" in env


def own_node(env: Mapping[str, str]) -> str:
    """Return the name that Slurm gives to this node; empty if unknown."""
    return env.get("SLURMD_NODENAME", "")


def for_a_step(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `srun` without the batch script's request, which a step would inherit."""
    return {name: value for name, value in env.items() if not _NOT_FOR_THE_STEP.fullmatch(name)}


def node(env: Mapping[str, str], hostname: str) -> Node | None:
    """Return the node of a step with one task per node."""
    if not job(env):
        return None
    if "SLURM_NODEID" not in env:
        raise ValueError(
            "--join inside a Slurm job is for `srun --ntasks-per-node=1 hora run --join …`; leave --join out"
        )
    nodes = nodes_of(env.get("SLURM_STEP_NODELIST") or text(env, "SLURM_JOB_NODELIST", "Slurm"))
    number = job(env)
    return Node(
        num_nodes=len(nodes),
        index=whole_number(env, "SLURM_NODEID", "Slurm"),
        slots=gpus(env, "SLURM_GPUS_ON_NODE"),
        host=nodes[0],
        port=meeting_port(env, job=int(number), ports=_PORTS) if number.isdecimal() else 0,
        name=own_node(env),
        platform="Slurm",
    )


# ---- lists of nodes and of tasks -------------------------------------------------------------------------------


def counts_of(text: str) -> list[int]:
    """Parse tasks per node, in the order of the node list: `2(x3),1` is 2, 2, 2, 1. Empty for an empty text."""
    counts: list[int] = []
    for entry in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        repeat = int(found[2] or 1) if found else 0
        if found is None or len(counts) + repeat > _MAX_NODES:
            raise ValueError(f"tasks per node must look like 2(x3),1 but are {text[:200]!r}")
        counts += [int(found[1])] * repeat
    return counts


def nodes_of(text: str) -> list[str]:
    """Return every node of a node list, in order: `r[1-2]n[01-03]-ib,login1` has seven."""
    names: list[str] = []
    for entry in filter(None, re.split(r",(?![^\[]*\])", text)):
        parts = _GROUP.split(entry.strip())  # text, numbers, text, numbers, …, text
        choices = [_numbers(part, text) if odd % 2 else [part] for odd, part in enumerate(parts)]
        names += itertools.islice(("".join(choice) for choice in itertools.product(*choices)), _MAX_NODES)
    return names


def _numbers(text: str, whole: str) -> list[str]:
    found: list[str] = []
    for entry in text.split(","):
        low, dash, high = entry.partition("-")
        high = high if dash else low
        if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < int(low) + _MAX_NODES):
            raise ValueError(f"a node list must look like tux[001-003,010],login1 but is {whole[:200]!r}")
        found += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return found


# ---- the components of an allocation -----------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of an allocation: nodes that were requested together."""

    nodes: tuple[str, ...]
    counts: tuple[tuple[int, int], ...] = ()  # tasks and cores of each node
    gpus_per_task: str = ""  # empty if GPUs were not requested per task

    def gpus_of(self, node: str) -> str:
        """Return the GPUs of all tasks of a node, which a step with fewer tasks must request; "" if it has them."""
        return _times(self.gpus_per_task, self.counts[self.nodes.index(node)][0])


def job_nodes(env: Mapping[str, str]) -> list[str]:
    """Return the nodes of the current job, of all its components."""
    return [name for suffix in _suffixes(env) for name in _nodes(env, suffix)]


def components(env: Mapping[str, str]) -> list[Component]:
    """Return the components of the current job: one, unless it is heterogeneous."""
    return [_component(env, suffix) for suffix in _suffixes(env)]


def _suffixes(env: Mapping[str, str]) -> list[str]:
    """Return the suffixes of Slurm's variable names: nothing, or the number of a heterogeneous job's component."""
    size = env.get("SLURM_HET_SIZE", "")
    return [f"_HET_GROUP_{number}" for number in range(int(size))] if size.isdecimal() and int(size) > 1 else [""]


def _nodes(env: Mapping[str, str], suffix: str) -> list[str]:
    return nodes_of(env.get(f"SLURM_JOB_NODELIST{suffix}") or env.get(f"SLURM_NODELIST{suffix}") or "")


def _component(env: Mapping[str, str], suffix: str) -> Component:
    nodes = _nodes(env, suffix)
    tasks = counts_of(env.get(f"SLURM_TASKS_PER_NODE{suffix}", "")) or [1] * len(nodes)
    cores = counts_of(env.get(f"SLURM_JOB_CPUS_PER_NODE{suffix}", "")) or tasks
    for name, counts in (("SLURM_TASKS_PER_NODE", tasks), ("SLURM_JOB_CPUS_PER_NODE", cores)):
        if len(counts) != len(nodes):
            raise ValueError(
                f"{name}{suffix} speaks of {len(counts)} nodes, but the Slurm job has {len(nodes)}: {', '.join(nodes)}"
            )
    per_task = env.get(f"SLURM_GPUS_PER_TASK{suffix}", "")
    _times(per_task, 1)  # raises ValueError now
    return Component(nodes=tuple(nodes), counts=tuple(zip(tasks, cores, strict=True)), gpus_per_task=per_task)


def _times(gpus: str, number: int) -> str:
    """`2` or `a100:1,v100:2`, so many times."""
    many = []
    for entry in filter(None, gpus.split(",")):
        kind, colon, count = entry.rpartition(":")
        if not count.isdecimal():
            raise ValueError(f"SLURM_GPUS_PER_TASK must look like 2 or a100:1 but is {gpus!r}")
        many.append(f"{kind}{colon}{int(count) * number}")
    return ",".join(many)
