"""The `horovodrun` command."""

from hora.cli.run import horovodrun as run_commandline
from hora.cli.run import parse_args
from hora.cli.run import run as _run
from hora.cli.run import run as _run_elastic
from hora.legacy.check_build import print_build as check_build
from hora.legacy.util import gloo_built, is_gloo_used

__all__ = ["check_build", "gloo_built", "is_gloo_used", "parse_args", "run_commandline"]

if __name__ == "__main__":
    raise SystemExit(run_commandline())
