"""Several test processes at a time: most tests wait for something, and a machine has at least two cores.

Tests that share something expensive (the Spark cluster, a file's fixtures) stay in one process. Tests with real
processes, signals and networks may get a second chance on a noisy machine (`--reruns`); those of tests/unit never.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

_SPARK = {"spark", "spark_cluster"}
_UNIT = Path(__file__).parent / "unit"

# Under nohup, or in the background of a script, they are ignored, and launchers rightly keep it that way. Tests send them.
for _number, _action in ((signal.SIGHUP, signal.SIG_DFL), (signal.SIGINT, signal.default_int_handler)):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, _action)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cases", type=int, default=2_000, help="how many random inputs each fuzzing test tries")
    parser.addoption("--seeds", type=int, default=500, help="how many simulated jobs to play")
    parser.addoption("--seed", type=int, default=None, help="the one simulated job to play again")


@pytest.fixture
def cases(request: pytest.FixtureRequest) -> Iterator[tuple[str, random.Random]]:
    """Random inputs for a fuzzing test: each one's name, for messages, and a source of randomness that depends on it."""
    names = (f"case {number} of {request.node.name}" for number in range(request.config.getoption("--cases")))
    return ((name, random.Random(name)) for name in names)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            file = f"{item.path.parent.name}/{item.path.stem}"
            shared = "spark" if _SPARK & set(getattr(item, "fixturenames", ())) else file
            item.add_marker(pytest.mark.xdist_group(shared))
    if config.pluginmanager.hasplugin("rerunfailures"):
        for item in items:
            if _UNIT in item.path.parents:
                item.add_marker(pytest.mark.flaky(reruns=0))
