"""Graceful end (SIGTERM) of an elastic job: its ranks commit and leave together, so that it can be resumed."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from typing import NoReturn

from hora.launch.agent.agent import LEFT
from hora.launch.controller.context import JobRun

__all__ = ["leave"]

_LEAVE = 4  # the kind of change in the notice to ranks (`hora.torch.elastic.notification` has the others)
_ENDED = 128 + signal.SIGTERM


def leave(run: JobRun, workers: Sequence[int], notify: Callable[[int], None], *, limit_s: float) -> NoReturn:
    """Have the ranks end at their next commit, and end: with `LEFT` if all of them came to it in time."""
    run.leaving(f"end requested: the ranks commit and leave, within {limit_s:g} s (--leave-timeout)")
    if all(run.rendezvous.heard_at(worker) is None for worker in workers):
        raise SystemExit(_ENDED)  # a command that knows nothing of commits
    alive = [worker for worker in workers if worker not in run.exits]
    notify(_LEAVE)
    limit = time.monotonic() + limit_s
    while time.monotonic() < limit and any(worker not in run.exits for worker in alive):
        run.wait(limit)
    if {run.exits[worker].code if worker in run.exits else -1 for worker in alive} <= {0, LEFT}:
        run.log(f"all ranks have committed and left: start the job again to go on (exit status {LEFT})")
        raise SystemExit(LEFT)
    raise SystemExit(_ENDED)
