"""Launch options: one field per option, with its flag, YAML key and variable; the command line and the config file.

`Option` describes how one option is set, checked and passed to the workers; `Options` holds all values. The parser and
the config file are derived from these fields; `start` uses the values. An unset option is None: it is not exported, so
a value inherited from the launcher's environment survives.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

from hora.config import EngineConfig
from hora.launch.limits import SILENCE_S
from hora.platforms import lsf
from hora.spelling import Parser, did_you_mean

_NO_CYCLE = "there is no cycle to wait for; ranks with news wake the others"
_CHOSEN = "the route of a collective follows from where its ranks are"
_NO_MODEL = "trials are compared directly, without a model of their noise"
_NO_MPI = "there is no MPI"

LOG_LEVELS = ("TRACE", "DEBUG", "INFO", "WARNING", "ERROR", "FATAL")


def _text(value: Any) -> str:
    return str(int(value)) if isinstance(value, bool) else str(value)


@dataclass(frozen=True, kw_only=True)
class Option:
    """External names and checks of one field of `Options`."""

    flags: tuple[str, ...]
    kind: type
    section: str
    parse: Callable[[str], Any] = str  # raises ValueError for a text that is not `what`
    what: str = ""
    help: str | None = None  # None: not shown by --help
    idle: str = ""  # why an option of Horovod has no effect here; it is still accepted, checked and exported
    metavar: str | None = None
    off_flags: tuple[str, ...] = ()  # set a switch to False
    old_flags: tuple[tuple[str, bool], ...] = ()  # deprecated spellings, with the value they set
    exclusive: str = ""
    yaml: str = ""
    yaml_negated: bool = False
    variable: str = ""
    to_variable: Callable[[Any], str] = _text
    export_with: str = ""  # the field that must be set for this one to be exported
    launch_variable: str = ""  # read by the launcher itself when the flag is missing
    default: Any = None  # what an unset option means
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    count: int | None = None  # how many values the flag takes, when not one

    @property
    def name(self) -> str:
        """Return the flag that messages name."""
        return self.flags[0] if self.flags[0] == "-np" else self.flags[-1]


def check(option: Option, value: Any, *, where: str = "") -> Any:
    """Return the value as the option's type. ValueError says what `where` (by default the flag) must be."""
    where = where or option.name
    if option.kind is frozenset:
        names = value.split(",") if isinstance(value, str) else value
        return frozenset(str(name).strip() for name in names if str(name).strip()) or None
    if option.count is None:
        return _check_one(option, value, where)
    if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != option.count:
        raise ValueError(f"{where} takes {option.count} numbers, but it is {value!r}")
    return tuple(_check_one(option, one, where) for one in value)


def _check_one(option: Option, value: Any, where: str) -> Any:
    value = _convert(option, value, where)
    if option.choices:
        value = value.upper()
        if value not in option.choices:
            raise ValueError(f"{where} must be one of {', '.join(option.choices)}, but it is {value!r}")
    try:
        option.parse(value)
    except ValueError:
        raise ValueError(f"{where} must be {option.what}, but it is {value!r}") from None
    if option.low is not None and value < option.low:
        raise ValueError(f"{where} must be at least {option.low}, but it is {value}")
    if option.high is not None and value > option.high:
        raise ValueError(f"{where} must be at most {option.high}, but it is {value}")
    return value


def _convert(option: Option, value: Any, where: str) -> Any:
    if option.kind is bool:
        if isinstance(value, bool):
            return value
        raise ValueError(f"{where} must be true or false, but it is {value!r}")
    if option.kind is str:
        if isinstance(value, (dict, list)):
            raise ValueError(f"{where} must be a text, but it is {value!r}")
        return str(value)
    fraction = option.kind is int and isinstance(value, float) and not value.is_integer()
    try:
        if isinstance(value, bool) or fraction:
            raise ValueError
        number = option.kind(value)
        if not math.isfinite(number):
            raise ValueError
        return number
    except (TypeError, ValueError, OverflowError):
        word = "an integer" if option.kind is int else "a number"
        raise ValueError(f"{where} must be {word}, but it is {value!r}") from None


def _option(*flags: str, section: str, kind: type = int, **rest: Any) -> Any:
    return field(default=None, metadata={"option": Option(flags=flags, kind=kind, section=section, **rest)})


def _variable(setting: str) -> str:
    return str(EngineConfig.__dataclass_fields__[setting].metadata["variable"])


def _worker(flag: str, *, section: str, key: str = "", kind: type = int, setting: str = "", **rest: Any) -> Any:
    """Make an option of the workers. The engine's `setting` gives its variable, default and help.

    The YAML key, and the variable of an option without a setting, are derived from the flag.
    """
    name = flag[2:].replace("-", "_")
    if setting:
        known = EngineConfig.__dataclass_fields__[setting]
        rest = {"variable": _variable(setting), "help": known.metadata["meaning"]} | rest
        if kind is str and "choices" not in rest:
            rest |= {"parse": known.metadata["parse"], "what": known.metadata["what"]}
        if kind in (int, float) and isinstance(known.default, int | float):
            rest.setdefault("default", kind(known.default))
    rest.setdefault("variable", "HOROVOD_" + name.upper())
    if kind is bool:
        rest.setdefault("off_flags", ("--no-" + flag[2:],))
        rest.setdefault("exclusive", flag)
    elif kind is not str:
        rest.setdefault("low", 0)
    return _option(flag, section=section, kind=kind, yaml=key or "params." + name, **rest)


def _autotune(flag: str, **rest: Any) -> Any:
    key = "autotune." + flag.removeprefix("--autotune-").replace("-", "_")
    return _worker(flag, key=key, section="autotune", export_with="autotune", **rest)


@dataclass(frozen=True, kw_only=True)
class Options:
    """A validated launch request. ValueError, naming the flag and its value, for invalid values."""

    command: tuple[str, ...] = ()

    # A table: the formatter would spread it over three times as many lines.
    # fmt: off
    num_proc: int | None = _option("-np", "--num-proc", section="job", low=1,
        high=100_000, help="number of processes; in an elastic job the number to start with")
    verbose: bool | None = _option("--verbose", kind=bool, section="job", help="print commands and progress")
    disable_cache: bool | None = _option("--disable-cache", kind=bool, section="idle",
        help="nothing is cached: ssh is checked at every start")
    ports: str | None = _worker("--ports", kind=str, section="job", setting="ports", launch_variable="HORA_PORTS",
        metavar="FIRST-LAST")
    start_timeout: int | None = _option("--start-timeout", section="job", low=1, default=30, metavar="SECONDS",
        launch_variable="HOROVOD_START_TIMEOUT", help="time limit for the checks and the start of all processes")
    output_filename: str | None = _option("--output-filename", kind=str, section="job", metavar="DIR",
        help="also write each rank's output to DIR/rank.<r>/stdout and stderr")
    dashboard: bool | None = _option("--dashboard", kind=bool, section="job",
        help="serve a live page of the job, and print its address (or set HORA_DASHBOARD=1)")
    dashboard_address: str | None = _option("--dashboard-address", kind=str, section="job", metavar="HOST:PORT",
        help="where the live page listens (default: loopback, a free port)")
    record: str | None = _option("--record", kind=str, section="job", metavar="FILE",
        help="record the run for `hora view FILE`")
    verdict: bool | None = _option("--verdict", kind=bool, section="job",
        help="end with a verdict: where the time went, the slow rank, what to try (jobs that are watched have one)")
    config_file: str | None = _option("--config-file", kind=str, section="job", metavar="YAML",
        help="read options from this file; flags override it")
    nics: frozenset[str] | None = _option("--network-interfaces", kind=frozenset, section="job",
        metavar="NIC,NIC", help="network interfaces to use (default: the one that reaches the hosts; lo on one host)")

    hosts: str | None = _option("-H", "--hosts", kind=str, section="hosts", exclusive="hosts",
        metavar="HOST:SLOTS,...", help="hosts and their slots (default: localhost)")
    hostfile: str | None = _option("-hostfile", "--hostfile", kind=str, section="hosts", exclusive="hosts",
        metavar="FILE", help="a file with a line `name slots=N` for each host")
    join: bool | None = _option("--join", kind=bool, section="nodes",
        help="this command runs on every node, and the platform's variables number the nodes")
    num_nodes: int | None = _option("--nnodes", section="nodes", low=1, high=100_000, metavar="N",
        help="number of nodes that run this command")
    node_rank: int | None = _option("--node-rank", section="nodes", low=0, metavar="N",
        launch_variable="HORA_NODE_RANK",
        help="rank of this node; node 0 controls the job")
    meet: str | None = _option("--meet", kind=str, section="nodes", metavar="HOST:PORT",
        help="address of node 0, where the nodes meet (default port: 29500)")
    secret_file: str | None = _option("--secret-file", kind=str, section="nodes", metavar="FILE",
        launch_variable="HORA_SECRET_FILE", help="file with the secret of all nodes, readable by you alone")
    run_id: str | None = _option("--run-id", kind=str, section="nodes", metavar="ID",
        help="elastic: name of this run; node 0's command, typed again, leads on where the last one died")
    leader_timeout: int | None = _option("--leader-timeout", section="nodes", low=1, default=300, metavar="SECONDS",
        help="with --run-id: how long nodes and ranks wait for node 0's command")
    host_discovery_script: str | None = _option("--host-discovery-script", kind=str, section="hosts",
        exclusive="hosts", metavar="SCRIPT", help="elastic: a program that prints host:slots lines")
    silence_timeout: int | None = _option("--silence-timeout", section="hosts", low=3, default=SILENCE_S,
        launch_variable="HORA_SILENCE_TIMEOUT", metavar="SECONDS",
        help="drop a host that stays silent this long, and end its ranks")
    launcher_timeout: int | None = _option("--launcher-timeout", section="elastic", low=0, default=30,
        launch_variable="HORA_LAUNCHER_TIMEOUT", metavar="SECONDS",
        help="let ranks train on for this long while the launcher is unreachable")
    ssh_port: int | None = _option("-p", "--ssh-port", section="hosts", low=1, high=65535, metavar="PORT",
        help="ssh port of all hosts")
    ssh_identity_file: str | None = _option("-i", "--ssh-identity-file", kind=str, section="hosts",
        metavar="KEY", help="private key for ssh")

    fusion_threshold_mb: int | None = _worker("--fusion-threshold-mb", section="tuning",
        setting="fusion_threshold_bytes", default=EngineConfig.fusion_threshold_bytes // 2**20,
        to_variable=lambda megabytes: str(megabytes * 2**20), metavar="MB")
    cycle_time_ms: float | None = _worker("--cycle-time-ms", section="tuning", kind=float, metavar="MS",
        variable="HOROVOD_CYCLE_TIME", idle=_NO_CYCLE)
    cache_capacity: int | None = _worker("--cache-capacity", section="tuning", setting="cache_capacity", metavar="N")
    hierarchical_allreduce: bool | None = _worker("--hierarchical-allreduce", section="tuning", kind=bool,
        idle=_CHOSEN)
    hierarchical_allgather: bool | None = _worker("--hierarchical-allgather", section="tuning", kind=bool,
        idle=_CHOSEN)
    torus_allreduce: bool | None = _worker("--torus-allreduce", section="tuning", kind=bool,
        idle=_CHOSEN)

    autotune: bool | None = _worker("--autotune", section="autotune", kind=bool, key="autotune.enabled",
        setting="autotune")
    autotune_log_file: str | None = _autotune("--autotune-log-file", kind=str, setting="autotune_log", metavar="CSV")
    autotune_warmup_samples: int | None = _autotune("--autotune-warmup-samples", metavar="N",
        setting="autotune_warmup_samples")
    autotune_steps_per_sample: int | None = _autotune("--autotune-steps-per-sample", metavar="N",
        setting="autotune_steps_per_sample")
    autotune_bayes_opt_max_samples: int | None = _autotune("--autotune-bayes-opt-max-samples", metavar="N",
        setting="autotune_max_samples")
    autotune_gaussian_process_noise: float | None = _autotune("--autotune-gaussian-process-noise", kind=float,
        high=1, metavar="X", idle=_NO_MODEL)

    min_num_proc: int | None = _option("--min-np", "--min-num-proc", section="elastic", low=1, metavar="N",
        help="smallest number of processes (default: -np); makes the job elastic")
    max_num_proc: int | None = _option("--max-np", "--max-num-proc", section="elastic", low=1, metavar="N",
        help="largest number of processes (default: the number of slots)")
    slots: int | None = _option("--slots-per-host", section="elastic", low=1, metavar="N",
        help="slots of a host if the script prints none")
    elastic_timeout: int | None = _option("--elastic-timeout", section="elastic", low=1, default=600,
        launch_variable="HOROVOD_ELASTIC_TIMEOUT", metavar="SECONDS",
        help="time limit for enough slots after a change")
    leave_timeout: int | None = _option("--leave-timeout", section="elastic", low=1, default=25,
        launch_variable="HORA_LEAVE_TIMEOUT", metavar="SECONDS",
        help="time that ranks have to commit and leave (status 75) after a SIGTERM")
    spares: int | None = _option("--spares", section="elastic", low=1, metavar="N",
        help="replace a dead rank at once, N times on each host, from a process that has imported torch")
    reset_limit: int | None = _option("--reset-limit", section="elastic", low=0, metavar="N",
        help="largest number of membership changes (default: unlimited)")
    cooldown_range: tuple[int, int] | None = _option("--blacklist-cooldown-range", section="elastic", low=1,
        high=3600, count=2, metavar="SECONDS",
        help="shortest and longest time that a failing host is excluded (default: for ever)")

    timeline_filename: str | None = _worker("--timeline-filename", section="timeline", kind=str,
        key="timeline.filename", setting="timeline", metavar="JSON")
    timeline_mark_cycles: bool | None = _worker("--timeline-mark-cycles", section="timeline", kind=bool,
        key="timeline.mark_cycles", export_with="timeline_filename", setting="timeline_mark_cycles")

    no_stall_check: bool | None = _worker("--no-stall-check", section="stall check", kind=bool,
        off_flags=("--stall-check",), key="stall_check.enabled", yaml_negated=True,
        setting="stall_check_disable")
    stall_check_warning_time_seconds: int | None = _worker("--stall-check-warning-time-seconds",
        section="stall check", key="stall_check.warning_time_seconds", metavar="SECONDS", setting="stall_warning_s")
    stall_check_shutdown_time_seconds: int | None = _worker("--stall-check-shutdown-time-seconds",
        section="stall check", key="stall_check.shutdown_time_seconds", metavar="SECONDS", setting="stall_shutdown_s")

    mpi_threads_disable: bool | None = _worker("--mpi-threads-disable", section="libraries", kind=bool,
        key="library_options.mpi_threads_disable", idle=_NO_MPI)
    replace_gloo: bool | None = _worker("--replace-gloo", section="libraries", kind=bool,
        key="library_options.replace_gloo", variable="HORA_REPLACE_GLOO",
        help="give Hora to programs that ask torch.distributed for gloo")
    mpi_args: str | None = _option("--mpi-args", kind=str, section="libraries", metavar="ARGS",
        idle=_NO_MPI)
    tcp_flag: bool | None = _option("--tcp", kind=bool, section="libraries", variable="NCCL_IB_DISABLE",
        help="TCP only: no InfiniBand")
    binding_args: str | None = _option("--binding-args", kind=str, section="libraries", metavar="ARGS",
        idle=_NO_MPI)
    num_nccl_streams: int | None = _worker("--num-nccl-streams", section="libraries", metavar="N",
        key="library_options.num_nccl_streams", idle="torch chooses its streams")
    thread_affinity: int | None = _worker("--thread-affinity", section="libraries", metavar="CORE",
        key="library_options.thread_affinity", setting="thread_affinity")
    gloo_timeout_seconds: int | None = _worker("--gloo-timeout-seconds", section="libraries",
        key="library_options.gloo_timeout_seconds", metavar="SECONDS", setting="init_timeout_s")

    log_level: str | None = _worker("--log-level", section="logging", kind=str, key="logging.level",
        setting="log_level", choices=LOG_LEVELS, default=EngineConfig.log_level.upper(), metavar="LEVEL",
        help=f"lowest level to log: {' '.join(LOG_LEVELS)}")
    full_traceback: bool | None = _worker("--full-traceback", section="logging", kind=bool,
        key="logging.full_traceback", setting="full_traceback")
    log_with_timestamp: bool | None = _option("--log-with-timestamp", kind=bool, section="logging",
        off_flags=("--log-without-timestamp",), exclusive="timestamp", yaml="logging.with_timestamp",
        old_flags=(("--log-hide-timestamp", False), ("--no-log-hide-timestamp", True)),
        variable=_variable("log_hide_time"), to_variable=lambda shown: "0" if shown else "1")
    prefix_output_with_timestamp: bool | None = _option("-prefix-timestamp", "--prefix-output-with-timestamp",
        kind=bool, section="logging", exclusive="timestamp", help="start each line of output with the time")

    use_gloo: bool | None = _option("--gloo", kind=bool, section="controller", exclusive="controller",
        help="Hora's own controller, the default and the only one")
    use_mpi: bool | None = _option("--mpi", kind=bool, section="controller", exclusive="controller",
        help="rejected: there is no MPI; under mpirun a script finds its own rank")
    use_jsrun: bool | None = _option("--jsrun", kind=bool, section="controller", exclusive="controller",
        help="rejected: there is no MPI; under jsrun a script finds its own rank")
    # fmt: on

    def __post_init__(self) -> None:
        options = all_options()
        for name, option in options.items():
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, check(option, value))
        for group in ("hosts", "controller"):  # a switch that is off was not asked for
            given = [
                option.name for name, option in options.items() if option.exclusive == group and getattr(self, name)
            ]
            if len(given) > 1:
                raise ValueError(f"{' and '.join(given)} exclude one another; give only one of them")
        counts = (("--min-np", self.min_num_proc), ("-np", self.num_proc), ("--max-np", self.max_num_proc))
        for (low_flag, low), (high_flag, high) in combinations(counts, 2):
            if low is not None and high is not None and low > high:
                raise ValueError(f"{low_flag} must not be greater than {high_flag}, but they are {low} and {high}")
        cooldown = self.cooldown_range
        if cooldown and cooldown[0] > cooldown[1]:
            raise ValueError(
                f"--blacklist-cooldown-range takes the shorter time first, but is {cooldown[0]} {cooldown[1]}"
            )
        for chosen, flag in ((self.use_mpi, "--mpi"), (self.use_jsrun, "--jsrun")):
            if chosen:
                raise ValueError(
                    f"{flag}: MPI support has not been built; Hora needs none. Drop {flag} (or `controller: "
                    "mpi`), or start the script with mpirun itself: it finds its rank there."
                )

    @classmethod
    def from_args(cls, args: object, environ: Mapping[str, str]) -> Options:
        """Read a parsed command line, or any object with such attributes; missing ones count as unset."""
        values = {name: getattr(args, name, None) for name in all_options()}
        for name, value in values.items():
            if all_options()[name].kind is bool and isinstance(value, int):
                values[name] = bool(value)  # old code sets verbose = 2
        return cls.filled(environ, command=tuple(getattr(args, "command", None) or ()), **values)

    @classmethod
    def filled(cls, environ: Mapping[str, str], **values: Any) -> Options:
        """Return these values, with unset ones from the launcher's own variables (HOROVOD_START_TIMEOUT, …)."""
        for name, option in all_options().items():
            if values.get(name) is None and option.launch_variable and environ.get(option.launch_variable):
                values[name] = check(option, environ[option.launch_variable], where=option.launch_variable)
        return cls(**values)

    @property
    def elastic(self) -> bool:
        """Return whether the membership of the job may change while it runs."""
        return self.host_discovery_script is not None or self.min_num_proc is not None

    @property
    def joins(self) -> bool:
        """Return whether the same command runs on every node."""
        return bool(self.join) or self.num_nodes is not None

    def effective(self, name: str) -> Any:
        """Return the value of an option, or its default if unset."""
        value = getattr(self, name)
        return all_options()[name].default if value is None else value

    def silence_limits(self) -> dict[str, Any]:
        """Return how many seconds an agent may be silent, and may take to reconnect."""
        return_s = float(self.effective("launcher_timeout")) if self.elastic else 0.0
        return {"silence_limit_s": float(self.effective("silence_timeout")), "return_s": return_s}

    def without_effect(self) -> list[str]:
        """List given options that have no effect, with the reason, as messages for the user."""
        found: dict[str, list[str]] = {}
        for name, option in all_options().items():
            why = option.idle
            # A time limit may come from a variable that is meant for other jobs.
            if option.section == "elastic" and not (
                self.elastic or option.launch_variable or (name == "slots" and self.joins)
            ):
                why = "the job is not elastic; make it so with --min-np or --host-discovery-script"
            if why and getattr(self, name):
                found.setdefault(why, []).append(option.name)
        return [f"{', '.join(names)}: without effect, {why}" for why, names in found.items()]

    def worker_env(self) -> dict[str, str]:
        """Return the variables that the given options set for the workers."""
        env: dict[str, str] = {}
        for name, option in all_options().items():
            value = getattr(self, name)
            silent = option.export_with and not getattr(self, option.export_with)
            if value is not None and option.variable and not silent:
                env[option.variable] = option.to_variable(value)
        if self.nics:
            env[_variable("interface")] = min(self.nics)
            env["NCCL_SOCKET_IFNAME"] = ",".join(sorted(self.nics))
        return env


@functools.cache
def all_options() -> dict[str, Option]:
    """Return the options of `Options` by field name, in the order of the help text."""
    return {f.name: f.metadata["option"] for f in dataclasses.fields(Options) if "option" in f.metadata}


_SECTIONS = {
    "job": "the job",
    "hosts": "hosts",
    "nodes": "the same command on every node, without ssh",
    "tuning": "tuning",
    "autotune": "autotuning",
    "elastic": "elastic jobs (--min-np or --host-discovery-script)",
    "timeline": "timeline",
    "stall check": "stall check",
    "libraries": "libraries",
    "logging": "logging",
    "controller": "controller",
    "idle": "options of Horovod that have no effect here",
}
# The options that most people use: those of the short help.
_COMMON = (
    *("num_proc", "dashboard", "record", "verdict", "output_filename", "verbose", "hosts", "hostfile", "ssh_port"),
    *("min_num_proc", "max_num_proc", "host_discovery_script"),
)
_CONTROLLERS = {"gloo": "use_gloo", "mpi": "use_mpi"}


def parse(
    parser: argparse.ArgumentParser, argv: Sequence[str], environ: Mapping[str, str]
) -> tuple[argparse.Namespace, Options]:
    """Parse a command line, by a parser of `build_parser`, and its config file. Raises ValueError for invalid values.

    The namespace, which Horovod's callers use, has one attribute per option, None if not given; the options come from
    it and `environ`. Bad flags end the process with argparse's status 2.
    """
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if args.config_file is not None:
        for name, value in read_config_file(args.config_file).items():
            chosen = name in _CONTROLLERS.values() and (args.use_gloo or args.use_mpi or args.use_jsrun)
            if getattr(args, name) is None and not chosen:
                setattr(args, name, value)
    options = Options.from_args(args, environ)
    if args.num_proc is None and not options.joins and not lsf.in_job(environ):
        parser.error("-np is missing: say how many processes to start, for example -np 2")
    return args, options


def build_parser(
    prog: str,
    summary: str,
    examples: Sequence[str],
    *,
    on_version: Callable[[], str],
    on_check_build: Callable[[], str],
) -> argparse.ArgumentParser:
    """Return a parser with an argument for every flag, and the command as the rest. Its help begins with the summary,
    one sentence, and the examples; `--version` and `--check-build` print what their function returns and end with 0.
    """
    parser = Parser(
        prog=prog,
        usage=f"{prog} -np N [options] command [args ...]",
        description=f"{summary}\n\nexamples:\n" + "\n".join(f"  {example}" for example in examples),
        epilog="The variable HORA_SSH replaces the ssh command, options included: HORA_SSH='ssh -J gate'.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=_Print, text=lambda: _short_help(parser), help="show common options")
    parser.add_argument("--help-all", action=_Print, text=parser.format_help, help="show every option and exit")
    parser.add_argument("-v", "--version", action=_Print, text=on_version, help="print the version and exit")
    parser.add_argument(
        "-cb", "--check-build", action=_Print, text=on_check_build, help="print what works here and exit"
    )
    sections = {key: parser.add_argument_group(title) for key, title in _SECTIONS.items()}
    groups: dict[str, Any] = {}
    for dest, option in all_options().items():
        section = sections["idle" if option.idle else option.section]
        if option.exclusive and option.exclusive not in groups:
            groups[option.exclusive] = section.add_mutually_exclusive_group()
        _add_option(groups.get(option.exclusive, section), dest, option)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    return parser


def _short_help(parser: argparse.ArgumentParser) -> str:
    """Return the help with the common options alone."""
    formatter = parser._get_formatter()
    formatter.add_usage(parser.usage, (), ())
    formatter.add_text(parser.description)
    for group in parser._action_groups:
        formatter.start_section(group.title)
        shown = [action for action in group._group_actions if action.dest in _COMMON]
        formatter.add_arguments([action for action in shown if action.help != argparse.SUPPRESS])
        formatter.end_section()
    formatter.add_text(f"{parser.prog} --help-all shows all {len(all_options())} options.")
    return formatter.format_help().rstrip()


def _add_option(group: Any, dest: str, option: Option) -> None:
    text = _help_text(option) or argparse.SUPPRESS
    if option.kind is bool:
        group.add_argument(*option.flags, dest=dest, action="store_const", const=True, help=text)
        for flag in option.off_flags:
            group.add_argument(flag, dest=dest, action="store_const", const=False, help=argparse.SUPPRESS)
        for flag, value in option.old_flags:
            group.add_argument(
                flag, dest=dest, action=_OldSwitch, value=value, instead=option.name, help=argparse.SUPPRESS
            )
    elif option.kind is frozenset:
        group.add_argument(*option.flags, dest=dest, action=_Union, metavar=option.metavar, help=text)
        group.add_argument("--network-interface", dest=dest, action=_Union, single=True, help=argparse.SUPPRESS)
    else:
        # Converts the type only, for argparse's own message and status; `Options` checks ranges.
        kind = str.upper if option.choices else option.kind
        metavar = option.metavar or "N"
        group.add_argument(*option.flags, dest=dest, type=kind, nargs=option.count, metavar=metavar, help=text)


def _help_text(option: Option) -> str:
    if option.idle:
        return option.idle
    if option.help is None:
        return ""
    text = option.help
    if option.off_flags:
        text += f"; {option.off_flags[0]} reverses it"
    if option.launch_variable:
        text += f" (default: {option.launch_variable}{'' if option.default is None else f' or {option.default}'})"
    elif option.default is not None:
        text += f" (default: {option.default})"
    return text.replace("%", "%%")


class _Print(argparse.Action):
    def __init__(self, *, text: Callable[[], str], **rest: Any) -> None:
        super().__init__(nargs=0, default=argparse.SUPPRESS, **{**rest, "dest": argparse.SUPPRESS})
        self._text = text

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(self._text(), flush=True)
        parser.exit(0)


class _OldSwitch(argparse.Action):
    def __init__(self, *, value: bool, instead: str, **rest: Any) -> None:
        super().__init__(nargs=0, **rest)
        self._value, self._instead = value, instead

    def __call__(self, _parser: Any, args: argparse.Namespace, _values: Any, flag: str | None = None) -> None:
        warnings.warn(f"{flag} is deprecated, use {self._instead}", DeprecationWarning, stacklevel=2)
        setattr(args, self.dest, self._value)


class _Union(argparse.Action):
    """Collects names from every occurrence into one set. `single`: a comma list is deprecated there."""

    def __init__(self, *, single: bool = False, **rest: Any) -> None:
        super().__init__(**rest)
        self._single = single

    def __call__(self, _parser: Any, args: argparse.Namespace, values: Any, flag: str | None = None) -> None:
        if self._single and "," in values:
            message = f"a comma list after {flag} is deprecated, use --network-interfaces"
            warnings.warn(message, DeprecationWarning, stacklevel=2)
        names = {name.strip() for name in values.split(",") if name.strip()}
        if not names:
            raise argparse.ArgumentError(self, f"names no interface: {values!r}")
        setattr(args, self.dest, (getattr(args, self.dest) or set()) | names)


def read_config_file(path: str) -> dict[str, Any]:
    """Return the checked options of a YAML file, by field name. ValueError names the invalid key."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read the config file {path!r}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the config file {path!r} is not YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ValueError(f"the config file {path!r} must hold `section: ...` lines, but it is {content!r}")
    values: dict[str, Any] = {}
    for name, option in all_options().items():
        section, _, key = option.yaml.partition(".")
        where = f"{section}.{key} in {path!r}"
        entries = content.get(section) if section else None
        if entries is None:
            continue
        if not isinstance(entries, dict):
            raise ValueError(f"{section} in {path!r} must hold `key: value` lines, but it is {entries!r}")
        if entries.get(key) is not None:
            value = check(option, entries[key], where=where)
            values[name] = not value if option.yaml_negated else value
    _check_keys(path, content)
    controller = content.get("controller")
    if controller is not None:
        if not isinstance(controller, str) or controller not in _CONTROLLERS:
            raise ValueError(f"controller in {path!r} must be gloo or mpi, but it is {controller!r}")
        values[_CONTROLLERS[controller]] = True
    return values


def _check_keys(path: str, content: Mapping[Any, Any]) -> None:
    """Warn of misspelt entries of a config file. Others that have no effect are Horovod's."""
    keys = [option.yaml for option in all_options().values() if option.yaml]
    sections = {key.partition(".")[0] for key in keys} | {"controller"}
    for section, entries in content.items():
        if section not in sections:
            _warn_of_key(path, str(section), sections)
        elif isinstance(entries, dict):
            for key in entries:
                if f"{section}.{key}" not in keys:
                    _warn_of_key(path, f"{section}.{key}", keys)


def _warn_of_key(path: str, key: str, known: Iterable[str]) -> None:
    hint = did_you_mean(key, known, cutoff=0.8)
    if hint:
        warnings.warn(f"{key} in the config file {path!r} has no effect{hint}", stacklevel=5)
