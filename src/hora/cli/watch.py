"""`hora view`, `hora top`, `hora compare`: a recorded run in the browser, a live one in the terminal, two compared."""

from __future__ import annotations

import argparse
import getpass
import sys
from collections.abc import Sequence

from hora.spelling import Parser


def make_view_parser() -> argparse.ArgumentParser:
    """Return the parser of `hora view`."""
    about = "Show a recorded run, or a timeline, in the browser."
    parser = Parser(prog="hora view", description=about)
    about = "a file of `hora run --record` or `--timeline-filename`, or run.hora of a downloaded bundle"
    parser.add_argument("file", help=about)
    about = "where to listen (default: loopback, a free port)"
    parser.add_argument("--listen", default="", metavar="HOST:PORT", help=about)
    parser.add_argument("--open", action="store_true", help="open the browser")
    return parser


def view(argv: Sequence[str]) -> None:
    """Run `hora view FILE`."""
    arguments = make_view_parser().parse_args(argv)
    from hora.watch.address import show_in_browser
    from hora.watch.replay import open_recording

    server, page = open_recording(arguments.file, listen=arguments.listen)
    print(f"{page.title}: {page.full_url}\nCtrl-C ends it.", flush=True)
    if arguments.open:
        show_in_browser(page)
    try:
        server.join()
    except KeyboardInterrupt:
        server.close()


def _ask_token() -> str:
    """Read the page's token, which other users of the machine must not see among this command's arguments."""
    if not sys.stdin.isatty():
        return sys.stdin.readline().strip()
    return getpass.getpass("the token (the end of the address, after #token=): ").strip()


def make_top_parser() -> argparse.ArgumentParser:
    """Return the parser of `hora top`."""
    parser = Parser(prog="hora top", description="Show a running job in the terminal.")
    parser.add_argument(
        "url", nargs="?", help="the page's address without its token, for which it asks (default: your newest job)"
    )
    parser.add_argument("--once", action="store_true", help="print one screen and exit")
    about = "only print the page's address, with its token"
    parser.add_argument("--url", dest="print_url", action="store_true", help=about)
    return parser


def top(argv: Sequence[str]) -> None:
    """Run `hora top`."""
    arguments = make_top_parser().parse_args(argv)
    from hora.watch.address import choose_page

    page = choose_page(arguments.url, ask_token=_ask_token)
    if arguments.print_url:
        print(page.full_url)
        return
    try:
        from hora.watch.terminal import show

        show(page, once=arguments.once)
    except ModuleNotFoundError as error:
        raise RuntimeError(f"it draws with rich: pip install {error.name}") from None
    except KeyboardInterrupt:
        return


def make_compare_parser() -> argparse.ArgumentParser:
    """Return the parser of `hora compare`."""
    parser = Parser(
        prog="hora compare", description="Compare two runs, phase by phase: what changed, and whether it is noise."
    )
    about = "a recording of `hora run --record`, or a verdict.json"
    parser.add_argument("before", metavar="RUN", help=about)
    parser.add_argument("after", metavar="RUN", help="the run to compare with it")
    about = "exit with status 1 if a step takes more than this longer, for example 5%%, and it is not noise"
    parser.add_argument("--max-step-time-regression", type=_share, metavar="SHARE", help=about)
    about = "compare runs that reduce different numbers of bytes in a step"
    parser.add_argument("--other-model", action="store_true", help=about)
    return parser


def _share(text: str) -> float:
    """Parse "5%" or "0.05"."""
    try:
        value = float(text.removesuffix("%")) / (100.0 if text.endswith("%") else 1.0)
    except ValueError:
        value = -1.0
    if not 0.0 <= value < 100.0:
        raise argparse.ArgumentTypeError(f"{text!r} is no share; write 5% or 0.05")
    return value


def compare(argv: Sequence[str]) -> int:
    """Run `hora compare RUN RUN`."""
    arguments = make_compare_parser().parse_args(argv)
    from hora.watch.compare import compare_runs, load_verdict, regression, table

    before, after = load_verdict(arguments.before), load_verdict(arguments.after)
    changes = compare_runs(before, after, other_model=arguments.other_model)
    print(table(before, after, changes))
    if arguments.max_step_time_regression is None:
        return 0
    found = regression(changes, arguments.max_step_time_regression)
    if found is not None:
        print(f"hora compare: {found}", file=sys.stderr)
    return int(found is not None)
