"""Another user of this machine, for tests: no groups, no rights, an unused id.

The process imports modules as root before it changes the user: the interpreter may lie in root's own folder.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable

UID = 54321

_BECOME = f"""
import base64, contextlib, json, os, resource, select, socket, struct, sys, time
"a".encode("idna")  # loaded now: names of hosts need it
os.setgroups([])
os.setgid({UID})
os.setuid({UID})
os.chdir("/")
"""

possible = os.geteuid() == 0
WHY_NOT = "needs root, to become another user"


def start(
    program: str, *arguments: str, inside: Callable[..., list[str]] = lambda *command: list(command)
) -> subprocess.Popen[str]:
    """Start the program, which may use the modules imported above, as that user.

    `inside` makes the command that runs a command in another namespace.
    """
    assert possible
    return subprocess.Popen(
        inside(sys.executable, "-I", "-c", _BECOME + program, *arguments),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(program: str, *arguments: str, limit_s: float = 100.0) -> str:
    """Return the output of the program, which must succeed."""
    process = start(program, *arguments)
    try:
        said, _ = process.communicate(timeout=limit_s)
    finally:
        process.kill()
    assert process.returncode == 0, said
    return said
