"""This node's place in a job, from flags or from the variables of the platform that started an agent on every node.
Pure.

Flags come first, then the first platform whose variables are there; one that has set only some of them is an error that
names the missing one. Called by `nodes`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hora import slurm
from hora.launch.slots import DEFAULT_PORT, NodeSpec

__all__ = ["Machine", "find_place"]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts about this machine that the platform may leave to us to find out."""

    hostname: str
    num_cores: int
    num_gpus: int


def find_place(
    environ: Mapping[str, str],
    machine: Machine,
    *,
    num_nodes: int | None = None,
    index: int | None = None,
    meet: str | None = None,
    slots: int | None = None,
) -> NodeSpec:
    """This node's place. ValueError if nothing tells it, or only a part."""
    found = None
    if num_nodes is None or index is None or meet is None:
        present = (read for name, read in _PLATFORMS.items() if name in environ)
        reader = next(present, None)
        found = reader(environ, machine) if reader is not None and None in (num_nodes, index) else None
        given = meet or environ.get("MASTER_ADDR")
        if found is None and (num_nodes is None or index is None or given is None):
            missing = "--nnodes" if num_nodes is None else "--node-rank" if index is None else "--meet HOST:PORT"
            raise ValueError(
                f"{missing} is missing: no variables of Kubeflow, SkyPilot, Slurm, LSF, PBS, SageMaker, Open MPI or "
                "PMI tell which node this is"
            )
    host, port = _host_and_port(meet, found, environ)
    return NodeSpec(
        num_nodes=num_nodes if num_nodes is not None else _known(found).num_nodes,
        index=index if index is not None else _known(found).index,
        host=host,
        port=port,
        slots=slots or (found.slots if found else None),
        name=(found.name if found else "") or machine.hostname,
        platform=found.platform if found else "flags",
    )


def _known(found: NodeSpec | None) -> NodeSpec:
    assert found is not None
    return found


def _host_and_port(meet: str | None, found: NodeSpec | None, environ: Mapping[str, str]) -> tuple[str, int]:
    if meet is None and found is not None and found.host:
        return found.host, found.port
    text = meet if meet is not None else environ.get("MASTER_ADDR", "")
    if not text:
        where = found.platform if found else "flags"
        raise ValueError(
            f"nothing says where the nodes meet ({where}); give --meet HOST:PORT, with the first node's name"
        )
    host, colon, port = text.rpartition(":") if text.count(":") == 1 else (text, "", "")
    port = port or environ.get("MASTER_PORT", "") or str(DEFAULT_PORT)
    if not port.isdecimal() or not host:
        raise ValueError(f"--meet takes HOST:PORT, but it is {text!r}")
    return (host if colon else text), int(port)


# ---- platforms ---------------------------------------------------------------------------------------------------


def _text(environ: Mapping[str, str], name: str, platform: str) -> str:
    if not environ.get(name):
        raise ValueError(f"{name} is not set although other variables of {platform} are; set it, or use flags")
    return environ[name]


def _number(environ: Mapping[str, str], name: str, platform: str) -> int:
    text = _text(environ, name, platform)
    if not text.strip().isdecimal():
        raise ValueError(f"{name} must be a whole number, but it is {text!r} ({platform})")
    return int(text)


def _kubeflow(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
    wanted = environ.get("PET_NPROC_PER_NODE", "auto")
    by_word = {"cpu": machine.num_cores, "gpu": machine.num_gpus, "auto": machine.num_gpus or machine.num_cores}
    if wanted not in by_word and not wanted.isdecimal():
        raise ValueError(f"PET_NPROC_PER_NODE must be a number, auto, gpu or cpu, but it is {wanted!r}")
    return NodeSpec(
        num_nodes=_number(environ, "PET_NNODES", "Kubeflow"),
        index=_number(environ, "PET_NODE_RANK", "Kubeflow"),
        slots=by_word[wanted] if wanted in by_word else int(wanted),
        host=_text(environ, "PET_MASTER_ADDR", "Kubeflow"),
        port=_number(environ, "PET_MASTER_PORT", "Kubeflow") if "PET_MASTER_PORT" in environ else DEFAULT_PORT,
        platform="Kubeflow",
    )


def _skypilot(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
    gpus = environ.get("SKYPILOT_NUM_GPUS_PER_NODE", "0")
    return NodeSpec(
        num_nodes=_number(environ, "SKYPILOT_NUM_NODES", "SkyPilot"),
        index=_number(environ, "SKYPILOT_NODE_RANK", "SkyPilot"),
        slots=int(gpus) if gpus.isdecimal() and int(gpus) else None,
        host=_text(environ, "SKYPILOT_NODE_IPS", "SkyPilot").split()[0],
        platform="SkyPilot",
    )


def _slurm(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
    if "SLURM_NODEID" not in environ:
        raise ValueError(
            "--join inside a Slurm job is for `srun --ntasks-per-node=1 hora run --join …`; leave --join out"
        )
    nodes = slurm.node_names(environ.get("SLURM_STEP_NODELIST") or _text(environ, "SLURM_JOB_NODELIST", "Slurm"))
    gpus = environ.get("SLURM_GPUS_ON_NODE", "")
    job = environ.get("SLURM_JOB_ID", "0")
    return NodeSpec(
        num_nodes=len(nodes),
        index=_number(environ, "SLURM_NODEID", "Slurm"),
        slots=int(gpus) if gpus.isdecimal() and int(gpus) else None,
        host=nodes[0],
        port=20000 + int(job) % 20000 if job.isdecimal() else DEFAULT_PORT,
        name=environ.get("SLURMD_NODENAME", ""),
        platform="Slurm",
    )


def _listed(names: list[str], own: str, platform: str) -> NodeSpec:
    """From a list with a name for every slot, in which a node may stand several times."""
    nodes = list(dict.fromkeys(names))
    short = [name.partition(".")[0] for name in nodes]
    if own.partition(".")[0] not in short:
        raise ValueError(f"this machine, {own}, is not among the {platform} nodes {', '.join(nodes) or '(none)'}")
    index = short.index(own.partition(".")[0])
    return NodeSpec(
        num_nodes=len(nodes), index=index, slots=names.count(nodes[index]), host=nodes[0], name=own, platform=platform
    )


def _lsf(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
    words = _text(environ, "LSB_MCPU_HOSTS", "LSF").split()
    pairs = list(zip(words[::2], map(int, words[1::2]), strict=False))
    launch_node = len(pairs) > 1 and pairs[0][1] == 1 and all(slots > 1 for _, slots in pairs[1:])
    names = [name for name, slots in pairs[launch_node or "CSM_ALLOCATION_ID" in environ :] for _ in range(slots)]
    return _listed(names, machine.hostname, "LSF")


def _pbs(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
    path = _text(environ, "PBS_NODEFILE", "PBS")
    try:
        with open(path, encoding="utf-8") as file:
            names = file.read().split()
    except OSError as error:
        raise ValueError(f"cannot read PBS_NODEFILE={path}: {error.strerror}") from None
    return _listed(names, machine.hostname, "PBS")


def _sagemaker(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
    hosts = json.loads(_text(environ, "SM_HOSTS", "SageMaker"))
    place = _listed(hosts, _text(environ, "SM_CURRENT_HOST", "SageMaker"), "SageMaker")
    gpus = environ.get("SM_NUM_GPUS", "0")
    return NodeSpec(**{**place.__dict__, "slots": int(gpus) if gpus.isdecimal() and int(gpus) else None})


def _mpi(rank: str, size: str, local: str, platform: str) -> Callable[[Mapping[str, str], Machine], NodeSpec]:
    """One process of an MPI launcher on each node. It does not say where they meet, unless all are on this machine."""

    def read(environ: Mapping[str, str], machine: Machine) -> NodeSpec:
        num_nodes = _number(environ, size, platform)
        here = environ.get(local) == str(num_nodes)
        index = _number(environ, rank, platform)
        return NodeSpec(num_nodes=num_nodes, index=index, host="127.0.0.1" if here else "", platform=platform)

    return read


_PLATFORMS: dict[str, Callable[[Mapping[str, str], Machine], NodeSpec]] = {
    "PET_NNODES": _kubeflow,
    "SKYPILOT_NODE_RANK": _skypilot,
    "OMPI_COMM_WORLD_SIZE": _mpi(
        "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "Open MPI"
    ),
    "PMI_SIZE": _mpi("PMI_RANK", "PMI_SIZE", "MPI_LOCALNRANKS", "PMI"),
    "SLURM_JOB_ID": _slurm,
    "LSB_MCPU_HOSTS": _lsf,
    "PBS_NODEFILE": _pbs,
    "SM_HOSTS": _sagemaker,
}
