"""The command `hora doctor`: diagnoses this machine or a list of hosts, all at once. Exit status 1: a problem.

Reading order: facts about one host, findings (pure: from facts to text), the examination of all hosts.
`python -m hora.cli.doctor ADDRESS` collects the facts, on the host, by ssh or locally. It prints one JSON line of
facts, including a port on which it listens. Then it reads one JSON line, a list of `[address, port]`, and prints a
second one with the results of connecting to them (null, or the error). This module never imports torch: a broken one
must be a fact, not a crash.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import json
import mmap
import os
import platform
import queue
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hora.config import changed_environment
from hora.foreign_horovod import foreign_conflict
from hora.launch.controller.launcher import wait_or_kill
from hora.launch.environment import variables
from hora.launch.ha.leadership import open_store
from hora.launch.ha.store import StoreError
from hora.launch.processes import module_command
from hora.launch.providers.ssh import Ssh, reachable_address
from hora.launch.slots import parse_host_files, parse_hosts_and_slots
from hora.legacy.check_build import probe_build
from hora.memory import available_bytes
from hora.net import sockets
from hora.requirements import FLOORS, advisories, too_old
from hora.spelling import Parser
from hora.version import DISTRIBUTION, version

_MARK = "== hora doctor =="  # a login shell may print something first
_CONNECT_LIMIT_S = 5.0
_TOOL_LIMIT_S = 30.0
_PROBE_LIMIT_S = 180.0
_LEAVE_LIMIT_S = 5.0

_LEAST_OPEN_FILES = 1024
_LEAST_MEMORY_BYTES = 1 << 30
_LEAST_SHM_BYTES = 256 << 20
_LEAST_TMP_BYTES = 64 << 20
_CLOCK_SLACK_S = 5.0

# ---- facts about one host, without judgement -------------------------------------------------------------------------

Facts = Mapping[str, Any]


def _facts() -> dict[str, Any]:
    """Return everything about this host that a finding may need."""
    java_home = variables().get("JAVA_HOME")
    java = _tool(os.path.join(java_home, "bin", "java") if java_home else "java", "-version")
    return {
        "python": platform.python_version(),
        "free_threaded": not getattr(sys, "_is_gil_enabled", lambda: True)(),
        "executable": sys.executable,
        **{name: _tried(importlib.metadata.version, name) for name in ("torch", "pyspark", "mpi4py")},
        "hora": version(),
        "other_hora": _tried(importlib.metadata.version, "hora"),
        "foreign_horovod": foreign_conflict(),
        "cores": len(os.sched_getaffinity(0)),
        "memfd": _memfd_problem(),
        "memory_bytes": _tried(available_bytes),
        "shm_bytes": _tried(lambda: shutil.disk_usage("/dev/shm").free),
        "tmp_bytes": _tried(lambda: shutil.disk_usage("/tmp").free),
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "gpus": _tool("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"),
        "java": java[0] if java else None,
        "build": probe_build(),
    }


def _tried(look: Callable[..., Any], *arguments: str) -> Any:
    """Return what can be found out; None if it is missing."""
    try:
        return look(*arguments)
    except (OSError, importlib.metadata.PackageNotFoundError):
        return None


def _memfd_problem() -> str | None:
    """Return None if shared memory works: allocate some, map it, write and read it."""
    try:
        descriptor = os.memfd_create("hora-doctor", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(descriptor, 0, 1 << 20)
            with mmap.mmap(descriptor, 1 << 20) as memory:
                memory[:4] = b"hora"
                return None if memory[:4] == b"hora" else "what was written did not come back"
        finally:
            os.close(descriptor)
    except (OSError, AttributeError) as error:
        return str(error)


def _tool(*argv: str) -> list[str]:
    """Return the lines that a program prints; none if it is missing or fails."""
    try:
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            timeout=_TOOL_LIMIT_S, text=True, errors="replace", check=False,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.strip().splitlines() if done.returncode == 0 else []


def _connect(address: str, port: int) -> str | None:
    """Return why a connection fails; None if it works."""
    try:
        socket.create_connection((address, port), timeout=_CONNECT_LIMIT_S).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _probe(address: str, ports: str) -> None:
    """Report this host's facts, and what it can connect to. Peers connect to the listener's backlog.

    `ports`: those at which it may listen; empty: any.
    """
    with changed_environment({"HORA_PORTS": ports}), sockets.listen((address, 0)) as listener:
        known = _facts() | {"port": listener.getsockname()[1]}
        print(_MARK + json.dumps(known | {"clock_s": time.time()}), flush=True)
        line = sys.stdin.readline()
        if line:
            print(_MARK + json.dumps([_connect(*endpoint) for endpoint in json.loads(line)]), flush=True)
            sys.stdin.readline()  # wait until all hosts have tried: the doctor then closes the pipe


# ---- findings --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One line of the report."""

    level: str  # "ok", "note" (good to know) or "problem" (a job will fail or be wrong)
    text: str
    advice: str = ""  # what to do about a problem


_ok, _note, _problem = (functools.partial(Finding, level) for level in ("ok", "note", "problem"))


def host_findings(facts: Facts) -> Iterator[Finding]:
    """Yield the findings for one host's facts."""
    yield _python(facts)
    yield _torch(facts)
    yield from torch_advisories(facts["torch"])
    if facts["foreign_horovod"] is not None:
        yield _problem(*facts["foreign_horovod"])
    if facts["other_hora"] is not None:
        yield _problem(
            f"the distribution hora {facts['other_hora']} is installed beside {DISTRIBUTION}: another project of "
            "that name, or a build of Hora from before it was renamed, and both own the folder `hora`",
            f"pip uninstall -y hora, then pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )
    if facts["mpi4py"] is not None:
        yield _note(
            f"mpi4py {facts['mpi4py']}: under horovodrun its COMM_WORLD has the job's ranks on one host only; on "
            "several hosts start programs that use it with `mpirun -np N python …`"
        )
    yield _memory(facts)
    problem = facts["build"].get("native")
    if problem is None:
        yield _ok("the native part is in use: ranks of a host share memory")
    else:
        yield _note(f"ranks of a host use sockets instead of shared memory, which takes longer: {problem}")
    yield _gpus(facts)
    if facts["open_files"] < _LEAST_OPEN_FILES:
        advice = f"raise the limit: ulimit -n {_LEAST_OPEN_FILES * 8}"
        yield _problem(f"a process may open only {facts['open_files']} files", advice)
    yield from _room(facts["tmp_bytes"], facts["shm_bytes"])
    yield _spark(facts)


def _python(facts: Facts) -> Finding:
    python = f"Python {facts['python']} at {facts['executable']}"
    if facts["free_threaded"]:
        advice = "set PYTHON_GIL=1, or use a Python that is not free-threaded"
        return _problem(f"{python} runs without its global interpreter lock", advice)
    cores = facts["cores"]
    return _ok(f"{python}, Hora {facts['hora']}, {cores} core{'s' * (cores != 1)}")


def _torch(facts: Facts) -> Finding:
    version, build = facts["torch"], facts["build"]
    if version is None:
        return _problem("PyTorch is not installed for this Python", "pip install torch")
    if too_old("torch", version):
        floor = FLOORS["torch"]
        advice = f"pip install 'torch>={floor}', or choose an image or runtime that has it"
        return _problem(f"PyTorch {version} is older than {floor}", advice)
    if "PyTorch" in build:
        return _problem(
            f"PyTorch {version} is installed, but an allreduce failed: {build['PyTorch']}",
            "see its traceback: python -m hora.legacy.check_build --traceback",
        )
    return _ok(f"PyTorch {version}; an allreduce was tried and works")


def torch_advisories(version: str | None) -> Iterator[Finding]:
    """Yield a note if this torch has known vulnerabilities."""
    if version is not None and (known := advisories(version)):
        yield _note(
            f"PyTorch {version} has known vulnerabilities ({', '.join(known)}): in your own torch.load, a file "
            "from others can run code. Hora itself reads no such file with it; HORA_STRICT=1 rejects this PyTorch"
        )


def _memory(facts: Facts) -> Finding:
    if facts["memfd"] is not None:
        return _problem(
            f"shared memory between processes does not work: {facts['memfd']}",
            "free some memory, raise the container's memory limit, or set HORA_TRANSPORT=tcp",
        )
    free = facts["memory_bytes"]
    text = "shared memory works (memfd" + (f", {_size(free)} available" if free is not None else "") + ")"
    if free is not None and free < _LEAST_MEMORY_BYTES:
        return _problem(text, "less than 1 GiB is free: end other programs or start fewer processes")
    return _ok(text)


def _room(tmp_bytes: int | None, shm_bytes: int | None) -> Iterator[Finding]:
    if tmp_bytes is not None and tmp_bytes < _LEAST_TMP_BYTES:
        yield _problem(f"/tmp has only {_size(tmp_bytes)} left", "delete something, or set TMPDIR")
    elif shm_bytes is None or shm_bytes < _LEAST_SHM_BYTES:
        left = "is missing" if shm_bytes is None else f"has only {_size(shm_bytes)} left"
        yield _note(f"/dev/shm {left}: Hora does not use it, but a DataLoader with workers does (docker: --shm-size)")


def _gpus(facts: Facts) -> Finding:
    gpus, build = facts["gpus"], facts["build"]
    if not gpus:
        return _ok("no NVIDIA GPU: CPU training only")
    text = f"{len(gpus)} GPU{'s' * (len(gpus) > 1)}: {', '.join(sorted(set(gpus)))}"
    if "NCCL" in build:
        advice = "install a torch built for the CUDA version of the driver (see pytorch.org)"
        return _problem(f"{text}; but NCCL does not work: {build['NCCL']}", advice)
    return _ok(text)


def _spark(facts: Facts) -> Finding:
    pyspark, java = facts["pyspark"], facts["java"]
    if pyspark is None:
        return _note(f"pyspark is not installed; only HorovodRunner needs it (pip install '{DISTRIBUTION}[spark]')")
    if too_old("pyspark", pyspark):
        floor = FLOORS["pyspark"]
        return _problem(f"pyspark {pyspark} is older than {floor}", f"pip install 'pyspark>={floor}'")
    if java is None:
        return _problem(
            f"pyspark {pyspark} is installed, but Java was not found",
            "install a Java 17 or 21 runtime, or point JAVA_HOME to one; only HorovodRunner needs it",
        )
    return _ok(f"pyspark {pyspark} with {java}")


def agreement(facts: Mapping[str, Facts]) -> list[Finding]:
    """Return findings about differing versions on the hosts, and their clocks."""
    found = []
    for key, name, install in (
        ("python", "Python", "use the same Python minor version everywhere: functions travel as bytecode"),
        ("torch", "PyTorch", "install the same version everywhere: pip install torch=={}"),
        ("hora", "Hora", "install the same wheel everywhere, of version {}"),
    ):
        if len({_comparable(key, each[key]) for each in facts.values()}) == 1:
            continue
        listed = ", ".join(f"{each[key]} on {host}" for host, each in facts.items())
        newest = max((each[key] for each in facts.values() if each[key]), key=_numbers, default="")
        found.append(_problem(f"{name} differs between hosts: {listed}", install.format(newest)))
    if not found:
        found.append(_ok("Python, PyTorch and Hora agree on all hosts"))
    for host, each in facts.items():
        if abs(each["clock_ahead_s"]) > _CLOCK_SLACK_S:  # a smaller one may be the network's delay
            ahead = f"{each['clock_ahead_s']:+.0f} s"
            why = "times in logs and timelines cannot be compared (use NTP)"
            found.append(_note(f"the clock of {host} differs from ours by {ahead}: {why}"))
    return found


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split("+")[0].split(".") if part.isdigit()]


def _comparable(key: str, value: str | None) -> str | None:
    if value is None:
        return None
    if key == "python":
        return ".".join(value.split(".")[:2])
    return value.split("+")[0] if key == "torch" else value  # a build of Hora is named by its commit


def reach_findings(reached: Mapping[str, Mapping[str, str | None]]) -> list[Finding]:
    """Return findings from `reached[a][b]`: why host a cannot connect to host b, or None if it can."""
    broken = [
        _problem(
            f"{source} cannot connect to a port of {target}: {problem}",
            f"open the firewall of {target} for TCP from {source}, or choose another network with --network-interfaces",
        )
        for source, row in reached.items()
        for target, problem in row.items()
        if problem is not None
    ]
    return broken or [_ok("every host can open connections to every other")]


def _store(url: str) -> Finding:
    """Check the store of the jobs' state from here."""
    store = open_store(url, variables())
    try:
        store.read()
    except StoreError as error:
        return _problem(str(error), "check HORA_STORE, and that it runs there and can be reached from here")
    return _ok(f"the store (HORA_STORE) answers: {store}")


def _size(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 30):.1f} GiB" if num_bytes >= 1 << 30 else f"{num_bytes / (1 << 20):.0f} MiB"


# ---- the examination of all hosts ------------------------------------------------------------------------------------


class _Patient:
    """A host with a running probe. Lines arrive through a queue, so that every wait has a limit."""

    def __init__(self, name: str, ssh: Ssh, listen: str) -> None:
        self.name, self.remote, ports = name, not sockets.is_local(name), variables().get("HORA_PORTS", "")
        if self.remote:
            argv = ssh.python(name, "hora.cli.doctor", "0.0.0.0", ports, attempts=2)
        else:
            argv = list(module_command(sys.executable, "hora.cli.doctor", listen, ports))
        self._complaints = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._process = subprocess.Popen(
            argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._complaints, text=True, errors="replace"
        )
        self.heard_at_s = 0.0  # when its last answer arrived, by our clock
        self._answers: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, name=f"hora-doctor {name}", daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            _, mark, answer = line.partition(_MARK)
            if mark:
                self.heard_at_s = time.time()
                self._answers.put(answer)
        self._answers.put(None)

    def answer(self, limit: float) -> Any:
        """Return the next JSON answer; if there is none, a RuntimeError with the host's error output."""
        try:
            line = self._answers.get(timeout=max(limit - time.monotonic(), 0.01))
        except queue.Empty:
            return RuntimeError(f"no answer within {_PROBE_LIMIT_S:.0f} s")
        if line is not None:
            return json.loads(line)
        status = self._process.wait(_PROBE_LIMIT_S)
        self._complaints.seek(0)
        complaints = self._complaints.read().decode(errors="replace").strip()
        return RuntimeError(complaints or f"the probe ended with status {status}")

    def request(self, endpoints: list[tuple[str, int]]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(endpoints) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is gone already
            self._process.stdin.close()  # the probe ends at end of file
        wait_or_kill(self._process, _LEAVE_LIMIT_S)
        self._complaints.close()


def _answers(patients: list[_Patient]) -> list[Any]:
    """Return an answer of every host, or its RuntimeError; all hosts work at the same time."""
    limit = time.monotonic() + _PROBE_LIMIT_S
    return [patient.answer(limit) for patient in patients]


def _examine(names: list[str], ssh: Ssh) -> int:
    own = reachable_address([name for name in names if not sockets.is_local(name)], ssh)
    num_problems = 0

    def show(title: str, findings: Sequence[Finding]) -> None:
        nonlocal num_problems
        num_problems += sum(finding.level == "problem" for finding in findings)
        print(title)
        for finding in findings:
            print(f"  {finding.level:<8} {finding.text}")
            if finding.advice:
                print(f"  {'':<8} -> {finding.advice}")
        print(flush=True)

    with contextlib.ExitStack() as stack:
        patients = [stack.enter_context(contextlib.closing(_Patient(name, ssh, own))) for name in names]
        facts: dict[str, Facts] = {}
        for patient, answer in zip(patients, _answers(patients), strict=True):
            if isinstance(answer, RuntimeError):
                show(patient.name, [_unreachable(str(answer), patient, ssh)])
                continue
            facts[patient.name] = answer | {"clock_ahead_s": answer["clock_s"] - patient.heard_at_s}
            show(patient.name, list(host_findings(answer)))
        if len(facts) > 1:
            reached = [patient for patient in patients if patient.name in facts]
            endpoints = [(_address(p, ssh) if p.remote else own, facts[p.name]["port"]) for p in reached]
            show("between the hosts", agreement(facts) + _reach(reached, endpoints))
    if variables().get("HORA_STORE"):
        show("the store", [_store(variables()["HORA_STORE"])])
    print(f"{num_problems} problem{'s' * (num_problems > 1)} found." if num_problems else "All is well.")
    return int(num_problems > 0)


def _unreachable(text: str, patient: _Patient, ssh: Ssh) -> Finding:
    if not patient.remote:
        return _problem(text, "reinstall Hora in this Python environment")
    return _problem(
        f"ssh does not get through, or Hora cannot be started there: {text}",
        f"`ssh {patient.name} {ssh.executable} -m hora.cli.doctor 127.0.0.1` must work without a password",
    )


def _address(patient: _Patient, ssh: Ssh) -> str:
    return (sockets.resolve(patient.name) or sockets.resolve(ssh.real_name(patient.name)) or [patient.name])[0]


def _reach(patients: list[_Patient], endpoints: list[tuple[str, int]]) -> list[Finding]:
    for patient in patients:
        patient.request(endpoints)
    reached: dict[str, dict[str, str | None]] = {}
    for patient, row in zip(patients, _answers(patients), strict=True):
        problems = [str(row)] * len(patients) if isinstance(row, RuntimeError) else row
        reached[patient.name] = {p.name: problem for p, problem in zip(patients, problems, strict=True)}
    return reach_findings(reached)


def _names(args: argparse.Namespace) -> list[str]:
    if args.hostfile is not None:
        text = parse_host_files(args.hostfile)
    else:
        items = (args.hosts or "localhost").split(",")
        text = ",".join(item if ":" in item else f"{item.strip()}:1" for item in items)
    return parse_hosts_and_slots(text)[0]


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hora doctor", description="Check this machine, or hosts, and say what is wrong and what to do."
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("-H", "--hosts", metavar="HOST,...", help="hosts, with or without :slots (default: localhost)")
    which.add_argument(
        "-hostfile", "--hostfile", metavar="FILE", help="a file with a line `name slots=N` for each host"
    )
    parser.add_argument("-p", "--ssh-port", type=int, metavar="PORT", help="ssh port of all hosts")
    parser.add_argument("-i", "--ssh-identity-file", metavar="KEY", help="private key for ssh")
    return parser


def main(argv: Sequence[str]) -> int:
    """Run `hora doctor`."""
    args = make_parser().parse_args(argv)
    names = _names(args)
    ssh = Ssh.from_environ(variables(), port=args.ssh_port, identity_file=args.ssh_identity_file)
    try:
        return _examine(names, ssh)
    except (FileNotFoundError, PermissionError) as error:  # ssh is not installed
        raise RuntimeError(f"cannot run {error.filename!r}: {error.strerror}; is it installed?") from None


if __name__ == "__main__":
    _probe(*sys.argv[1:])
