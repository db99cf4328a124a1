"""Link between two network namespaces that delays every packet and drops some, for kernels without netem.

    python bad_cable.py PID PID DELAY_S LOSS SEED

Creates a network device called `cable` in the namespace of each process PID. Packets sent into one device leave the
other after DELAY_S seconds, except for a share LOSS of them, which is dropped. The devices exist until this process
exits, which it does when its stdin is closed. Started by `namespaces.badly_joined`.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

_CLONE_NEWNET = 0x40000000
_TUNSETIFF = 0x400454CA
_IFF_TUN_NO_PI = 0x0001 | 0x1000
_MOST_BYTES = 65536


def device(pid: int) -> int:
    """Create a TUN device in the network namespace of process `pid` and return its descriptor."""
    with open(f"/proc/{pid}/ns/net") as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), _CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), "setns")
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", b"cable", _IFF_TUN_NO_PI))
    return descriptor


class Direction:
    """One direction of the link."""

    def __init__(self, source: int, target: int, delay_s: float, loss: float, chance: random.Random) -> None:
        self.source = source
        self._target, self._delay_s, self._loss, self._chance = target, delay_s, loss, chance
        self._under_way: deque[tuple[float, bytes]] = deque()

    def take_in(self) -> None:
        """Read all packets that are available now."""
        while True:
            try:
                packet = os.read(self.source, _MOST_BYTES)
            except OSError:  # no packet available, or the device is not up yet
                return
            if self._chance.random() >= self._loss:
                self._under_way.append((time.monotonic() + self._delay_s, packet))

    def let_out(self) -> float | None:
        """Write the packets that are due; return the seconds until the next one is due."""
        while self._under_way:
            wait_s = self._under_way[0][0] - time.monotonic()
            if wait_s > 0:
                return wait_s
            try:
                os.write(self._target, self._under_way.popleft()[1])
            except OSError:  # the device is down or full: the packet is lost
                continue
        return None


def main() -> None:
    pids, delay_s, loss, seed = sys.argv[1:3], float(sys.argv[3]), float(sys.argv[4]), int(sys.argv[5])
    here, there = (device(int(pid)) for pid in pids)
    chance = random.Random(seed)
    directions = [Direction(here, there, delay_s, loss, chance), Direction(there, here, delay_s, loss, chance)]
    by_source = {direction.source: direction for direction in directions}
    print("ready", flush=True)
    while True:
        waits = [wait_s for direction in directions if (wait_s := direction.let_out()) is not None]
        readable, _, _ = select.select([*by_source, sys.stdin], [], [], min(waits) if waits else None)
        if sys.stdin in readable:
            return
        for source in readable:
            by_source[source].take_in()


if __name__ == "__main__":
    main()
