"""`hora demo faults`: a training on this machine that continues while you kill its ranks on the live page."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command."""
    options = make_parser().parse_args(argv)
    if options.np < 2 or options.steps < 1:
        make_parser().error(
            f"-np must be at least 2 and --steps at least 1, but they are {options.np} and {options.steps}"
        )
    return _run(options.np, options.steps, browser=not options.no_browser, record=options.record)


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


def _run(num_ranks: int, steps: int, *, browser: bool, record: str | None) -> int:
    from hora.labs.faults.training import train
    from hora.launch.job import Job, Watching
    from hora.launch.options import Options
    from hora.launch.pickling import pickle_call
    from hora.launch.processes import variables
    from hora.launch.start import start

    watching = Watching(page=True, browser=browser, record=record, demo=True)

    def for_the_demo(job: Job) -> Job:
        """Configure the job; a removed rank gets SIGKILL at once, which is the point of the demo."""
        return replace(job, title="hora demo faults", watching=watching, grace_s=0.0)

    print("Kill ranks on the page; the training goes on. Ctrl-C ends it.", flush=True)
    environ = variables()
    options = Options.filled(environ, num_proc=num_ranks, min_num_proc=1, max_num_proc=num_ranks)
    start(options, environ, function=pickle_call(train, (steps,)), adjust=for_the_demo)
    return 0
