"""The `horovodrun` command."""

from hora.cli.run import horovodrun as run_commandline
from hora.cli.run import parse_args
from hora.cli.run import run as _run

__all__ = ["parse_args", "run_commandline"]

if __name__ == "__main__":
    raise SystemExit(run_commandline())
