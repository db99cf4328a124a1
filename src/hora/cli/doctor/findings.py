"""Findings about hosts: what is wrong, how severe it is, and what to do. Pure functions of facts.

A finding is `ok`, `note` (no action needed, but good to know) or `problem` (a job will fail or be wrong).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.version import FLOORS, advisories, too_old

Facts = Mapping[str, Any]

_LEAST_OPEN_FILES = 1024
_LEAST_MEMORY_BYTES = 1 << 30
_LEAST_SHM_BYTES = 256 << 20
_LEAST_TMP_BYTES = 64 << 20
_CLOCK_SLACK_S = 5.0


@dataclass(frozen=True)
class Finding:
    """One line of the report. `advice` says what to do about a problem."""

    level: str
    text: str
    advice: str = ""


def host_findings(facts: Facts) -> list[Finding]:
    """Return the findings for one host's facts."""
    found = [
        _python(facts),
        _torch(facts),
        _torch_advisories(facts),
        _foreign(facts),
        _mpi4py(facts),
        _memory(facts),
        _native(facts),
        _gpus(facts),
    ]
    if facts["open_files"] < _LEAST_OPEN_FILES:
        found.append(
            Finding(
                "problem",
                f"a process may open only {facts['open_files']} files",
                f"raise the limit: ulimit -n {_LEAST_OPEN_FILES * 8}",
            )
        )
    found += [_room(facts), _spark(facts)]
    return [finding for finding in found if finding is not None]


def _python(facts: Facts) -> Finding:
    if facts["free_threaded"]:
        text = f"Python {facts['python']} at {facts['executable']} runs without its global interpreter lock"
        return Finding("problem", text, "set PYTHON_GIL=1, or use a Python that is not free-threaded")
    hora, cores = facts["hora"] or "from its source", facts["cores"]
    text = f"Python {facts['python']} at {facts['executable']}, Hora {hora}, {cores} core"
    return Finding("ok", text + ("s" if cores != 1 else ""))


def _torch(facts: Facts) -> Finding:
    version, build = facts["torch"], facts["build"]
    if version is None:
        return Finding("problem", "PyTorch is not installed for this Python", "pip install torch")
    if too_old("torch", version):
        return Finding(
            "problem",
            f"PyTorch {version} is older than {FLOORS['torch']}",
            f"pip install 'torch>={FLOORS['torch']}', or choose an image or runtime that has it",
        )
    if "PyTorch" in build:
        return Finding(
            "problem",
            f"PyTorch {version} is installed, but an allreduce failed: {build['PyTorch']}",
            "see its traceback: python -m hora.legacy.check_build --traceback",
        )
    return Finding("ok", f"PyTorch {version}; an allreduce was tried and works")


def _torch_advisories(facts: Facts) -> Finding | None:
    known = advisories(facts["torch"] or "")
    if not facts["torch"] or not known:
        return None
    return Finding(
        "note",
        f"PyTorch {facts['torch']} has known vulnerabilities ({', '.join(known)}): in your own torch.load, a file "
        "from others can run code. Hora itself reads no such file with it; HORA_STRICT=1 rejects this PyTorch",
    )


def _native(facts: Facts) -> Finding:
    problem = facts["build"].get("native")
    if problem is None:
        return Finding("ok", "the native part is in use for shared memory")
    return Finding("note", f"shared memory is worked on in Python alone, which takes longer: {problem}")


def _foreign(facts: Facts) -> Finding | None:
    if facts["foreign_horovod"] is None:
        return None
    problem, remedy = facts["foreign_horovod"]
    return Finding("problem", problem, remedy)


def _mpi4py(facts: Facts) -> Finding | None:
    if facts["mpi4py"] is None:
        return None
    text = f"mpi4py {facts['mpi4py']}: under horovodrun its COMM_WORLD has the job's ranks on one host only"
    return Finding("note", f"{text}; on several hosts start programs that use it with `mpirun -np N python …`")


def _memory(facts: Facts) -> Finding:
    if facts["memfd"] is not None:
        return Finding(
            "problem",
            f"shared memory between processes does not work: {facts['memfd']}",
            "free some memory, raise the container's memory limit, or set HORA_TRANSPORT=tcp",
        )
    free = facts["memory_bytes"]
    text = "shared memory works (memfd" + (f", {_size(free)} available" if free is not None else "") + ")"
    if free is not None and free < _LEAST_MEMORY_BYTES:
        return Finding("problem", text, "less than 1 GiB is free: end other programs or start fewer processes")
    return Finding("ok", text)


def _room(facts: Facts) -> Finding | None:
    if facts["tmp_bytes"] is not None and facts["tmp_bytes"] < _LEAST_TMP_BYTES:
        return Finding("problem", f"/tmp has only {_size(facts['tmp_bytes'])} left", "delete something, or set TMPDIR")
    if facts["shm_bytes"] is None or facts["shm_bytes"] < _LEAST_SHM_BYTES:
        left = "is missing" if facts["shm_bytes"] is None else f"has only {_size(facts['shm_bytes'])} left"
        return Finding(
            "note", f"/dev/shm {left}: Hora does not use it, but a DataLoader with workers does (docker: --shm-size)"
        )
    return None


def _gpus(facts: Facts) -> Finding:
    gpus, build = facts["gpus"], facts["build"]
    if not gpus:
        return Finding("ok", "no NVIDIA GPU: CPU training only")
    text = f"{len(gpus)} GPU{'s' if len(gpus) > 1 else ''}: {', '.join(sorted(set(gpus)))}"
    if "NCCL" in build:
        return Finding(
            "problem",
            f"{text}; but NCCL does not work: {build['NCCL']}",
            "install a torch built for the CUDA version of the driver (see pytorch.org)",
        )
    return Finding("ok", text)


def _spark(facts: Facts) -> Finding:
    pyspark, java = facts["pyspark"], facts["java"]
    if pyspark is None:
        return Finding(
            "note", "pyspark is not installed; only HorovodRunner needs it (pip install pyspark pandas pyarrow)"
        )
    if too_old("pyspark", pyspark):
        floor = FLOORS["pyspark"]
        return Finding("problem", f"pyspark {pyspark} is older than {floor}", f"pip install 'pyspark>={floor}'")
    if java is None:
        return Finding(
            "problem",
            f"pyspark {pyspark} is installed, but Java was not found",
            "install a Java 17 or 21 runtime, or point JAVA_HOME to one; only HorovodRunner needs it",
        )
    return Finding("ok", f"pyspark {pyspark} with {java}")


def agreement(facts: Mapping[str, Facts]) -> list[Finding]:
    """Return findings about differing versions on the hosts."""
    found = []
    for key, name, install in (
        ("python", "Python", "use the same Python minor version everywhere: functions travel as bytecode"),
        ("torch", "PyTorch", "install the same version everywhere: pip install torch=={}"),
        ("hora", "Hora", "install the same wheel everywhere, of version {}"),
    ):
        values = {host: _comparable(key, each[key]) for host, each in facts.items()}
        if len(set(values.values())) == 1:
            continue
        listed = ", ".join(f"{each[key]} on {host}" for host, each in facts.items())
        newest = max((each[key] for each in facts.values() if each[key]), key=_numbers, default="")
        found.append(Finding("problem", f"{name} differs between hosts: {listed}", install.format(newest)))
    if not found:
        found.append(Finding("ok", "Python, PyTorch and Hora agree on all hosts"))
    return found + _clocks(facts)


def _clocks(facts: Mapping[str, Facts]) -> list[Finding]:
    """Report only large differences: the measurement includes the network delay."""
    return [
        Finding(
            "note",
            f"the clock of {host} differs from ours by {each['clock_ahead_s']:+.0f} s: times in logs and "
            "timelines cannot be compared (use NTP)",
        )
        for host, each in facts.items()
        if abs(each["clock_ahead_s"]) > _CLOCK_SLACK_S
    ]


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".") if part.isdigit()]


def _comparable(key: str, value: str | None) -> str | None:
    if value is None:
        return None
    return ".".join(value.split(".")[:2]) if key == "python" else value.split("+")[0]


def reach_findings(reached: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    """Return findings from `reached[a][b]`: why host a cannot connect to host b, or None if it can."""
    broken = [
        Finding(
            "problem",
            f"{source} cannot connect to a port of {target}: {problem}",
            f"open the firewall of {target} for TCP from {source}, or choose another network with --network-interfaces",
        )
        for source, row in reached.items()
        for target, problem in row.items()
        if problem is not None
    ]
    return broken or [Finding("ok", "every host can open connections to every other")]


def summary(findings: Sequence[Finding]) -> str:
    """Return the last line of the report."""
    count = sum(finding.level == "problem" for finding in findings)
    if count == 0:
        return "All is well."
    return f"{count} problem{'s' if count > 1 else ''} found."


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"
