"""The command `hora`: a table of subcommands, each imported only when it is called.

This module only dispatches, so `hora --help` needs neither torch nor pyspark. To add a subcommand, or a lab of `hora
demo`, add a line to its table: its function takes the remaining arguments and returns an exit status (None is 0) or
raises an error that `exit_status_of` knows.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hora.cli.exit_status import exit_status_of
from hora.cli.run import check_build
from hora.spelling import did_you_mean


@dataclass(frozen=True)
class Command:
    """A subcommand."""

    target: str  # module:function
    summary: str  # one line of help
    parser: str = "make_parser"  # the function of that module that creates its argparse parser; empty if it has none

    def __call__(self, argv: Sequence[str]) -> int | None:
        module, _, function = self.target.partition(":")
        status: int | None = getattr(importlib.import_module(module), function)(argv)
        return status

    def make_parser(self) -> argparse.ArgumentParser | None:
        """Return the command's parser; None if it takes another program's options or only selects a lab."""
        module = importlib.import_module(self.target.partition(":")[0])
        return getattr(module, self.parser)() if self.parser else None


COMMANDS = {
    "run": Command("hora.cli.run:main", "run a command as several processes: hora run -np 4 python train.py"),
    "init": Command("hora.cli.init:main", "write a training script, or make yours distributed: hora init train.py"),
    "plan": Command(
        "hora.cli.run:plan",
        "measure links between hosts, say what to send: hora plan -np 8 -H a:4,b:4 python train.py",
        "make_plan_parser",
    ),
    "mpirun": Command(
        "hora.cli.mpirun:main", "run a command line of mpirun without MPI: hora mpirun -np 2 -H a:1,b:1 …", ""
    ),
    "kubernetes": Command("hora.cli.kubernetes:main", "print a job's manifest: hora kubernetes manifest job --name …"),
    "doctor": Command(
        "hora.cli.doctor:main", "check this machine, or hosts, and say what to do: hora doctor -H a:4,b:4"
    ),
    "report-bug": Command("hora.cli.report_bug:main", "write what a bug report needs into one file, without secrets"),
    "top": Command("hora.cli.watch:top", "show a running job in the terminal: hora top", "make_top_parser"),
    "view": Command(
        "hora.cli.watch:view", "show a recorded run in the browser: hora view run.hora", "make_view_parser"
    ),
    "compare": Command(
        "hora.cli.watch:compare",
        "compare two runs, phase by phase: hora compare old.hora new.hora",
        "make_compare_parser",
    ),
    "workers": Command("hora.cli.workers:main", "launch, list and stop workers: hora workers launch -n 2"),
    "demo": Command("hora.cli.dispatch:demo", "a lab to try: hora demo faults, images or penguins", ""),
    "completion": Command("hora.cli.completion:main", "completion for a shell: hora completion bash, zsh or fish"),
}

LABS = {
    "penguins": Command(
        "hora.labs.penguins.demo:main", "three species of penguins, alone and distributed, in a minute"
    ),
    "faults": Command(
        "hora.labs.faults.demo:main", "a training whose ranks you kill on its live page, while it goes on"
    ),
    "images": Command("hora.labs.images.demo:main", "a ResNet on handwritten digits or CIFAR-10, on two ranks"),
}


def demo(argv: Sequence[str]) -> int | None:
    """Run a lab; without one, list the labs."""
    name, *rest = argv or ["--help"]
    if name not in LABS:
        print(f"usage: hora demo <lab> [arguments …]\n\n{_listed(LABS)}")
        print("\nhora demo <lab> --help shows its arguments.")
        if name in ("-h", "--help"):
            return 0
        print(f"hora: there is no lab {name!r}", file=sys.stderr)
        return 2
    return LABS[name](rest)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the console script."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    prog = f"hora {arguments[0]}" if arguments and arguments[0] in COMMANDS else "hora"
    return exit_status_of(prog, lambda: _dispatch(arguments))


def _dispatch(arguments: list[str]) -> int | None:
    if not arguments or arguments[0] in ("-h", "--help", "--help-all", "help"):
        print(_help())
        return 0
    name, rest = arguments[0], arguments[1:]
    if name in ("-v", "--version"):
        from hora.version import version

        print(f"hora {version()}")
        return 0
    if name in ("-cb", "--check-build"):
        print(check_build())
        return 0
    if name in COMMANDS:
        return COMMANDS[name](rest)
    hint = did_you_mean(name, COMMANDS) or f"; the commands are {', '.join(COMMANDS)}"
    print(f"hora: there is no command {name!r}{hint}", file=sys.stderr)
    return 2


def _help() -> str:
    return f"""usage: hora <command> [arguments ...]

examples:
  hora demo faults                              # a training here; kill its ranks on its live page
  hora init --from train.py distributed.py      # your script, with the lines that distribute it
  hora run -np 4 --dashboard python train.py    # on 4 ranks of this machine, with a live page

commands:
{_listed(COMMANDS)}

hora <command> --help shows a command's own arguments; hora --version the version;
hora --check-build what works on this machine."""


def _listed(commands: Mapping[str, Command]) -> str:
    width = max(map(len, commands))
    return "\n".join(f"  {name:<{width}}  {command.summary}" for name, command in commands.items())
