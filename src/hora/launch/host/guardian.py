"""The guardian: the supervisor's parent, which ends whatever the supervisor leaves behind should that be killed."""

from __future__ import annotations

import os
import signal

from hora.launch.host.processes import Processes, exit_code, send_signal

__all__ = ["guard"]


def guard(supervisor: int) -> int:
    """Wait for the supervisor, then for the end of all its orphans; returns the supervisor's status."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: send_signal(supervisor, signal.SIGTERM))
    for descriptor in (0, 1):
        os.close(descriptor)
    code = None
    while code is None:
        pid, status = os.waitpid(-1, 0)
        if pid == supervisor:
            code = exit_code(status)
    while True:
        processes = Processes()
        processes.kill(processes.descendants(os.getpid()))
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return code
