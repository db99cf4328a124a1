"""The command `hora workers`: the worker functions for a shell, on a persistent session.

hora workers launch -n 2 --cpu 1 --memory 2 --code 'print("hello")'
hora workers list
hora workers await [ID …]
hora workers logs ID
hora workers stop [ID …]
hora workers end
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from hora.spelling import Parser
from hora.workers import api, daemon, gateway


def main(argv: Sequence[str]) -> int | None:
    options = make_parser().parse_args(list(argv))
    status: int | None = options.act(options)
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hora workers", description="Launch, list, await and stop workers, which outlive this command."
    )
    parser.add_argument("--json", action="store_true", help="print the worker dicts instead of a table")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    launch = _action(actions, "launch", _launch, "start workers")
    add = launch.add_argument
    add("-n", type=int, default=1, help="number of workers (default: 1)")
    add("--cpu", type=float, default=1.0, help="cores per worker (default: 1)")
    add("--memory", type=float, default=2.0, help="GiB per worker (default: 2)")
    add("--gpus", dest="nvidia_gpu", metavar="GPUS", type=int, default=0, help="GPUs per worker (default: 0)")
    what = launch.add_mutually_exclusive_group(required=True)
    what.add_argument("--code", default="", help="Python text; lines that begin with ! are shell commands")
    what.add_argument("--script", default="", help="a Python file")
    about = "an environment variable of the workers; repeatable"
    add("--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help=about)
    add("--all-or-nothing", action="store_true", help="start all workers or none")
    add("--strict", action="store_true", help="reject requests for more cores than are free")
    about = "with --all-or-nothing: time limit for enough room"
    add("--wait", dest="wait_seconds", type=float, default=0.0, metavar="SECONDS", help=about)
    add("--name", default="", help="a name for the workers")
    add("--log-dir", default="", help="also write each worker's output to a file in this folder")
    _action(actions, "list", _list, "all workers of this folder's session")
    wait = _action(actions, "await", _await, "wait until workers have ended, or run", ids=True)
    wait.add_argument("--running", action="store_true", help="wait until the workers run, not until they end")
    wait.add_argument("--timeout", type=float, default=60.0, help="seconds; 0 waits for ever (default: 60)")
    _action(actions, "logs", _logs, "the end of a worker's output", ids=True)
    _action(actions, "stop", _stop, "end workers; without ids, all of them", ids=True)
    _action(actions, "end", _end, "end the session and all its workers")
    return parser


def _action(actions: Any, name: str, act: Any, summary: str, *, ids: bool = False) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(name, help=summary, description=summary)
    parser.set_defaults(act=act)
    if ids:
        parser.add_argument("ids", nargs="*", metavar="ID")
    return parser


def _variable(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not name or not found:
        raise argparse.ArgumentTypeError(f"it must be NAME=VALUE, but it is {text!r}")
    return name, value


def _show(options: argparse.Namespace, workers: list[dict[str, Any]]) -> None:
    if options.json:
        print(json.dumps(workers, indent=2))
        return
    for worker in workers:
        identity = worker.get("id", worker.get("engineId", "?"))
        columns = [identity, worker.get("status", "refused"), worker.get("ip_address", "-"), worker.get("name", "")]
        note = worker.get("message") or ""
        if worker.get("exit_code"):
            note = f"exit code {worker['exit_code']} {note}"
        print(f"{columns[0]:16}  {columns[1]:10}  {columns[2]:14}  {columns[3]:12}  {note}".rstrip())


def _launch(options: argparse.Namespace) -> int:
    is_first = not _has_session()
    daemon.start(os.getcwd())
    workers: list[dict[str, Any]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the table shows refused workers
            request = {name: value for name, value in vars(options).items() if name not in ("act", "json")}
            workers = api.launch_workers(**request | {"env": dict(options.env)})
        _show(options, workers)
    finally:
        if is_first and not any("id" in worker for worker in workers):
            daemon.end(os.getcwd())
    return 0 if all("id" in worker for worker in workers) else 1


def _list(options: argparse.Namespace) -> None:
    _show(options, api.list_workers() if _has_session() else [])


def _has_session() -> bool:
    return bool(gateway.find(os.getcwd()) or gateway.find(os.getcwd(), "script"))


def _require_session() -> None:
    if not _has_session():
        raise ValueError(f"no workers were launched in {os.getcwd()}; use `hora workers launch`")


def _chosen(options: argparse.Namespace) -> list[str]:
    _require_session()
    return options.ids or [worker["id"] for worker in api.list_workers()]


def _await(options: argparse.Namespace) -> int:
    result = api.await_workers(_chosen(options), not options.running, options.timeout)
    _show(options, [*result["workers"], *result["failures"]])
    return 1 if result["failures"] else 0


def _logs(options: argparse.Namespace) -> None:
    for worker in _chosen(options):
        sys.stdout.write(api.worker_output(worker))


def _stop(options: argparse.Namespace) -> None:
    _require_session()
    responses = api.stop_workers(*options.ids) or []
    unknown = [response.id for response in responses if not response.ok]
    if unknown:
        raise ValueError(f"no such workers: {', '.join(unknown)}; see `hora workers list`")
    print(f"stopped {len(responses)}")


def _end(options: argparse.Namespace) -> None:
    print("ended" if daemon.end(os.getcwd()) else "there was no session")
