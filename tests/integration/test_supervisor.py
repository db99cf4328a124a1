"""The supervisor alone, given orders as a launcher gives them."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys

import psutil

from hora.launch.host.supervisor import EXITED, FRAME, MARK, STDOUT

NUM_WORKERS = 12


def test_a_workers_private_files_go_with_it():
    """Hours of an elastic job start thousands of workers."""
    supervisor = subprocess.Popen(
        [sys.executable, "-m", "hora.launch.host.supervisor"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    common = "ab" * 32

    def outcome(worker: int) -> tuple[str, int]:
        """Start a worker, which says its secrets; return what it said, and how many files the supervisor has open
        then.
        """
        order = {
            "op": "start",
            "worker": worker,
            "argv": [
                "sh",
                "-c",
                'xxd -p -c 64 "$OWN" 2>/dev/null || od -An -v -tx1 -w64 "$OWN"; cat "$COMMON" | wc -c',
            ],
            "env": {},
            "inherit_env": True,
            "cwd": None,
            "private_files": {"OWN": own[worker], "COMMON": common},
            "preload": None,
        }
        supervisor.stdin.write(json.dumps(order).encode() + b"\n")
        supervisor.stdin.flush()
        said = b""
        while True:
            kind, number, length = FRAME.unpack(supervisor.stdout.read(FRAME.size))
            body = supervisor.stdout.read(length)
            assert number == worker
            if kind == STDOUT:
                said += body
            elif kind == EXITED:
                (process,) = psutil.Process(supervisor.pid).children()
                return said.decode().replace(" ", ""), process.num_fds()

    own = [secrets.token_hex(32) for _ in range(NUM_WORKERS)]
    try:
        assert supervisor.stdout.read(len(MARK)) == MARK
        found = [outcome(worker) for worker in range(NUM_WORKERS)]
    finally:
        supervisor.stdin.close()
        assert supervisor.wait(60) == 0
    assert [said for said, _ in found] == [f"{secret}\n32\n" for secret in own]
    assert {num for _, num in found} == {found[0][1]}
