"""Daemon session, one per user and folder: its workers outlive the command that launched them.

`hora workers launch` starts it, and `hora workers end` ends it together with its workers. Other processes find it by
its folder (`gateway`). After an hour without workers it ends by itself.
"""

from __future__ import annotations

import errno
import os
import select
import subprocess
import sys

from hora.launch.controller.launcher import wait_or_kill
from hora.launch.job import OutputOptions
from hora.launch.processes import module_command
from hora.workers.gateway import Gateway, call_session, find, name_of, new_name, runs, server_pid

_IDLE_LIMIT_S = 3600.0
_START_LIMIT_S = 60.0
_LEAVE_LIMIT_S = 5.0
_END_LIMIT_S = 30.0


def start(folder: str) -> tuple[str, str]:
    """Return the folder's session; start it if it does not run."""
    found = find(folder)
    if found is not None:
        return found
    process = subprocess.Popen(
        module_command(sys.executable, "hora.workers.daemon"),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    with process.stdout:
        ready, _, _ = select.select([process.stdout], [], [], _START_LIMIT_S)
        line = process.stdout.readline() if ready else b""  # it says that it is ready, or ends
    found = find(folder)
    if found is None:
        status = wait_or_kill(process, _LEAVE_LIMIT_S)
        if runs(name_of(folder)):
            raise RuntimeError(
                f"the session of workers of {folder} runs where this process cannot see it: in another container"
            )
        raise RuntimeError(f"the session of workers did not start (output {line!r}, status {status})")
    return found


def end(folder: str) -> bool:
    """End the folder's session and all its workers, and wait for its exit. Returns False if none runs."""
    found = find(folder)
    if found is None:
        return False
    process = os.pidfd_open(server_pid(found[0]))
    try:
        call_session(*found, call="stop", ids=None)
        call_session(*found, call="end")
        if not select.select([process], [], [], _END_LIMIT_S)[0]:
            raise TimeoutError(f"the session of workers of {folder} did not end within {_END_LIMIT_S:g} s")
    finally:
        os.close(process)
    return True


def main() -> None:
    """Serve until a client requests the end, or until an hour has passed without workers."""
    gateway = Gateway(*new_name(), output=OutputOptions(console=False))
    try:
        gateway.publish(os.getcwd())
        print("ready", flush=True)
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
        while not gateway.idle.wait(_IDLE_LIMIT_S):
            if all(worker["finished_at"] is not None for worker in gateway.session.workers()):
                break
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        print("another process has just started it", flush=True)
    finally:
        gateway.close()


if __name__ == "__main__":
    main()
