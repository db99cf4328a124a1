"""Run several test processes at a time: most tests wait, and a machine has at least two cores.

Tests that share an expensive resource (the Spark cluster, a file's fixtures) run in one process. Tests with real
processes, signals and networks may be repeated on a noisy machine (`--reruns`); those of tests/unit never.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_SPARK = {"spark", "spark_cluster"}
_UNIT = Path(__file__).parent / "unit"
# Tests with their own make target run only if -m or the file's path names them.
_OWN_TARGETS = {"containers", "hosts", "protected_spark"}

# nohup and scripts in the background ignore these signals, and launchers keep that; but tests send them.
for _number, _action in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=2_000, help="how many random inputs each fuzzing test tries")
    parser.addoption("--seeds", type=int, default=250, help="how many simulated jobs to play")
    parser.addoption("--seed", type=int, default=None, help="the one simulated job to play again")


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[tuple[str, random.Random]]:
    """Yield the name of each random input of a fuzzing test, for messages, and a generator seeded with it."""
    names = (f"case {number} of {request.node.name}" for number in range(request.config.getoption("--cases")))
    return ((name, random.Random(name)) for name in names)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = config.getoption("-m") or ""
    named = {Path(argument.partition("::")[0]).resolve() for argument in config.args}
    wanted, left = [], []
    for item in items:
        own = {mark.name for mark in item.iter_markers()} & _OWN_TARGETS
        (wanted if item.path in named or not any(name not in asked for name in own) else left).append(item)
    if left:
        config.hook.pytest_deselected(items=left)
        items[:] = wanted
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            file = f"{item.path.parent.name}/{item.path.stem}"
            shared = "spark" if _SPARK & set(getattr(item, "fixturenames", ())) else file
            item.add_marker(pytest.mark.xdist_group(shared))
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if _UNIT in item.path.parents:
                item.add_marker(pytest.mark.flaky(reruns=0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print a table of skipped tests with reasons; append reruns, which are flaky tests, to out/reruns.txt."""
    reasons = Counter(
        str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr).removeprefix("Skipped: ")
        for report in terminalreporter.stats.get("skipped", [])
    )
    if reasons:
        terminalreporter.section("skipped, and why")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5}  {reason}")
    reruns = terminalreporter.stats.get("rerun", [])
    if reruns:
        path = terminalreporter.config.rootpath / "out" / "reruns.txt"
        path.parent.mkdir(exist_ok=True)
        with path.open("a") as file:
            for report in reruns:
                lines = report.longreprtext.splitlines() or [""]
                cause = next((line[1:].strip() for line in lines if line.startswith("E  ")), lines[-1])
                file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')}\t{report.nodeid}\t{cause}\n")
        terminalreporter.section("reruns")
        terminalreporter.write_line(f"{len(reruns)} written to {path}: each is a flaky test to fix")
