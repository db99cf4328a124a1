"""Tests that run *inside* rank processes.

    pytestmark = pytest.mark.ranks(1, 2, 3, 4)          # every test of the module, in worlds of these sizes
    @pytest.mark.ranks(2, 4, slow=(4,))                 # a world of four only with `make test-slow`
    @pytest.mark.ranks(3, lost=(1,))                    # rank 1 is expected to die; the pool is discarded afterwards
    @pytest.mark.ranks(2, env={"HORA_TRANSPORT": "tcp"})
    @pytest.mark.over_network                           # again on three ranks, as if each had its own host
    @pytest.mark.both_ways                              # again without the native part

The test function runs on every rank at the same time. Pools of ranks live for the whole session, one
per world size and environment, so a test costs milliseconds; a test that calls `hvd.init()` must shut the runtime
down. A test below the engine takes the parameter `place`: its rank, the size, a store, and a gather between ranks.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
from rank_pool import Pools

_pools = Pools()


class World(NamedTuple):
    """The size and the environment of a test's world."""

    size: int
    env: dict[str, str]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is None:
        return
    worlds = {f"np{size}": World(size, marker.kwargs.get("env", {})) for size in marker.args}
    if metafunc.definition.get_closest_marker("over_network") is not None:
        worlds["np3-tcp"] = World(3, {"HORA_TRANSPORT": "tcp"})
    if metafunc.definition.get_closest_marker("both_ways") is not None:
        size = 3 if 3 in marker.args else max(marker.args)
        worlds[f"np{size}-python"] = World(size, {**marker.kwargs.get("env", {}), "HORA_NATIVE": "0"})
    metafunc.fixturenames.append("world")
    slow = {f"np{size}" for size in marker.kwargs.get("slow", ())}
    marks = {name: [pytest.mark.slow] if name in slow else [] for name in worlds}
    values = [pytest.param(world, id=name, marks=marks[name]) for name, world in worlds.items()]
    metafunc.parametrize("world", values, indirect=True)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> World:
    return request.param


@pytest.fixture
def place() -> None:
    """Replaced on each rank by a `rank_pool.Place`."""


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    world = pyfuncitem.callspec.params["world"]
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name not in ("world", "place")}
    lost = tuple(marker.kwargs.get("lost", ()))
    answers = _pools.call(world.size, world.env, lost, pyfuncitem.module.__name__, pyfuncitem.originalname, arguments)
    failures = [
        f"rank {rank} of {world.size}: {status}\n{text}"
        for rank, (status, text) in enumerate(answers)
        if status not in ("ok", "skip")
    ]
    if failures:
        pytest.fail("\n".join(failures), pytrace=False)
    if any(status == "skip" for status, _ in answers):
        pytest.skip(answers[0][1])
    return True


def pytest_sessionfinish() -> None:
    _pools.close()
