"""The command `hora mpirun`: runs an mpirun command line with Hora's launcher, without MPI.

It takes Open MPI's options, with additions of MPICH, Intel and HPE: processes, hosts, variables, directory, output,
network interface, ssh options. Options that tune MPI's transports are dropped; all other ignored options are named.

It is not installed as `mpirun`, which would hide a real one. `python -m hora.compat` puts it on the PATH under that
name for the script that it runs; `hora mpirun --install DIR` writes `mpirun` and `mpiexec` to a folder.
"""

from __future__ import annotations

import ipaddress
import os
import re
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from hora.cli.run import on_workers, set_up_log
from hora.launch.environment import variables
from hora.launch.job import Job
from hora.launch.options import Options
from hora.launch.processes import module_command
from hora.launch.slots import HostInfo, parse_host_files, place_ranks, slots_by_host
from hora.net import sockets
from hora.platforms import lsf, slurm

_USAGE = """usage: hora mpirun -np N [-H host:slots,…] [Open MPI's options] command [args ...]
       hora mpirun --install DIR     write mpirun and mpiexec into a folder, for scripts that call them"""
_NAMES = ("mpirun", "mpiexec")
_HOST = re.compile(r"(?!-)[\w.-]+(?::[0-9]+)?")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] == "--install":
        _install(argv[1:])
    else:
        _run(argv)
    return 0


def _install(folders: Sequence[str]) -> None:
    if len(folders) != 1:
        raise ValueError("--install takes one folder, for example --install ~/mpi-bin")
    folder = Path(folders[0])
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(module_command(sys.executable, "hora", "mpirun"))
    for name in _NAMES:
        if (folder / name).exists():
            raise ValueError(f"there is already a file {folder / name}; choose another folder")
    for name in _NAMES:
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    print(f"wrote {' and '.join(_NAMES)}; now: export PATH={shlex.quote(str(folder.resolve()))}:$PATH")


def _run(argv: Sequence[str]) -> None:
    environ = variables()
    parsed = parse(argv, environ)
    if parsed.version:
        from hora.version import version

        print(f"mpirun (Hora {version()}, which takes the command line of Open MPI)")
        return
    # In a scheduler's allocation (Slurm, LSF) a line without hosts means all of it, as for Open MPI.
    allocated = not parsed.hosts and bool(slurm.job(environ) or lsf.in_job(environ))
    placed = [] if allocated else parsed.placed(len(os.sched_getaffinity(0)))
    if parsed.num_proc is None and not parsed.hosts and not allocated:
        _say(f"no -np and no hosts: one process for each of {len(placed)} cores")
    if parsed.left_out:
        _say(f"without effect here: {'; '.join(parsed.left_out)}")
    unset = [name for name in parsed.passed_variables if name not in environ]
    if unset:
        _say(f"-x {' -x '.join(unset)}: not set here, so there is nothing to pass on")
    environ |= parsed.set_variables
    if parsed.ssh_options or parsed.ssh_program:
        program = parsed.ssh_program or "ssh"
        name = "HORA_SSH" if os.path.basename(program.split()[0]) == "ssh" else "HORA_RSH_AGENT"
        environ.setdefault(name, f"{program} {parsed.ssh_options}")
    if parsed.directory is not None:
        os.chdir(parsed.directory)
    options = _options(parsed, placed)
    set_up_log(options)
    _end_in_time(environ.get("HORA_COMPAT_PID", ""), parsed.limit_s)
    from hora.launch.start import start

    start(options, environ, adjust=lambda job: _adjusted(job, parsed, placed))


def _say(text: str) -> None:
    print(f"hora mpirun: {text}", file=sys.stderr, flush=True)


def _options(parsed: MpiCommand, placed: Sequence[str]) -> Options:
    hosts = {name: placed.count(name) for name in placed}
    # If all processes are on this machine they use loopback, even if the line names an interface.
    elsewhere = any(not sockets.is_local(name) for name in hosts)
    nics = _interfaces(parsed.interface) if parsed.interface and elsewhere else None
    return Options(
        command=parsed.command,
        num_proc=len(placed) or parsed.num_proc,
        hosts=",".join(f"{name}:{slots}" for name, slots in hosts.items()) or None,
        nics=nics,
        output_filename=parsed.output_directory,
        verbose=parsed.verbose or None,
    )


def _interfaces(text: str) -> frozenset[str]:
    """Return the interfaces for a list of names or of networks such as 10.3.0.0/16."""
    names = {name for _, name in socket.if_nameindex()}
    found = set()
    for item in filter(None, text.split(",")):
        if "/" not in item:
            found.add(item)
            continue
        network = ipaddress.ip_network(item, strict=False)
        for name in names:
            try:
                own = sockets.interface_address([name])
            except ValueError:
                continue
            if ipaddress.ip_address(own) in network:
                found.add(name)
    if not found:
        raise ValueError(f"no network interface of this machine is in {text}; it has {', '.join(sorted(names))}")
    return frozenset(found)


def _adjusted(job: Job, parsed: MpiCommand, placed: Sequence[str]) -> Job:
    prefix, stderr = parsed.tagged or parsed.timestamped, sys.stdout if parsed.merged else None
    output = replace(job.output, prefix=prefix, timestamp=parsed.timestamped, tag="1,", stderr=stderr)
    slots = tuple(place_ranks(placed)) if placed else job.slots
    if parsed.verbose:
        _say("ranks on hosts: " + ", ".join(f"{slot.rank} {slot.hostname}" for slot in slots))
    return on_workers(replace(job, slots=slots, output=output))


def _end_in_time(pid: str, limit_s: float | None) -> None:
    """End the job after the time limit, and inside `hora.compat` with the process that runs the script, `pid`."""
    if not pid.isdecimal() and limit_s is None:
        return
    try:
        session = [os.pidfd_open(int(pid))] if pid.isdecimal() else []
    except ProcessLookupError:
        raise RuntimeError(f"the session (process {pid}) has ended") from None

    def watch() -> None:
        if not select.select(session, [], [], limit_s)[0]:
            _say(f"the job is ended after {limit_s:g} s (--timeout)")
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="hora-mpirun-end", daemon=True).start()


# ---- the command line ------------------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class MpiCommand:
    """Parsed `mpirun` command line."""

    command: tuple[str, ...] = ()
    num_proc: int | None = None
    hosts: list[HostInfo] = field(default_factory=list)
    per_host: int | None = None
    by_node: bool = False  # assign ranks round-robin over the hosts, instead of filling one after the other
    oversubscribe: bool = False
    set_variables: dict[str, str] = field(default_factory=dict)
    passed_variables: list[str] = field(default_factory=list)
    directory: str | None = None
    tagged: bool = False
    timestamped: bool = False
    merged: bool = False
    output_directory: str | None = None
    verbose: bool = False
    interface: str | None = None
    ssh_options: str = ""
    ssh_program: str = ""
    limit_s: float | None = None
    version: bool = False
    parameters: dict[str, str] = field(default_factory=dict)  # of -mca
    left_out: list[str] = field(default_factory=list)
    ignored: object = None  # by an option that says nothing about a job of Hora

    def placed(self, default_slots: int) -> list[str]:
        """Return the host of every rank, in order. `default_slots`: of this machine, if no host is named."""
        hosts = self.hosts or [HostInfo("localhost", max(default_slots, self.num_proc or 0))]
        if self.per_host is not None:
            hosts = [HostInfo(host.hostname, self.per_host) for host in hosts]
        merged = slots_by_host(hosts)
        num_slots = sum(merged.values())
        num_proc = self.num_proc if self.num_proc is not None else num_slots
        if num_proc > num_slots and not self.oversubscribe:
            raise ValueError(
                f"-np {num_proc}, but the hosts have {num_slots} slots ({', '.join(map(str, hosts))}); name more "
                "slots, as in -H a:4,b:4, or say --oversubscribe"
            )
        most = max(merged.values(), default=0)
        order = [name for turn in range(most) for name, count in merged.items() if turn < count]
        if not self.by_node:
            order.sort(key=list(merged).index)
        while order and len(order) < num_proc:  # oversubscribed: start another round
            order += order
        return order[:num_proc] if self.by_node else sorted(order[:num_proc], key=list(merged).index)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> MpiCommand:
    """Parse the words after `mpirun`. ValueError names an unknown option or an invalid value."""
    parsed, words = MpiCommand(), list(argv)
    while words and words[0].startswith("-") and len(words[0]) > 1:
        flag, name, values = _take_option(words)
        _, meaning = _OPTIONS[name]
        if meaning is None:
            parsed.left_out.append(" ".join([flag, *values]))
        elif isinstance(meaning, str):
            setattr(parsed, meaning, values[0] if values else True)
        else:
            meaning(parsed, *values)
    if ":" in words:
        raise ValueError("several programs in one line, separated by `:`, cannot be started; start one program")
    parsed.command = tuple(words)
    set_by_variables = {name[9:]: value for name, value in environ.items() if name[:9] in ("OMPI_MCA_", "PRTE_MCA_")}
    _take_parameters(parsed, set_by_variables | parsed.parameters)
    return parsed


def _take_option(words: list[str]) -> tuple[str, str, list[str]]:
    """Remove the first option from the words; return it as written, its name and its values."""
    flag = words.pop(0)
    name, found, value = flag.lstrip("-").partition("=")
    if name not in _OPTIONS:
        raise ValueError(
            f"{flag} is no option of mpirun that is known here; leave it out, or write the program after the options"
        )
    wanted, _ = _OPTIONS[name]
    values = [value] if found else []
    while len(values) < wanted and words:
        values.append(words.pop(0))
    if name == "env" and values and "=" not in values[0] and words:  # MPICH's: two words
        values = [f"{values[0]}={words.pop(0)}"]
    if len(values) != wanted:
        raise ValueError(f"{flag} takes {wanted} value{'s' * (wanted != 1)}, but {len(values)} follow")
    return flag.partition("=")[0], name, values


def _take_parameters(parsed: MpiCommand, parameters: Mapping[str, str]) -> None:
    """Translate the -mca parameters. Keys that tune MPI's own transports are dropped."""
    for key in ("orte_default_hostfile", "prte_default_hostfile"):
        if key in parameters and not parsed.hosts:
            _hostfile(parsed, parameters[key])
    for key in ("btl_tcp_if_include", "oob_tcp_if_include"):
        parsed.interface = parsed.interface or parameters.get(key)
    parsed.ssh_options = parameters.get("plm_rsh_args", parsed.ssh_options)
    parsed.ssh_program = parameters.get("plm_rsh_agent", parameters.get("orte_rsh_agent", parsed.ssh_program))
    if parameters.get("orte_abort_on_non_zero_status") == "0":
        parsed.left_out.append("-mca orte_abort_on_non_zero_status 0 (the first failure ends the job)")
    for key in ("btl_tcp_if_exclude", "oob_tcp_if_exclude"):
        if key in parameters:
            parsed.left_out.append(f"-mca {key} {parameters[key]}")


def _number(text: str, what: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{what} must be a whole number, at least 1, but it is {text!r}")
    return int(text)


def _hosts(parsed: MpiCommand, text: str) -> None:
    for item in text.split(","):
        if not _HOST.fullmatch(item.strip()):
            raise ValueError(f"-H takes hosts as a:4,b:4, but {item.strip()!r} is among them")
        name, _, slots = item.strip().partition(":")
        parsed.hosts.append(HostInfo(name, int(slots or 1)))


def _hostfile(parsed: MpiCommand, path: str) -> None:
    _hosts(parsed, parse_host_files(path))


def _variable(parsed: MpiCommand, text: str) -> None:
    name, found, value = text.partition("=")
    if found:
        parsed.set_variables[name] = value
    else:
        parsed.passed_variables.append(name)


def _map_by(parsed: MpiCommand, text: str) -> None:
    kind, *more = text.lower().split(":")
    if kind == "ppr":
        if len(more) < 2 or more[1] != "node":
            parsed.left_out.append(f"-map-by {text}")
        else:
            parsed.per_host = _number(more[0], "-map-by ppr:N:node")
    elif kind == "node":
        parsed.by_node = True
    elif kind not in ("slot", "core", "hwthread", "") or more:
        parsed.left_out.append(f"-map-by {text}")


def _rank_by(parsed: MpiCommand, text: str) -> None:
    if text not in ("slot", "fill", "core", "node"):
        raise ValueError(f"--rank-by takes slot, fill, core or node here, but it is {text!r}")
    parsed.by_node = parsed.by_node or text == "node"


def _bind_to(parsed: MpiCommand, text: str) -> None:
    if text != "none":
        parsed.left_out.append(f"-bind-to {text}")


def _counts(name: str, what: str) -> Callable[..., None]:
    """An option that sets this attribute to a whole number."""
    return lambda parsed, text: setattr(parsed, name, _number(text, what))


# (names, number of values, action). Values must be counted even for ignored options, because the first other word is
# the program. Action: a callable; a str, the attribute to set; None, left out and reported.
_TABLE: tuple[tuple[str, int, Callable[..., None] | str | None], ...] = (
    ("np n c", 1, _counts("num_proc", "-np")),
    ("H host hosts", 1, _hosts),
    ("hostfile machinefile default-hostfile f", 1, _hostfile),
    ("x env", 1, _variable),
    ("genv", 2, lambda parsed, name, value: parsed.set_variables.update({name: value})),
    ("genvlist envlist", 1, lambda parsed, names: parsed.passed_variables.extend(names.split(","))),
    ("map-by", 1, _map_by),
    ("rank-by", 1, _rank_by),
    ("ppn perhost N npernode", 1, _counts("per_host", "the number of processes of each host")),
    ("bind-to", 1, _bind_to),
    ("timeout", 1, _counts("limit_s", "--timeout")),
    ("wdir wd", 1, "directory"),
    ("output-filename", 1, "output_directory"),
    ("iface", 1, "interface"),
    ("bootstrap-exec-args", 1, "ssh_options"),
    ("tag-output l prepend-rank", 0, "tagged"),
    ("timestamp-output", 0, "timestamped"),
    ("merge-stderr-to-stdout", 0, "merged"),
    ("oversubscribe", 0, "oversubscribe"),
    ("report-bindings display-map display-allocation v verbose", 0, "verbose"),
    ("version V", 0, "version"),
    ("mca gmca prtemca pmixmca", 2, lambda parsed, name, value: parsed.parameters.update({name: value})),
    ("prefix path launcher bootstrap", 1, "ignored"),
    ("allow-run-as-root noprefix nooversubscribe genvall envall quiet q", 0, "ignored"),
    ("outfile-pattern errfile-pattern cpu-bind depth d", 1, None),
)
_OPTIONS = {name: (num_values, meaning) for names, num_values, meaning in _TABLE for name in names.split()}
