"""Attacks on every port of a running local job: no code runs, the job finishes, memory stays bounded."""

from __future__ import annotations

import os
import pickle
import socket
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from job_process import JobProcess

from hora.net.wire import REFUSAL, ClientHandshake, Credentials, connect, new_secret

# The ranks keep meeting while the attack runs, and return their results once the file exists.
JOB = """
import horovod, os, pathlib, sys, time

def work(flag):
    from hora.net.client import ControlClient
    from hora.platforms.detect import detect_world
    from hora.world import World
    world = detect_world()
    client = ControlClient.connect(world.rendezvous, name=f"rank {world.rank}", timeout_s=60)
    rounds, over = 0, False
    while not over:
        said = b"1" if pathlib.Path(flag).exists() else b"0"
        got = list(client.gather("round", said, rank=world.rank, size=world.size, timeout_s=60).members.values())
        assert len(got) == world.size
        over = b"1" in got
        rounds += 1
        time.sleep(0.01)  # the processors are for those who attack, too
        if rounds == 1:
            print("meeting", world.rank, flush=True)
    late = ControlClient.connect(world.rendezvous, name=f"late {world.rank}", timeout_s=60)
    late.close()
    client.close()
    return world.rank * 10

if __name__ == "__main__":
    print("RESULT", horovod.run(work, (sys.argv[1],), num_proc=2), flush=True)
"""

# The same with the engine: the ranks sum tensors.
ENGINE_JOB = """
import horovod, pathlib, sys, time

def work(flag):
    import torch
    import horovod.torch as hvd
    hvd.init()
    rounds, over = 0, False
    while not over:
        finish = torch.tensor([float(pathlib.Path(flag).exists()), float(hvd.rank())])
        over, total = hvd.allreduce(finish, op=hvd.Sum, name=f"round {rounds}").tolist()
        assert total == 1.0
        rounds += 1
        time.sleep(0.01)  # the processors are for those who attack, too
        if rounds == 1:
            print("meeting", hvd.rank(), flush=True)
    value = 10 * hvd.rank()
    hvd.shutdown()
    return value

if __name__ == "__main__":
    print("RESULT", horovod.run(work, (sys.argv[1],), num_proc=2), flush=True)
"""


FEW_DESCRIPTORS = 300  # for each of the job's processes, unless it raises the limit


class Victim:
    """A running job and its ports."""

    def __init__(self, work: Path, job: str = JOB, **environment: str) -> None:
        (work / "job.py").write_text(job)
        self.flag = work / "finish"
        self.trap = work / "executed"
        few = ["sh", "-c", f'ulimit -S -n {FEW_DESCRIPTORS}; exec "$@"', "sh"]
        self.job = JobProcess([*few, sys.executable, "job.py", str(self.flag)], work, **environment)
        self.job.wait_for_text("meeting 0")
        self.job.wait_for_text("meeting 1")
        self.ports = sorted({c.laddr.port for c in self.listening()})
        assert self.ports, "a job without any port cannot be attacked"

    def listening(self) -> list:
        found = []
        for process in self.job.processes():
            found += [c for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN]
        return found

    def resident_mib(self) -> float:
        return psutil.Process(self.job.process.pid).memory_info().rss / 2**20

    def descriptors(self) -> int:
        return psutil.Process(self.job.process.pid).num_fds()

    def finish(self) -> None:
        """Let the ranks finish; they must still agree and return the right values."""
        self.flag.touch()
        assert self.job.wait() == 0, self.job.text()
        assert "RESULT [0, 10]" in self.job.text()
        assert not self.trap.exists(), "a stranger's code was executed"
        self.job.assert_nothing_left()


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Victim]:
    victim = Victim(tmp_path)
    yield victim
    victim.job.process.kill()


def reaction(port: int, data: bytes, *, limit_s: float = 30.0) -> bytes:
    """Send data to the port and return everything received until it hangs up."""
    try:
        sock = socket.create_connection(("127.0.0.1", port), timeout=limit_s)
    except TimeoutError:  # it accepts no further connections
        return b""
    with sock:
        try:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while data := sock.recv(4096):
                answer += data
        except OSError:  # it hung up while we were sending, or stayed silent
            return b""
        return answer


class Exploit:
    """Leaves a trace when unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.trap}",)


def test_a_local_job_listens_on_loopback_only(victim: Victim):
    assert {c.laddr.ip for c in victim.listening()} == {"127.0.0.1"}
    victim.finish()


def attacks(trap: Path) -> tuple[bytes, list[bytes]]:
    """Return a valid hello without the secret, and the payloads of unauthenticated clients."""
    hello = ClientHandshake(Credentials(new_secret(), "job")).hello
    pickled = [pickle.dumps(Exploit(trap), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    lengths = [struct.pack(code, 2**31 - 1) for code in ("<I", ">I", "<Q", ">Q")]
    return hello, [
        b"",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PUT /scope/key HTTP/1.1\r\nContent-Length: 99999999999\r\n\r\n",
        os.urandom(100_000),
        b"\0" * 100_000,
        hello[:5],
        hello,
        hello + b"\xff" * 32,
        hello + b"\xff" * 100_000,
        *lengths,
        *(hello + length for length in lengths),
        *pickled,
        *(struct.pack(">I", len(p)) + p for p in pickled),
        *(struct.pack("<I", len(p)) + p for p in pickled),
        *(hello + p for p in pickled),
        *(hello + b"\0" * 32 + struct.pack(">I", len(p)) + b"\0" * 32 + p for p in pickled),
    ]


def test_garbage_half_messages_huge_lengths_and_pickles(victim: Victim):
    hello, said = attacks(victim.trap)
    for port in victim.ports:
        for attack in said:
            # At most a refusal is returned, and only for a valid hello.
            assert reaction(port, attack) in ((b"", REFUSAL) if attack.startswith(hello) else (b"",))
    # The first rejected connection is logged; later ones are counted, not logged one by one.
    assert 1 <= victim.job.text().count("closed a connection from") <= 5
    victim.finish()


@pytest.mark.parametrize("transport", ["auto", pytest.param("tcp", marks=pytest.mark.slow)])
def test_a_job_with_the_engine_survives_garbage_and_a_crowd(tmp_path: Path, transport: str):
    """The crowd of silent connections exceeds the number of descriptors with which the ranks were started."""
    victim = Victim(tmp_path, ENGINE_JOB, HORA_TRANSPORT=transport)
    try:
        assert {c.laddr.ip for c in victim.listening()} == {"127.0.0.1"}
        _, said = attacks(victim.trap)
        for port in victim.ports:
            for attack in said:
                reaction(port, attack, limit_s=0.05)
        with ExitStack() as crowd:
            for port in victim.ports:
                for _ in range(FEW_DESCRIPTORS + 100):
                    silent = crowd.enter_context(socket.socket())
                    silent.setblocking(False)
                    silent.connect_ex(("127.0.0.1", port))
            victim.finish()
    finally:
        victim.job.process.kill()


def test_another_jobs_secret_is_rejected(victim: Victim):
    from hora.errors import AuthenticationError

    for port in victim.ports:
        with pytest.raises(AuthenticationError):
            connect(("127.0.0.1", port), Credentials(new_secret(), "job"), timeout_s=30)
    victim.finish()


def test_a_recorded_conversation_cannot_be_replayed(victim: Victim, tmp_path: Path):
    """Record a genuine client's bytes with a proxy, then send them again."""
    secret_file, job_id = next(
        (env["HORA_SECRET_FILE"], env["HORA_JOB"])
        for env in (process.environ() for process in victim.job.processes())
        if "HORA_SECRET_FILE" in env
    )
    # The fork server, the parent of both ranks, was started with the first worker's environment.
    held = Credentials(Path(secret_file).read_bytes(), job_id, 0)
    for port in victim.ports:
        with Tap(port) as tap:
            genuine = connect(("127.0.0.1", tap.port), held, timeout_s=30)
            genuine.send({"op": "hello", "id": 1, "name": "me", "worker": -1})
            genuine.receive()
            before = len(tap.recorded)
            genuine.send({"op": "add", "id": 2, "key": "counted", "amount": 1})
            assert genuine.receive()[1] == b"1"
            recorded = bytes(tap.recorded)
            # Replayed on a new connection: the server hangs up after its answer, which is lost if the hang-up is a
            # reset.
            assert len(reaction(port, recorded)) in (0, ClientHandshake.answer_bytes)
            # Replayed on the live connection, a whole message: the server ends it without processing the message.
            tap.inject(recorded[before:])
            with pytest.raises((EOFError, ConnectionError)):
                genuine.receive()
            genuine.close()
        checker = connect(("127.0.0.1", port), held, timeout_s=30)
        checker.send({"op": "add", "id": 1, "key": "counted", "amount": 0})
        assert checker.receive()[1] == b"1"
        checker.close()
    victim.finish()


def test_1000_open_connections(victim: Victim):
    before_mib, before_fds = victim.resident_mib(), victim.descriptors()
    hello = ClientHandshake(Credentials(new_secret(), "job")).hello
    with ExitStack() as stack:
        strangers = []
        for number in range(1000):
            sock = stack.enter_context(socket.create_connection(("127.0.0.1", victim.ports[0]), timeout=30))
            if number % 2:
                sock.sendall(hello)
            strangers.append(sock)
        assert victim.descriptors() <= before_fds + 150
        assert victim.resident_mib() < before_mib + 30
        # The job continues, and new clients with the secret are accepted despite the crowd.
        victim.flag.touch()
        assert victim.job.wait() == 0, victim.job.text()
    assert "RESULT [0, 10]" in victim.job.text()
    victim.job.assert_nothing_left()


class Tap:
    """A proxy in front of a port that records the clients' bytes and can inject more in their name."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.recorded = bytearray()

    def __enter__(self) -> Tap:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()
        return self

    def _serve(self) -> None:
        self._client, _ = self._server.accept()
        self._upstream = socket.create_connection(("127.0.0.1", self._port))
        back = threading.Thread(target=self._copy, args=(self._upstream, self._client, bytearray()))
        self._threads.append(back)
        back.start()
        self._copy(self._client, self._upstream, self.recorded)

    def _copy(self, source: socket.socket, target: socket.socket, record: bytearray) -> None:
        try:
            while data := source.recv(65536):
                record += data
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            target.close()

    def inject(self, data: bytes) -> None:
        self._upstream.sendall(data)

    def __exit__(self, *_: object) -> None:
        for sock in (self._client, self._upstream, self._server):
            with suppress(OSError):  # it may be closed already
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        for thread in self._threads:
            thread.join(30)


# Each rank writes the keys of the control tree and of its objects to a file.
HUB_JOB = """
import horovod, pathlib

def work():
    import horovod.torch as hvd
    from hora import engine
    hvd.init()
    hvd.barrier()
    keys = engine.current_runtime()._bootstrap.keys
    link = keys.of(1) if hvd.rank() == 0 else keys.towards(0)
    pathlib.Path(f"rank{hvd.rank()}").write_text(f"{keys.shared.hex()} {link.secret.hex()}")
    hvd.shutdown()

if __name__ == "__main__":
    horovod.run(work, num_proc=2)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="listening on the network needs root")
def test_captured_traffic_contains_no_key_of_the_control_tree(tmp_path: Path):
    """Nor does it contain any other message between the launcher and the ranks, on this host or between hosts."""
    (tmp_path / "job.py").write_text(HUB_JOB)
    heard = bytearray()
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as listener:
        listener.bind(("lo", 0))
        listener.settimeout(0.2)
        job = JobProcess([sys.executable, "job.py"], tmp_path)
        while job.process.poll() is None:
            with suppress(TimeoutError):
                heard += listener.recv(65600)
    assert job.process.returncode == 0
    first, second = ((tmp_path / f"rank{rank}").read_text() for rank in (0, 1))
    assert first == second
    assert heard.count(b"HORA/4") >= 2  # the connections were captured, but not the messages of the rendezvous
    assert b"fanout" not in heard
    for key in first.split():
        assert key.encode() not in heard
        assert bytes.fromhex(key) not in heard
