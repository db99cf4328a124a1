"""Attackers without a key, on another host or under another user: processes beside the ranks of a job on several hosts.

Each function runs in its own process, sends "running", and answers questions.
"""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import struct
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from two_hosts_rank import enter

from hora.errors import AuthenticationError
from hora.net.wire import ClientHandshake, Credentials, connect, new_secret

NOBODY = 65534
NUM_SILENT = 2000
_ALL_PROTOCOLS = 0x0003
_LISTEN, _TCP = "0A", 6
_MOST = 2**17  # bytes of an answer to an unauthenticated client: more would be a leak

Place = tuple[str, int]


def listening(host_pid: int) -> set[Place]:
    """Return the endpoints on which the host's processes listen, as seen by process `host_pid`."""
    found = set()
    with open(f"/proc/{host_pid}/net/tcp") as file:
        for line in file.readlines()[1:]:
            _, local, _, state, *_ = line.split()
            address, port = local.split(":")
            if state == _LISTEN:
                found.add((socket.inet_ntoa(struct.pack("<I", int(address, 16))), int(port, 16)))
    return found


def answer_to(where: Place, data: bytes, limit_s: float = 30.0) -> bytes | None:
    """Return everything received until the server hangs up; None if it does not within the limit."""
    try:
        with socket.create_connection(where, timeout=limit_s) as sock:
            sock.sendall(data)
            said = b""
            while len(said) < _MOST:
                more = sock.recv(4096)
                if not more:
                    return said
                said += more
            return said
    except TimeoutError:
        return None
    except OSError:  # it hung up while we were sending
        return b""


def answers(what: Sequence[tuple[Place, bytes]]) -> list[bytes | None]:
    """Send all payloads concurrently: the server waits ten seconds for the rest of an incomplete message."""
    with ThreadPoolExecutor(max_workers=32) as pool:
        return list(pool.map(lambda one: answer_to(*one), what))


def sayings() -> list[bytes]:
    """Return half a hello, hellos without the secret, huge lengths and noise."""
    hello = ClientHandshake(Credentials(new_secret(), "job")).hello
    lengths = [struct.pack(code, 2**31 - 1) for code in ("<I", ">I", "<Q", ">Q")]
    noise = [os.urandom(100_000), b"\0" * 100_000, b"GET / HTTP/1.1\r\n\r\n"]
    return [hello[:5], hello + b"\xff" * 32, *lengths, *(hello + length * 100 for length in lengths), *noise]


def crowd(namespace: str, host_pids: Sequence[int], answer: Any) -> None:
    """Connect to every port of the hosts (one pid per host) as soon as it opens, before the ranks can; try another
    job's secret; and hold so many silent connections that no process could hold all of them.
    """
    enter(namespace)
    resource.setrlimit(resource.RLIMIT_NOFILE, (8192, 8192))
    answer.send("running")
    first: set[Place] = set()
    let_in = 0
    with contextlib.ExitStack() as stack:
        while not answer.poll():
            places = {place for pid in host_pids for place in listening(pid)}
            for place in places - first:
                _stand_at(place, 20, stack)
                let_in += _try_secret(place)
            first |= places
        answer.recv()
        for number in range(NUM_SILENT):
            _stand_at(sorted(places)[number % len(places)], 1, stack)
        answer.send({"places": sorted(places), "first": len(first), "let in": let_in})
        answer.recv()  # the connections stay open until the ranks have continued for a while
    answer.send("gone")


def _stand_at(place: Place, count: int, stack: contextlib.ExitStack) -> None:
    """Open connections that stay silent; every second one sends a valid hello and does not read the answer."""
    hello = ClientHandshake(Credentials(new_secret(), "job")).hello
    for number in range(count):
        sock = stack.enter_context(socket.socket())
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        with contextlib.suppress(OSError):
            sock.settimeout(10)
            sock.connect(place)
            if number % 2:
                sock.sendall(hello)


def _try_secret(place: Place) -> int:
    """Return 1 if another job's secret was accepted."""
    try:
        connect(place, Credentials(new_secret(), "another job"), timeout_s=10).close()
    except (AuthenticationError, OSError):
        return 0
    return 1


def record(namespace: str, answer: Any) -> None:
    """Capture all packets on the cable until asked; then answer with each client's stream and its destination."""
    enter(namespace)
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_ALL_PROTOCOLS)) as sniffer:
        sniffer.bind(("cable", 0))
        sniffer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 2**20)
        sniffer.settimeout(0.2)
        answer.send("running")
        frames = []
        while not answer.poll():
            with contextlib.suppress(TimeoutError):
                frames.append(sniffer.recv(2**17))
    answer.recv()
    answer.send(conversations(frames))


def conversations(frames: Sequence[bytes]) -> list[tuple[Place, bytes]]:
    """Reassemble what the clients of TCP connections sent, from captured frames (IPv4)."""
    parts: dict[tuple[bytes, bytes, int, int], dict[int, bytes]] = {}
    first: dict[tuple[bytes, bytes, int, int], int] = {}
    for frame in frames:
        packet = frame[14:]
        if frame[12:14] != b"\x08\x00" or packet[9] != _TCP:
            continue
        segment = packet[4 * (packet[0] & 15) : int.from_bytes(packet[2:4], "big") or None]
        source, target, number = struct.unpack(">HHI", segment[:8])
        flow, flags = (packet[12:16], packet[16:20], source, target), segment[13]
        if flags & 0x12 == 0x02:  # SYN without ACK: this end opens the connection
            first[flow] = number + 1
        data = segment[4 * (segment[12] >> 4) :]
        if data:
            parts.setdefault(flow, {})[number] = data
    said = []
    for flow, begin in first.items():
        text, at = b"", begin
        for number, data in sorted(parts.get(flow, {}).items()):
            if number == at:
                text, at = text + data, at + len(data)
        if text:
            said.append(((socket.inet_ntoa(flow[1]), flow[3]), text))
    return said


def say(namespace: str, answer: Any) -> None:
    """Send the payloads of each question and answer with the responses; end at None."""
    enter(namespace)
    answer.send("running")
    while (what := answer.recv()) is not None:
        answer.send(answers(what))
    answer.send("gone")


def another_user(namespace: str, answer: Any) -> None:
    """As user nobody on the ranks' own host, send data to every local socket and port of the job."""
    enter(namespace)
    answer.send("running")
    answer.recv()
    with open("/proc/self/net/unix") as file:
        names = {line.split()[-1][1:] for line in file if " @" in line}
    places = listening(os.getpid())
    "x".encode("idna")  # makes Python load a module that nobody may not be able to read
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    said = {}
    for name in names:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(30)
            try:
                sock.connect("\0" + name)
                sock.sendall(b"\0" * 100)
                said[name] = sock.recv(4096)
            except OSError:
                said[name] = b""
    for place in places:
        said[str(place)] = b"".join(text or b"" for text in answers([(place, data) for data in sayings()]))
    answer.send(said)
