"""Translate a command line of `mpirun` (Open MPI's, with additions of MPICH, Intel and HPE) into a job. Pure.

Supported: processes, hosts, variables, directory, output, network interface, ssh options. Options that tune MPI's
transports are dropped; all other ignored options are listed in `left_out`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from hora.launch.slots import HostInfo, parse_host_files, slots_by_host

_T = TypeVar("_T")


def _each(names: str, value: _T) -> dict[str, _T]:
    return dict.fromkeys(names.split(), value)


_HOST = re.compile(r"(?!-)[\w.-]+(?::[0-9]+)?")
_INTERFACES = ("btl_tcp_if_include", "oob_tcp_if_include")
_HOSTFILES = ("orte_default_hostfile", "prte_default_hostfile")


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
        return _place(merged, num_proc, by_node=self.by_node)


def _place(slots: Mapping[str, int], num_proc: int, *, by_node: bool) -> list[str]:
    order = [name for name, count in slots.items() for _ in range(count)]
    if by_node:
        most = max(slots.values(), default=0)
        order = [name for turn in range(most) for name, count in slots.items() if turn < count]
    while order and len(order) < num_proc:  # oversubscribed: start another round
        order += order
    taken = order[:num_proc]
    return taken if by_node else sorted(taken, key=list(slots).index)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> MpiCommand:
    """Parse the words after `mpirun`. ValueError names an unknown option or an invalid value."""
    parsed = MpiCommand()
    parameters: dict[str, str] = {}
    words = list(argv)
    while words and words[0].startswith("-") and len(words[0]) > 1:
        flag, name, values = _take_option(words)
        if name in ("mca", "gmca", "prtemca", "pmixmca"):
            parameters[values[0]] = values[1]
        elif (meaning := _OPTIONS[name][1]) is None:
            parsed.left_out.append(" ".join([flag, *values]))
        elif isinstance(meaning, str):
            setattr(parsed, meaning, values[0] if values else True)
        else:
            meaning(parsed, *values)
    if ":" in words:
        raise ValueError("several programs in one line, separated by `:`, cannot be started; start one program")
    parsed.command = tuple(words)
    set_by_variables = {name[9:]: value for name, value in environ.items() if name[:9] in ("OMPI_MCA_", "PRTE_MCA_")}
    _take_parameters(parsed, set_by_variables | parameters)
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
    for key in _HOSTFILES:
        if key in parameters and not parsed.hosts:
            _hostfile(parsed, parameters[key])
    for key in _INTERFACES:
        parsed.interface = parsed.interface or parameters.get(key)
    parsed.ssh_options = parameters.get("plm_rsh_args", parsed.ssh_options)
    parsed.ssh_program = parameters.get("plm_rsh_agent", parameters.get("orte_rsh_agent", parsed.ssh_program))
    if parameters.get("orte_abort_on_non_zero_status") == "0":
        parsed.left_out.append("-mca orte_abort_on_non_zero_status 0 (the first failure ends the job)")
    for key in ("btl_tcp_if_exclude", "oob_tcp_if_exclude"):
        if key in parameters:
            parsed.left_out.append(f"-mca {key} {parameters[key]}")


# ---- what each option means --------------------------------------------------------------------------------------


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


# The number of values of every option must be known, because the first other word is the program. A name: of the
# attribute that has the value, or True. None: the option is left out, and named.
_OPTIONS: dict[str, tuple[int, Callable[..., None] | str | None]] = {
    **_each("np n c", (1, _counts("num_proc", "-np"))),
    **_each("H host hosts", (1, _hosts)),
    **_each("hostfile machinefile default-hostfile f", (1, _hostfile)),
    **_each("x env", (1, _variable)),
    "genv": (2, lambda parsed, name, value: parsed.set_variables.update({name: value})),
    **_each("genvlist envlist", (1, lambda parsed, names: parsed.passed_variables.extend(names.split(",")))),
    "map-by": (1, _map_by),
    "rank-by": (1, _rank_by),
    **_each("ppn perhost N npernode", (1, _counts("per_host", "the number of processes of each host"))),
    "bind-to": (1, _bind_to),
    "timeout": (1, _counts("limit_s", "--timeout")),
    **_each("wdir wd", (1, "directory")),
    "output-filename": (1, "output_directory"),
    "iface": (1, "interface"),
    "bootstrap-exec-args": (1, "ssh_options"),
    **_each("tag-output l prepend-rank", (0, "tagged")),
    "timestamp-output": (0, "timestamped"),
    "merge-stderr-to-stdout": (0, "merged"),
    "oversubscribe": (0, "oversubscribe"),
    **_each("report-bindings display-map display-allocation v verbose", (0, "verbose")),
    **_each("version V", (0, "version")),
    **_each("mca gmca prtemca pmixmca", (2, None)),  # parameters, see above
    **_each("prefix path launcher bootstrap", (1, "ignored")),
    **_each("allow-run-as-root noprefix nooversubscribe genvall envall quiet q", (0, "ignored")),
    **_each("outfile-pattern errfile-pattern cpu-bind depth d", (1, None)),
}
