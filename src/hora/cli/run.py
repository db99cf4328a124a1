"""The commands `horovodrun`, `hora run` and `hora plan`: from flags to a job.

The first two run the same job; they differ in their exit status. `horovodrun` fails like Horovod's, with status
1; `hora run` and `hora mpirun` exit with the first failing rank's own status.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from hora.cli.exit_status import exit_status_of
from hora.foreign_horovod import foreign_message
from hora.launch.environment import variables
from hora.launch.options import Options, all_options, build_parser, parse
from hora.platforms import slurm
from hora.version import horovod_version, version

if TYPE_CHECKING:
    from hora.launch.job import Job


class HorovodArgs:
    """Launch options as a plain object: every flag's dest is an attribute, None until it is set.

    `run_func`: a function without arguments to call on every rank instead of the command, by the Python `executable`.
    """

    def __init__(self) -> None:
        for name in all_options():
            setattr(self, name, None)
        self.num_proc = 1
        self.command: list[str] = []
        self.run_func: Callable[[], Any] | None = None
        self.executable: str | None = None
        self.nic: str | None = None
        self.check_build: bool | None = None


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse a command line of `horovodrun` (default: this process's own); raises ValueError for invalid values."""
    return parse(make_parser("horovodrun"), sys.argv[1:] if argv is None else argv, variables())[0]


def run(args: object) -> list[Any] | None:
    """Run the job described by `args` (from `parse_args`, or any object with such attributes).

    With a `run_func` every rank calls it; returns its values in rank order.
    """
    options = Options.from_args(args, variables())
    function = getattr(args, "run_func", None)
    if function is None:
        _run(options)
        return None
    from hora.launch.pickling import pickle_call
    from hora.launch.start import start

    executable = getattr(args, "executable", None)
    return start(options, variables(), function=pickle_call(function), executable=executable).values()


def make_parser(prog: str = "hora run") -> argparse.ArgumentParser:
    """Return the parser of `hora run` or `horovodrun`."""
    return _parser(
        prog,
        "Run a command as N processes (ranks) that find one another through hvd.init().",
        f"{prog} -np 4 --dashboard python train.py             # this machine, with a live page",
        f"{prog} -np 8 -H alpha:4,beta:4 python train.py       # two hosts, by ssh",
        f"{prog} -np 4 --min-np 2 python train.py              # goes on while at least 2 ranks live",
    )


def make_plan_parser() -> argparse.ArgumentParser:
    """Return the parser of `hora plan`."""
    return _parser(
        "hora plan",
        "Measure the links between hosts and some steps of a training; print what each way to send gradients would "
        "cost.",
        "hora plan -np 8 -H alpha:4,beta:4 python train.py",
        "hora plan -np 16 --hostfile hosts.txt python train.py",
        "srun --nodes 2 hora plan --join python train.py       # in a Slurm job",
    )


def _parser(prog: str, summary: str, *examples: str) -> argparse.ArgumentParser:
    on_version = horovod_version if prog == "horovodrun" else version
    return build_parser(prog, summary, examples, on_version=on_version, on_check_build=check_build)


def _run(options: Options, extra: Mapping[str, str] | None = None) -> None:
    from hora.launch.start import start

    set_up_log(options)
    message = foreign_message()
    if message is not None:
        logging.getLogger("hora").warning(message)
    environ = {**variables(), **(extra or {})}
    if options.joins:
        from hora.launch.providers.join import serve_node

        status = serve_node(options, environ, lambda term: start(options, environ, adjust=on_workers, leadership=term))
        if status is not None:
            raise SystemExit(status)
    start(options, environ, adjust=on_workers)


def on_workers(job: Job) -> Job:
    """Let ranks at the addresses of a session's workers (`launch_workers`) use the workers' GPUs and end with them."""
    hosts = {slot.hostname for slot in job.slots}
    # Workers of this machine have their own loopback addresses; the environment identifies those of a cluster.
    of_a_session = variables().get("CDSW_API_URL", "").startswith("unix:hora-")
    if not of_a_session and not any(host.startswith("127.") for host in hosts):
        return job
    from hora.workers.lease import lease_of  # imported only here: other jobs start faster without it

    lease = lease_of(hosts)
    if lease is None:
        return job
    env = {host: {"CUDA_VISIBLE_DEVICES": gpus} for host, gpus in lease.devices.items()}
    return replace(job, host_env=env, lease=lease)


def horovodrun() -> int:
    """Run the console script. A failed job has status 1, regardless of the rank's own status."""
    parser = make_parser("horovodrun")
    return exit_status_of("horovodrun", lambda: _run(parse(parser, sys.argv[1:], variables())[1]), failed=1)


def main(argv: Sequence[str]) -> None:
    """Run `hora run`."""
    _run(parse(make_parser(), argv, variables())[1])


def plan(argv: Sequence[str]) -> None:
    """Run `hora plan`: a job whose optimizer measures instead of training, and ends with a table."""
    options = parse(make_plan_parser(), argv, variables())[1]
    _check_hosts(options)
    _run(options, {"HORA_PLAN": "1"})


def _check_hosts(options: Options) -> None:
    """Raise ValueError if all ranks would be on one host, whose memory they share."""
    from hora.launch.start import find_hosts

    environ = variables()
    told_later = options.joins or options.host_discovery_script is not None or bool(slurm.job(environ))
    if told_later or environ.get("HORA_TRANSPORT") == "tcp":
        return
    names = {host.hostname for host in find_hosts(options, environ)}
    if len(names) == 1:
        raise ValueError(
            f"there is nothing to plan: all ranks are on one host ({names.pop()}), but a plan is "
            "for links between hosts; name two or more, for example -H a:4,b:4"
        )


def set_up_log(options: Options) -> None:
    """Show the launcher's own messages from the given level on (default: warnings)."""
    when = "%(asctime)s " if options.log_level is not None and options.log_with_timestamp is not False else ""
    logging.basicConfig(format=f"{when}hora %(levelname)s: %(message)s")
    if options.log_level is not None:
        level = {"TRACE": "DEBUG", "FATAL": "CRITICAL"}.get(options.log_level, options.log_level)
        logging.getLogger("hora").setLevel(level)


def check_build() -> str:
    """Return what works on this machine, as Horovod says it."""
    from hora.legacy.check_build import check_build

    return check_build()
