"""The command line and the config file of a launch, both made from the fields of `Options`.

Not here: what an option is called or may be (`options`), what a launch does (`start`). Called by `horovodrun` and
`hora run`. Flags win over the file wherever they stand; its unknown keys are ignored.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hora.launch.options import Option, Options, all_options, check

__all__ = ["About", "build_parser", "parse", "read_config_file"]

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
    "idle": "options of Horovod's without effect here, accepted",
}
# The options that most people use: those of the short help.
_COMMON = (
    *("num_proc", "dashboard", "record", "output_filename", "verbose", "hosts", "hostfile", "ssh_port"),
    *("min_num_proc", "max_num_proc", "host_discovery_script"),
)
_CONTROLLERS = {"gloo": "use_gloo", "mpi": "use_mpi"}


@dataclass(frozen=True)
class About:
    """A command's help: one sentence, and examples of its use."""

    summary: str
    examples: tuple[str, ...]


def parse(
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    prog: str,
    on_version: Callable[[], str],
    on_check_build: Callable[[], str],
    about: About,
) -> tuple[argparse.Namespace, Options]:
    """Reads a command line and the config file it names; ValueError for invalid values.

    The namespace, which Horovod's callers know, has one attribute an option, None where nothing was given; the options
    are made of it and `environ`. Bad flags end the process with argparse's status 2; `--version` and `--check-build`
    print what their function returns and end it with 0.
    """
    parser = build_parser(prog=prog, on_version=on_version, on_check_build=on_check_build, about=about)
    args = parser.parse_args(argv)
    if args.command[:1] == ["--"]:
        del args.command[0]
    if args.config_file is not None:
        for name, value in read_config_file(args.config_file).items():
            chosen = name in _CONTROLLERS.values() and (args.use_gloo or args.use_mpi or args.use_jsrun)
            if getattr(args, name) is None and not chosen:
                setattr(args, name, value)
    options = Options.from_args(args, environ)
    if args.num_proc is None and not options.joins and not environ.get("LSB_JOBID"):
        parser.error("-np is missing: say how many processes to start, for example -np 2")
    return args, options


def build_parser(
    *, prog: str, on_version: Callable[[], str], on_check_build: Callable[[], str], about: About
) -> argparse.ArgumentParser:
    """A parser with one argument for every flag of every option, and the command as the rest."""
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} -np N [options] command [args ...]",
        description=f"{about.summary}\n\nexamples:\n" + "\n".join(f"  {example}" for example in about.examples),
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
    exclusives: dict[str, Any] = {}
    for dest, option in all_options().items():
        group: Any = sections["idle" if option.idle else option.section]
        if option.exclusive:
            if option.exclusive not in exclusives:
                exclusives[option.exclusive] = group.add_mutually_exclusive_group()
            group = exclusives[option.exclusive]
        _add_option(group, dest, option)
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
        metavar = option.metavar or "N"
        group.add_argument(
            *option.flags, dest=dest, type=_typed(option), nargs=option.count, metavar=metavar, help=text
        )


def _help_text(option: Option) -> str:
    if option.idle:
        return option.idle
    if option.help is None:
        return ""
    text = option.help
    if option.off_flags:
        text += f"; {option.off_flags[0]} says the opposite"
    if option.launch_variable:
        text += f" (default: {option.launch_variable}{'' if option.default is None else f' or {option.default}'})"
    elif option.default is not None:
        text += f" (default: {option.default})"
    return text.replace("%", "%%")


def _typed(option: Option) -> Callable[[str], Any]:
    """The type alone, for argparse's own message and status; ranges are checked with the whole `Options`."""
    if option.kind is str:
        return str.upper if option.choices else str

    def convert(text: str) -> Any:
        return option.kind(text)

    convert.__name__ = option.kind.__name__
    return convert


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
    """The options that a YAML file sets, by field name, checked. ValueError says which key is wrong."""
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
    controller = content.get("controller")
    if controller is not None:
        if not isinstance(controller, str) or controller not in _CONTROLLERS:
            raise ValueError(f"controller in {path!r} must be gloo or mpi, but it is {controller!r}")
        values[_CONTROLLERS[controller]] = True
    return values
