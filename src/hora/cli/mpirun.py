"""The command `hora mpirun`: runs an mpirun command line with Hora's launcher, without MPI.

It is not installed as `mpirun`, which would hide a real one. `python -m hora.compat` puts it on the PATH under that
name for the script that it runs; `hora mpirun --install DIR` writes `mpirun` and `mpiexec` to a folder.
"""

from __future__ import annotations

import ipaddress
import os
import select
import shlex
import signal
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from hora.cli.run import on_workers, set_up_log, status_of
from hora.launch.job import Job, OutputOptions
from hora.launch.mpirun import MpiCommand, parse
from hora.launch.options import Options
from hora.launch.processes import module_command, variables
from hora.launch.slots import place_ranks
from hora.net import sockets

_USAGE = """usage: hora mpirun -np N [-H host:slots,…] [Open MPI's options] command [args ...]
       hora mpirun --install DIR     write mpirun and mpiexec into a folder, for scripts that call them"""
_NAMES = ("mpirun", "mpiexec")


def main(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return 0 if argv else 2
    if argv[0] == "--install":
        return status_of("hora mpirun", lambda: _install(argv[1:]))
    return status_of("hora mpirun", lambda: _run(argv))


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
    from hora.launch.start import start

    environ = variables()
    parsed = parse(argv, environ)
    if parsed.version:
        from hora.version import version

        print(f"mpirun (Hora {version()}, which takes the command line of Open MPI)")
        return
    # In a scheduler's allocation (Slurm, LSF) a line without hosts means all of it, as for Open MPI.
    allocated = not parsed.hosts and bool(environ.get("SLURM_JOB_ID") or environ.get("LSB_JOBID"))
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
    _end_with_the_session(environ.get("HORA_COMPAT_PID", ""))
    if parsed.limit_s is not None:
        _end_after(parsed.limit_s)
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
    output = OutputOptions(
        prefix=parsed.tagged or parsed.timestamped,
        timestamp=parsed.timestamped,
        tag="1,",
        directory=parsed.output_directory,
        stderr=sys.stdout if parsed.merged else None,
    )
    slots = tuple(place_ranks(placed)) if placed else job.slots
    if parsed.verbose:
        _say("ranks on hosts: " + ", ".join(f"{slot.rank} {slot.hostname}" for slot in slots))
    return on_workers(replace(job, slots=slots, output=output, mpi_names=True))


def _end_after(limit_s: float) -> None:
    def end() -> None:
        _say(f"the job is ended after {limit_s:g} s (--timeout)")
        os.kill(os.getpid(), signal.SIGTERM)

    timer = threading.Timer(limit_s, end)
    timer.daemon = True
    timer.start()


def _end_with_the_session(pid: str) -> None:
    """Inside `hora.compat`, end the job with the process that runs the script, like a session's jobs."""
    if not pid.isdecimal():
        return
    try:
        session = os.pidfd_open(int(pid))
    except ProcessLookupError:
        raise RuntimeError(f"the session (process {pid}) has ended") from None

    def watch() -> None:
        select.select([session], [], [])
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="hora-session", daemon=True).start()
