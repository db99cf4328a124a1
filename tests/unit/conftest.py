"""Tests of this folder start no process: one that does fails.

Property tests have no deadline. The log is as imported.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# How long an example takes says how busy the machine is, nothing about the code.
hypothesis.settings.register_profile("hora", deadline=None)
hypothesis.settings.load_profile("hora")

# Programs that other packages start: Matplotlib lists fonts at its first import, h5py asks for the kind of machine.
_BY_OTHERS = ("fc-list", "uname")
_STARTS = frozenset(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"))
_in_a_test = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and _in_a_test and str(arguments[0]).rpartition("/")[2] not in _BY_OTHERS:
        raise RuntimeError(f"{event}: a test in tests/unit starts a process; it belongs to multiproc or integration")


sys.addaudithook(_refuse)  # there is no way to take it back: it looks at the flag


@pytest.fixture(autouse=True)
def _no_process() -> Iterator[None]:
    global _in_a_test
    _in_a_test = True
    yield
    _in_a_test = False


@pytest.fixture(autouse=True)
def _log_as_imported() -> Iterator[None]:
    """Another test of this process may have initialised the engine, whose logger then propagates no more."""
    logger = logging.getLogger("hora")
    before = list(logger.handlers), logger.level, logger.propagate
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
