"""This process's place in a job, read from the environment that a launcher prepared.

`World.from_env` understands Hora / Horovod, torchrun, Open MPI / PMI and Slurm variables, in this order; without any of
them a process is a world of one. It opens no connection: the engine does, with the `RendezvousEndpoint` found here.
"""

from __future__ import annotations

import itertools
import os
import re
import socket
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

_GROUP = re.compile(r"\[([^\[\]]*)\]")
_MAX_NODES = 1_000_000
_FIRST_PORT, _NUM_PORTS, _PORTS_TO_TRY = 20000, 12000, 8  # below those that Linux gives to outgoing connections
# Rendezvous of a program that starts its ranks itself: its name, and the key of its current plan's number.
PLAN_JOB, PLAN_KEY = "a plan of the program's own", "hora/plan"

_PLACE = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size")
_HOROVOD = tuple(f"HOROVOD_{name.upper()}" for name in _PLACE)
# The first four by launcher, in order of precedence after these.
_FOREIGN = {
    "torchrun": ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    "openmpi": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "pmi": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    "slurm": ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
}


def slurm_counts(text: str) -> list[int]:
    """Parse tasks per node, in the order of the node list: `2(x3),1` is 2, 2, 2, 1. Empty for an empty text."""
    counts: list[int] = []
    for entry in filter(None, text.split(",")):
        found = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", entry.strip())
        repeat = int(found[2] or 1) if found else 0
        if found is None or len(counts) + repeat > _MAX_NODES:
            raise ValueError(f"tasks per node must look like 2(x3),1 but are {text[:200]!r}")
        counts += [int(found[1])] * repeat
    return counts


def slurm_nodes(text: str) -> list[str]:
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


@dataclass(frozen=True, kw_only=True)
class RendezvousEndpoint:
    """Rendezvous of a world's ranks.

    `kind` is one of:
    - `hora`: an authenticated rendezvous of a Hora launcher. The key of worker number `worker` is read from
      `secret_file`; -1 means a secret shared by all. A worker reconnects within `return_s` seconds.
    - `tcp`: hosted at `address` by rank 0, or by torchrun if not `host_store`; authenticated if the user gave a
      `secret_file`.
    - `none`: a world of one.
    """

    kind: str = "none"
    address: str = ""
    port: int = 0
    secret_file: str = ""
    job: str = ""
    worker: int = -1
    host_store: bool = False  # rank 0 hosts the rendezvous
    more_ports: tuple[int, ...] = ()  # of a port that nobody chose: where rank 0 hosts it if others have that port
    return_s: float = 10.0
    relay: str = ""  # the local socket of this node's relay to it

    @property
    def where(self) -> str | tuple[str, int]:
        """The address to connect to: the name of a local socket, or host and port."""
        return self.relay or (self.address, self.port)

    @property
    def ports(self) -> tuple[int, ...]:
        """The ports at which rank 0 may host the rendezvous, in the order in which it tries them."""
        return self.port, *self.more_ports

    @property
    def planned(self) -> bool:
        """Return whether a program assigns the ranks here, plan by plan (`horovod.runner.http.http_server`)."""
        return self.job == PLAN_JOB

    @property
    def endpoint(self) -> str:
        return self.relay or f"{self.address}:{self.port}"


@dataclass(frozen=True, kw_only=True)
class World:
    """A process's place in a job."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    hostname: str = "localhost"
    generation: int = 0
    worker: int = -1  # the process's number in its job, which stays when ranks change (-1: no Hora launcher)
    elastic: bool = False
    launcher: str = "none"
    rendezvous: RendezvousEndpoint = RendezvousEndpoint()

    def __post_init__(self) -> None:
        for rank, size, what in (
            (self.rank, self.size, ""),
            (self.local_rank, self.local_size, "local "),
            (self.cross_rank, self.cross_size, "cross "),
        ):
            if size < 1:
                raise ValueError(
                    f"the {what}size of the world must be at least 1, but it is {size} ({self.launcher} variables)"
                )
            if not 0 <= rank < size:
                raise ValueError(
                    f"the {what}rank must lie in 0..{size - 1}, but it is {rank} with {what}size {size} "
                    f"({self.launcher} variables); check what the launcher set"
                )

    @property
    def number(self) -> int:
        """This process's number in its job; its rank if no launcher has numbered the processes."""
        return self.rank if self.worker < 0 else self.worker

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> World:
        """Return this process's world. Raises ValueError, naming the variable, for an invalid value."""
        if environ is None:
            keep_secret()
        env = os.environ if environ is None else environ
        if "HOROVOD_RANK" in env or "HOROVOD_SIZE" in env:
            return _from_horovod(env)
        for launcher, (rank_name, size_name, *_) in _FOREIGN.items():
            # Inside `sbatch` / `salloc` but outside `srun` the job variables exist although only one process runs.
            in_a_step = launcher != "slurm" or "SLURM_STEP_ID" in env or "SLURM_STEPID" in env
            if (rank_name in env or size_name in env) and in_a_step:
                return _from_foreign(env, launcher)
        return cls()

    def export(self) -> None:
        """Set this process's environment to this world, for code that reads the variables itself."""
        os.environ.update(self.to_env())

    def to_env(self) -> dict[str, str]:
        """Return the variables from which `from_env` rebuilds this world in a worker, without the secret itself.

        Among them are those that programs and wrapper scripts read below torchrun and Open MPI's mpirun, but none that
        would make an MPI library believe that mpirun has started it.
        """
        place = [str(getattr(self, name)) for name in _PLACE]
        env = dict(zip(_HOROVOD, place, strict=True)) | {
            "HOROVOD_HOSTNAME": self.hostname,
            "HOROVOD_CONTROLLER": "gloo",
            "HOROVOD_CPU_OPERATIONS": "gloo",
            "HORA_GENERATION": str(self.generation),
        }
        for launcher in ("torchrun", "openmpi"):
            env |= dict(zip(_FOREIGN[launcher], place, strict=False))
        env |= {"OMPI_COMM_WORLD_NODE_RANK": str(self.local_rank), "OMPI_UNIVERSE_SIZE": str(self.size)}
        if self.worker >= 0:
            env["HORA_WORKER"] = str(self.worker)
        if self.elastic:
            env["HOROVOD_ELASTIC"] = "1"
        if self.rendezvous.kind == "hora":
            env["HOROVOD_GLOO_RENDEZVOUS_ADDR"] = self.rendezvous.address
            env["HOROVOD_GLOO_RENDEZVOUS_PORT"] = str(self.rendezvous.port)
            env["HORA_JOB"] = self.rendezvous.job
            env["HORA_SECRET_FILE"] = self.rendezvous.secret_file
            env["HORA_RELAY"] = self.rendezvous.relay  # also if empty: this process may run inside another job
        return env


def keep_secret() -> None:
    """Move the job's secret from this process's environment to a file in memory.

    Ray Train sets variables in running processes, so it can pass the secret only by value.
    """
    secret = os.environ.pop("HORA_SECRET", None)
    if secret is not None:
        descriptor = os.memfd_create("hora-secret", os.MFD_CLOEXEC)
        os.write(descriptor, bytes.fromhex(secret))
        os.environ["HORA_SECRET_FILE"] = f"/proc/{os.getpid()}/fd/{descriptor}"


def user_secret_file() -> str:
    """Return the file with the secret that the user gave to the ranks; empty if there is none."""
    return os.environ.get("HORA_SECRET_FILE", "")


def master_address() -> str:
    """Return the host of rank 0 according to the launcher; empty if unknown."""
    return os.environ.get("MASTER_ADDR", "")


def place_variables() -> tuple[tuple[str, str] | None, ...]:
    """Return the first rank and the first size variable that Horovod, Open MPI or PMI have set, with their values."""
    both = zip(_HOROVOD[:2], _FOREIGN["openmpi"], _FOREIGN["pmi"], strict=False)
    return tuple(next(((name, os.environ[name]) for name in names if name in os.environ), None) for names in both)


def _integer(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name)
    if text is None:
        if default is None:
            raise ValueError(f"{name} is not set although its partner variable is; set both or neither")
        return default
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{name} must be an integer, but it is {text!r}") from None


def _from_horovod(env: Mapping[str, str]) -> World:
    rank, size = _integer(env, "HOROVOD_RANK"), _integer(env, "HOROVOD_SIZE")
    rendezvous = RendezvousEndpoint()
    if env.get("HORA_SECRET_FILE") and "HORA_JOB" in env:
        rendezvous = replace(
            _launcher_endpoint(env, env["HORA_JOB"]),
            worker=_integer(env, "HORA_WORKER", -1),
            return_s=_integer(env, "HORA_LAUNCHER_TIMEOUT", 10),
            relay=env.get("HORA_RELAY", ""),
        )
    elif "HOROVOD_GLOO_RENDEZVOUS_PORT" in env and "MASTER_ADDR" not in env:
        if size > 1 or env.get("HORA_SECRET_FILE"):
            rendezvous = _launcher_endpoint(env, PLAN_JOB)
    elif size > 1:
        rendezvous = _tcp_endpoint(env, "horovod", one_host=_integer(env, "HOROVOD_LOCAL_SIZE", size) >= size)
    defaults = zip(_PLACE, _HOROVOD, (rank, size, rank, size, 0, 1), strict=True)
    return World(
        **{field: _integer(env, name, default) for field, name, default in defaults},
        hostname=env.get("HOROVOD_HOSTNAME", "localhost"),
        generation=_integer(env, "HORA_GENERATION", 0),
        worker=_integer(env, "HORA_WORKER", -1),
        elastic=_integer(env, "HOROVOD_ELASTIC", 0) > 0 and not rendezvous.planned,  # the program itself changes ranks
        launcher="hora" if rendezvous.kind == "hora" else "horovod",
        rendezvous=rendezvous,
    )


def _launcher_endpoint(env: Mapping[str, str], job: str) -> RendezvousEndpoint:
    if not env.get("HORA_SECRET_FILE"):
        raise ValueError(
            "HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT name a rendezvous, but there is no secret to authenticate "
            "with: give the workers HORA_SECRET (the `secret` of the RendezvousServer), or set HORA_SECRET_FILE to "
            "the same file for the process that starts the RendezvousServer and for the workers; or start the job "
            "with horovodrun"
        )
    return RendezvousEndpoint(
        kind="hora",
        address=env.get("HOROVOD_GLOO_RENDEZVOUS_ADDR", ""),
        port=_integer(env, "HOROVOD_GLOO_RENDEZVOUS_PORT"),
        secret_file=env["HORA_SECRET_FILE"],
        job=job,
    )


def _from_foreign(env: Mapping[str, str], launcher: str) -> World:
    rank_name, size_name, local_rank_name, local_size_name = _FOREIGN[launcher]
    rank, size = _integer(env, rank_name), _integer(env, size_name)
    if launcher == "slurm":
        local_rank, local_size, cross_rank, cross_size = _slurm_place(env, rank, size)
    else:
        local_size = _integer(env, local_size_name, size)
        local_rank = _integer(env, local_rank_name, rank % max(local_size, 1))
        # These launchers place equal blocks of ranks on each host, so the host's index is a division.
        cross_rank = _integer(env, "GROUP_RANK", rank // max(local_size, 1))
        cross_size = max(-(-size // max(local_size, 1)), cross_rank + 1)
    place = (rank, size, local_rank, local_size, cross_rank, cross_size)
    return World(
        **dict(zip(_PLACE, place, strict=True)),
        hostname=socket.gethostname(),
        elastic=False,
        launcher=launcher,
        rendezvous=_tcp_endpoint(env, launcher, one_host=local_size >= size) if size > 1 else RendezvousEndpoint(),
    )


def _slurm_place(env: Mapping[str, str], rank: int, size: int) -> tuple[int, int, int, int]:
    """Return local rank and size, cross rank and size."""
    # In the order of the node list. `SLURM_NTASKS_PER_NODE` is only the limit that the user requested.
    text = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or str(size)
    counts = slurm_counts(text)
    if sum(counts) != size:
        raise ValueError(f"the Slurm variables disagree: {size} tasks, but {text!r} tasks per node")
    ends = list(itertools.accumulate(counts))  # the default distribution: blocks of ranks
    node = _integer(env, "SLURM_NODEID", sum(end <= rank for end in ends))
    if not 0 <= node < len(counts):
        raise ValueError(f"SLURM_NODEID is {node}, but there are {len(counts)} nodes: {text!r} tasks per node")
    local_rank = _integer(env, "SLURM_LOCALID", rank - (ends[node] - counts[node]))
    with_such_a_rank = [index for index, count in enumerate(counts) if count > local_rank]
    return local_rank, counts[node], sum(index < node for index in with_such_a_rank), len(with_such_a_rank)


def _first_host_of_open_mpi(env: Mapping[str, str]) -> str:
    """Return the host of rank 0; an empty string if the variables do not tell, as those of Open MPI 5.

    Open MPI 4 lists the hosts of its daemons, mpirun's own first: `launcher,worker-[1:0-1].job@0(3)`, where each group
    of numbers begins with their width. If more hosts are listed than have ranks, mpirun's is the one without, as in
    Kubeflow's MPI operator.
    """
    listed = env.get("OMPI_MCA_orte_node_regex", "").partition("@")[0]
    text = re.sub(
        r"\[(\d+):([\d,-]+)\]",
        lambda group: "[" + re.sub(r"\d+", lambda n: n[0].zfill(int(group[1])), group[2]) + "]",
        listed,
    )
    hosts = slurm_nodes(text)
    if not hosts:
        return ""
    first = 1 if len(hosts) > _integer(env, "OMPI_MCA_orte_num_nodes", len(hosts)) else 0
    own = env.get("OMPI_MCA_orte_local_daemon_uri", "").partition(";")[0].rpartition(".")[2]
    if env.get("OMPI_COMM_WORLD_RANK") == "0" and own not in ("", str(first)):
        return ""  # only some of the hosts have ranks, and mpirun's is one of them
    return hosts[first]


def _tcp_endpoint(env: Mapping[str, str], launcher: str, *, one_host: bool) -> RendezvousEndpoint:
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    job = _job(env, launcher, one_host=one_host)
    tcp = partial(RendezvousEndpoint, kind="tcp", secret_file=env.get("HORA_SECRET_FILE", ""))
    if address and port:
        # torchrun's agent already runs a store there. It outlives, with its values, the ranks that the agent restarts.
        # Other launchers expect rank 0 to open it.
        host_store = env.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true"
        name = f"slurm {job}" if launcher == "slurm" else env.get("TORCHELASTIC_RUN_ID", launcher)
        job = f"{name}/{env.get('TORCHELASTIC_RESTART_COUNT', '0')}"
        return tcp(address=address, port=_integer(env, "MASTER_PORT"), job=job, host_store=host_store)
    if job and one_host:
        address = "127.0.0.1"
    elif launcher == "slurm" and job:
        nodelist = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or env.get("SLURM_NODELIST") or ""
        address = next(iter(slurm_nodes(nodelist)), "127.0.0.1")
    elif launcher == "openmpi" and job and (host := _first_host_of_open_mpi(env)):
        address = host
    else:
        raise ValueError(
            f"the {launcher} variables describe a world of several ranks but not where they meet: set MASTER_ADDR and "
            "MASTER_PORT to a host and a free port of rank 0, or start the job with horovodrun"
        )
    first, *more = (_FIRST_PORT + zlib.crc32(f"{job}/{turn}".encode()) % _NUM_PORTS for turn in range(_PORTS_TO_TRY))
    return tcp(address=address, port=first, more_ports=tuple(more), job=job, host_store=True)


def _job(env: Mapping[str, str], launcher: str, *, one_host: bool) -> str:
    """Return a name that the ranks of a world share with no other world; empty if the variables tell none.

    A Slurm job may run several worlds: each of its steps is one, and so is each `mpirun`, whose own names come first.
    The ranks of an `mpirun` that has only Slurm's have the same step if they are on one host.
    """
    own = ("OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "PMI_JOBID")
    name = next((env[name] for name in own if env.get(name)), "")
    allocation = env.get("SLURM_HET_JOB_ID") or env.get("SLURM_JOB_ID", "")
    if not allocation or (name and launcher != "slurm"):
        return name
    step = env.get("SLURM_STEP_ID") or env.get("SLURM_STEPID", "")
    restarts = env.get("SLURM_RESTART_COUNT", "0")  # a requeued job keeps its number
    return ".".join((allocation, restarts, *([step] if launcher == "slurm" or one_host else [])))
