"""Fail each test of this folder that starts a process.

Property tests have no deadline, and the logger is configured as after import.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

# The duration of an example depends on the load of the machine.
hypothesis.settings.register_profile("hora", deadline=None)
hypothesis.settings.load_profile("hora")

# Programs started by other packages: Matplotlib lists fonts at its first import, h5py queries the machine type.
_BY_OTHERS = ("fc-list", "uname")
_STARTS = frozenset(("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"))
_in_a_test = False


def _refuse(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS and _in_a_test and str(arguments[0]).rpartition("/")[2] not in _BY_OTHERS:
        raise RuntimeError(f"{event}: a test in tests/unit starts a process; it belongs to multiproc or integration")


sys.addaudithook(_refuse)  # audit hooks cannot be removed, so this one checks the flag


@pytest.fixture(autouse=True)
def _no_process() -> Iterator[None]:
    global _in_a_test
    _in_a_test = True
    yield
    _in_a_test = False


@pytest.fixture(autouse=True)
def _log_as_imported() -> Iterator[None]:
    """Undo the configuration of a test that initialised the engine: its logger no longer propagates."""
    logger = logging.getLogger("hora")
    before = list(logger.handlers), logger.level, logger.propagate
    logger.handlers.clear()
    logger.setLevel(logging.NOTSET)
    logger.propagate = True
    yield
    logger.handlers[:], logger.propagate = before[0], before[2]
    logger.setLevel(before[1])
