"""Tests that run *inside* rank processes.

    pytestmark = pytest.mark.ranks(1, 2, 3, 4)          # every test of the module, in worlds of these sizes
    @pytest.mark.ranks(3, lost=(1,))                    # rank 1 is expected to die; the pool is then thrown away
    @pytest.mark.ranks(2, env={"HORA_TRANSPORT": "gloo"})

The test function itself is called on every rank at the same time. Pools of ranks are kept for the whole session, one per
world size and environment, so a test costs milliseconds; a test that calls `hvd.init()` must leave the runtime shut down.
"""

from __future__ import annotations

import pytest
from rank_processes import Pools

_pools = Pools()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None:
        metafunc.fixturenames.append("num_ranks")
        metafunc.parametrize("num_ranks", marker.args, ids=[f"np{size}" for size in marker.args], indirect=True)


@pytest.fixture
def num_ranks(request: pytest.FixtureRequest) -> int:
    return request.param


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    marker = pyfuncitem.get_closest_marker("ranks")
    if marker is None:
        return None
    size = pyfuncitem.callspec.params["num_ranks"]
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names if name != "num_ranks"}
    lost = tuple(marker.kwargs.get("lost", ()))
    answers = _pools.call(
        size,
        marker.kwargs.get("env", {}),
        lost,
        pyfuncitem.module.__name__,
        pyfuncitem.originalname,
        arguments,
    )
    failures = [
        f"rank {rank} of {size}: {status}\n{text}"
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
