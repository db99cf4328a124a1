"""`hora demo faults`: a training on this machine that continues while you kill its ranks on the live page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from functools import partial


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    given = make_parser().parse_args(argv)
    if given.np < 2 or given.steps < 1:
        make_parser().error(f"-np must be at least 2 and --steps at least 1, but they are {given.np} and {given.steps}")
    from hora.labs.faults.training import train
    from hora.launch.job import Watching
    from hora.launch.options import Options
    from hora.launch.pickling import pickle_call
    from hora.launch.processes import variables
    from hora.launch.start import start

    watching = Watching(page=True, browser=not given.no_browser, record=given.record, demo=True)
    # Without grace a removed rank gets SIGKILL at once, which is the point of the demo.
    adjust = partial(replace, title="hora demo faults", watching=watching, grace_s=0.0)
    print("Kill ranks on the page; the training goes on. Ctrl-C ends it.", flush=True)
    environ = variables()
    options = Options.filled(environ, num_proc=given.np, min_num_proc=1, max_num_proc=given.np)
    start(options, environ, function=pickle_call(train, (given.steps,)), adjust=adjust)
    return 0


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hora demo faults",
        description="Train on this machine and kill ranks on the live page, while the training goes on.",
    )
    parser.add_argument("-np", "--np", type=int, default=4, metavar="N", help="number of ranks (default: 4)")
    parser.add_argument("--steps", type=int, default=20_000, help="number of steps (default: 20000)")
    parser.add_argument("--no-browser", action="store_true", help="only print the page's address")
    parser.add_argument("--record", metavar="FILE", help="record the run for `hora view FILE`")
    return parser
