"""Attacks that once did harm, against jobs as users start them: by commands, `horovod.torch` and sockets alone.

docs/security.md lists them with those that other files repeat.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from job_process import BIN, HOROVODRUN, CommandProcess, JobProcess, run_command

import other_user
from waiting import wait_until

APART = ["unshare", "--pid", "--fork", "--mount-proc"]
MEET = """
import torch
import horovod.torch as hvd
hvd.init()
print("rank", hvd.rank(), "sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
"""


def script(folder: Path, text: str) -> str:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    return str(path)


# Connects without end, says nothing, noise, HTTP, half a hello; keeps three hundred open.
FLOOD = """
import os, random, socket, sys
where, rng, held = ("127.0.0.1", int(sys.argv[1])), random.Random(1), []
print("flooding", flush=True)
while True:
    try:
        sock = socket.create_connection(where, timeout=1)
        sock.settimeout(0.02)
        said = (b"", b"GET / HTTP/1.0\\r\\n\\r\\n", b"HORA" + os.urandom(73), os.urandom(rng.randrange(1, 300)))
        sock.sendall(rng.choice(said))
        held.append(sock)
    except OSError:
        continue
    while len(held) > 300:
        held.pop(0).close()
"""


@contextmanager
def flood(port: int) -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", FLOOD, str(port)], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"flooding\n"
        yield
    finally:
        process.kill()
        process.communicate()


def test_a_node_with_the_secret_is_not_lost_to_a_flood(tmp_path: Path):
    with socket.create_server(("127.0.0.1", 0)) as sock:
        port = sock.getsockname()[1]
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 64)
    train = script(tmp_path, MEET)
    jobs = []
    with flood(port):
        for rank in (0, 1):
            (tmp_path / str(rank)).mkdir()
            place = ["--nnodes", "2", "--node-rank", str(rank), "--meet", f"127.0.0.1:{port}", "--start-timeout", "150"]
            line = [str(BIN / "hora"), "run", *place, "--secret-file", str(secret), "-np", "2", sys.executable, train]
            jobs.append(JobProcess(line, tmp_path / str(rank)))
        assert [job.wait() for job in jobs] == [0, 0], jobs[0].text() + jobs[1].text()
    assert all(f"rank {rank} sum 2.0" in jobs[0].text() for rank in (0, 1))


# Has the kernel refuse SO_ATTACH_FILTER (setsockopt's third argument, 26), as sandboxes do. x86-64 and AArch64.
SANDBOX = """
import ctypes, platform, struct
number = {"x86_64": 54, "aarch64": 208}[platform.machine()]
LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06
program = [(LOAD, 0, 0, 0), (EQUAL, 0, 3, number), (LOAD, 0, 0, 16 + 2 * 8), (EQUAL, 0, 1, 26),
           (RETURN, 0, 0, 0x00050000 | 1), (RETURN, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in program))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0  # no new privileges
filter = ctypes.create_string_buffer(struct.pack("HL", len(program), ctypes.addressof(code)))
assert libc.prctl(22, 2, filter, 0, 0) == 0, ctypes.get_errno()
"""


def test_where_the_kernel_refuses_a_filter_the_open_listener_of_gloo_is_named(tmp_path: Path):
    train = script(tmp_path, SANDBOX + MEET)
    job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, train], tmp_path, HORA_TRANSPORT="gloo")
    assert job.wait() == 0, job.text()
    assert "rank 1 sum 2.0" in job.text()
    said = re.findall(
        r"gloo's listener at 127\.0\.0\.1:\d+ stays open to strangers, because the kernel refuses", job.text()
    )
    assert len(said) == 2, job.text()


def test_requests_without_the_token_write_nothing_into_the_jobs_output(tmp_path: Path):
    """And a crowd of silent connections does not keep `hora top`, which has the token, from the page."""
    flag = tmp_path / "over"
    wait = f"while not __import__('os').path.exists({str(flag)!r}): __import__('time').sleep(0.1)"
    line = [str(BIN / "hora"), "run", "--dashboard", "-np", "1", sys.executable, "-c", wait]
    job = JobProcess(line, tmp_path)
    job.wait_for_text("see it live")
    found = re.search(r"http://127\.0\.0\.1:(\d+)/", job.text())
    assert found is not None
    with ExitStack() as crowd:
        for number in range(300):
            sock = crowd.enter_context(socket.create_connection(("127.0.0.1", int(found[1])), timeout=10))
            if number % 3 == 0:
                sock.sendall(b"GET //[x HTTP/1.1\r\nHost: x\r\n\r\n")
                assert sock.recv(12) == b"HTTP/1.1 421"
        before = job.text()
        address = subprocess.run([BIN / "hora", "top", "--url"], capture_output=True, text=True, timeout=100).stdout
        if found[1] in address:  # not that of a job of this user's which another test runs
            with CommandProcess("hora", "top", "--once", address.strip(), env={"COLUMNS": "200"}) as top:
                assert top.finish()[0] == 0
    flag.touch()
    assert job.wait() == 0
    assert "Traceback" not in job.text()
    assert job.text().startswith(before)
    job.assert_nothing_left()


SESSION = """
import pathlib, time
from hora.workers import await_workers, launch_workers
launched = launch_workers(1, cpu=0.1, memory=0.1, code="pass")
await_workers(launched, timeout_seconds=100)
print("session is open", flush=True)
while not pathlib.Path("over").exists():
    time.sleep(0.1)
"""


def test_commands_that_look_for_a_session_are_not_taken_for_strangers(tmp_path: Path):
    job = JobProcess([sys.executable, script(tmp_path, SESSION)], tmp_path)
    job.wait_for_text("session is open")
    status, out, _ = run_command("hora", "workers", "list", cwd=tmp_path)
    assert (status, "succeeded" in out) == (0, True), out
    (tmp_path / "over").touch()
    assert job.wait() == 0
    assert "closed a connection" not in job.text()
    job.assert_nothing_left()


# ---- below: `make test-security`; other files of `make test` attack the same places from inside ----------------------------

MEETING = """
import pathlib, sys
import torch
import horovod.torch as hvd
hvd.init()
rounds, over = 0, False
while not over:
    finish = torch.tensor([float(pathlib.Path(sys.argv[1]).exists()), float(hvd.rank())])
    over, total = hvd.allreduce(finish, op=hvd.Sum, name=f"round {rounds % 10}").tolist()
    assert total == 1.0, total
    rounds += 1
    if rounds == 1:
        print("meeting", hvd.rank(), flush=True)
assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": 0}, {"rank": 1}]
print("done", hvd.rank(), flush=True)
"""


class Meeting:
    """A job of two ranks that meet until they are told to finish."""

    def __init__(self, folder: Path, *, limits: str = "true", **environment: str) -> None:
        self.flag = folder / "finish"
        line = [*HOROVODRUN, "-np", "2", sys.executable, script(folder, MEETING), str(self.flag)]
        self.job = JobProcess(["sh", "-c", f'{limits}; exec "$@"', "sh", *line], folder, **environment)

    def begun(self) -> Meeting:
        for rank in (0, 1):
            self.job.wait_for_text(f"meeting {rank}")
        return self

    def ports(self) -> set[int]:
        return {
            connection.laddr.port
            for process in self.job.processes()
            for connection in process.net_connections("tcp")
            if connection.status == psutil.CONN_LISTEN
        }

    def finish(self) -> None:
        self.flag.touch()
        assert self.job.wait() == 0, self.job.text()
        assert all(f"done {rank}" in self.job.text() for rank in (0, 1))
        self.job.assert_nothing_left()


@pytest.mark.security
@pytest.mark.parametrize("transport", ["auto", "tcp", "gloo"])
def test_more_silent_connections_than_a_rank_has_descriptors(tmp_path: Path, transport: str):
    meeting = Meeting(tmp_path, limits="ulimit -S -n 300", HORA_TRANSPORT=transport).begun()
    with ExitStack() as crowd:
        for port in meeting.ports():
            for _ in range(400):
                silent = crowd.enter_context(socket.socket())
                silent.setblocking(False)
                silent.connect_ex(("127.0.0.1", port))
        meeting.finish()


# Another user, who connects to every port and local socket of the job's user as soon as it opens, from one address or many.
CROWD = """
user, num_addresses, held, count = int(sys.argv[1]), int(sys.argv[2]), [], 0
resource.setrlimit(resource.RLIMIT_NOFILE, (4096, 4096))
print("crowding", flush=True)
while not select.select([sys.stdin], [], [], 0)[0]:
    places = []
    with open("/proc/net/tcp") as file:
        for line in file.readlines()[1:]:
            words = line.split()
            if words[3] == "0A" and int(words[7]) == user:
                places.append(int(words[1].split(":")[1], 16))
    with open("/proc/net/unix") as file:
        places += {line.split()[-1] for line in file if "@hora-" in line}
    for place in places:
        for _ in range(60):
            sock = socket.socket(socket.AF_INET if isinstance(place, int) else socket.AF_UNIX)
            sock.setblocking(False)
            count += 1
            with contextlib.suppress(OSError):
                if isinstance(place, int) and num_addresses > 1:
                    sock.bind((f"127.{1 + count // 250 % 4}.7.{1 + count % 250}", 0))
                sock.connect(("127.0.0.1", place) if isinstance(place, int) else "\\0" + place[1:])
            held.append(sock)
    while len(held) > 1500:
        held.pop(0).close()
"""


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
@pytest.mark.parametrize("num_addresses", [1, 1000])
def test_another_user_who_crowds_every_door_does_not_keep_a_job_from_starting(tmp_path: Path, num_addresses: int):
    crowd = other_user.start(CROWD, str(os.getuid()), str(num_addresses))
    try:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "crowding\n"
        Meeting(tmp_path).begun().finish()
    finally:
        crowd.communicate("over\n", timeout=60)


@pytest.mark.security
def test_a_running_job_shows_its_secret_to_nobody(tmp_path: Path):
    meeting = Meeting(tmp_path, HOROVOD_LOG_LEVEL="trace").begun()
    processes = meeting.job.processes()
    files = {process.environ().get("HORA_SECRET_FILE", "") for process in processes} - {""}
    held = {secret for path in files for secret in [Path(path).read_bytes()] if len(secret) >= 32}
    assert held
    for process in processes:
        shown = b"".join(Path(f"/proc/{process.pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        assert not any(secret in shown or secret.hex().encode() in shown for secret in held)
    for process in processes:
        addresses = {c.laddr.ip for c in process.net_connections("tcp") if c.status == psutil.CONN_LISTEN}
        assert addresses <= {"127.0.0.1"}
    if other_user.possible:
        spy = "for one in sys.argv[1:]:\n    with contextlib.suppress(OSError), open(one, 'rb') as f: print(one, f.read(1))"
        private = [f"/proc/{process.pid}/{name}" for process in processes for name in ("environ", "maps", "mem")]
        assert other_user.run(spy, *private, *files) == ""
    meeting.finish()
    text = meeting.job.log.read_bytes()
    assert not any(secret in text or secret.hex().encode() in text for secret in held)


@pytest.mark.security
def test_whichever_process_of_a_job_is_killed_nothing_of_it_is_left(tmp_path: Path):
    """The launcher, the two that watch over the ranks, the ranks: each in a job of its own."""
    victim, num_processes = 0, 1
    while victim < num_processes:
        folder = tmp_path / str(victim)
        folder.mkdir()
        meeting = Meeting(folder).begun()
        processes = sorted(meeting.job.processes(), key=lambda process: process.create_time())
        num_processes = len(processes)
        assert num_processes >= 5
        processes[victim].kill()
        assert meeting.job.wait() != 0
        meeting.job.wait_for_the_last(60)
        victim += 1


# The ranks of a foreign launcher, with variables and a secret file.
@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_a_foreign_launchers_store_tells_another_user_nothing(tmp_path: Path):
    secret = tmp_path / "secret"
    secret.touch(mode=0o600)
    secret.write_text("5" * 64)
    train, flag = script(tmp_path, MEETING), tmp_path / "finish"
    ranks = []
    for rank in "01":
        place = {"RANK": rank, "SIZE": "2", "LOCAL_RANK": rank, "LOCAL_SIZE": "2"}
        variables = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
        (tmp_path / rank).mkdir()
        job = {"OMPI_MCA_ess_base_jobid": str(os.getpid()), "HORA_SECRET_FILE": str(secret), "HORA_STRICT": "1"}
        ranks.append(JobProcess([sys.executable, train, str(flag)], tmp_path / rank, **variables, **job))
    for number, rank in enumerate(ranks):
        rank.wait_for_text(f"meeting {number}")
    ports = {
        connection.laddr.port
        for rank in ranks
        for connection in psutil.Process(rank.process.pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }
    assert ports
    for port in ports:
        with pytest.raises(dist.DistError):
            dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=3))
    ask = (
        "for port in map(int, sys.argv[1:]):\n"
        "    for said in (bytes([0]) + struct.pack('=I', 0x3C85F7CE), bytes([1]) + struct.pack('=Q', 4) + b'salt'):\n"
        "        with contextlib.suppress(OSError), socket.create_connection(('127.0.0.1', port), timeout=5) as sock:\n"
        "            sock.sendall(said)\n"
        "            sock.shutdown(socket.SHUT_WR)\n"
        "            print(sock.recv(1000))\n"
    )
    assert set(other_user.run(ask, *map(str, ports)).split()) <= {"b''"}
    flag.touch()
    assert [rank.wait() for rank in ranks] == [0, 0], [rank.text() for rank in ranks]


@pytest.mark.security
@pytest.mark.parametrize(
    "lie", ["b'o' + b'\\xff' * 8", "b'\\x7f' * 100_000", "b'x' + bytes(7) + b'\\x03{}}'", "b'not a frame at all'"]
)
def test_a_host_that_begins_to_lie_is_given_up(tmp_path: Path, lie: str):
    """`ssh` runs the command on this machine, and after the first answer it puts in words of its own."""
    fake = tmp_path / "ssh"
    fake.write_text(
        f"#!{sys.executable}\n"
        "import os, subprocess, sys, threading\n"
        "if '-G' in sys.argv: print('hostname 127.0.0.1'); sys.exit()\n"
        "command = subprocess.Popen(['sh', '-c', sys.argv[-1]], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)\n"
        "asked = threading.Event()\n"
        "def forward():\n"
        "    while data := os.read(0, 65536):\n"
        "        command.stdin.write(data)\n"
        "        asked.set()\n"
        "    command.stdin.close()\n"
        "threading.Thread(target=forward, daemon=True).start()\n"
        "said = False\n"
        "while data := os.read(command.stdout.fileno(), 65536):\n"
        "    os.write(1, data)\n"
        f"    if asked.is_set() and not said: os.write(1, {lie}); said = True\n"
    )
    fake.chmod(0o755)
    line = ["horovodrun", "-np", "1", "-H", "nodez:1", "sh", "-c", "echo begun; sleep 100"]
    status, _, err = run_command(*line, env={"HORA_SSH": str(fake)})
    assert status != 0
    assert "nodez" in err
    assert "Traceback" not in err


HOSTS = [
    "$(touch {trap}):1",
    "-oProxyCommand=touch${{IFS}}{trap}:1",
    "a;touch {trap}:1",
    "a b:1",
    "a\n-oProxyCommand=x:1",
    "`touch {trap}`:1",
]


@pytest.mark.security
def test_names_of_hosts_and_files_of_settings_run_nothing(tmp_path: Path):
    trap, never = tmp_path / "trap", {"HORA_SSH": str(tmp_path / "no-such-ssh")}
    named = [host.format(trap=trap) for host in HOSTS]
    lines = [["-H", host] for host in named]
    (tmp_path / "hosts").write_text("".join(f"{host.partition(':')[0]} slots=1\n" for host in named[:2]))
    (tmp_path / "settings.yaml").write_text(f'x: !!python/object/apply:os.system ["touch {trap}"]\n')
    lines += [["--hostfile", "hosts"], ["--config-file", "settings.yaml"]]
    (tmp_path / "discover").write_text(f"#!/bin/sh\nprintf '%s\\n' '-oProxyCommand=touch {trap}:1'\n")
    (tmp_path / "discover").chmod(0o755)
    lines.append(["--min-np", "1", "--host-discovery-script", "./discover", "--start-timeout", "5"])
    for line in lines:
        status, out, err = run_command("horovodrun", "-np", "1", *line, "true", cwd=tmp_path, env=never)
        assert status != 0, line
        assert "Traceback" not in out + err, (line, err)
    assert not trap.exists()


# Another user: watches for the victim's listeners and connects first, with the numbers that gloo counts up from 0; then says
# what a peer of gloo says, with a pickle in an object's place.
HIJACK = """
evil, size, end = base64.b64decode(sys.argv[1]), int(sys.argv[2]), time.monotonic() + float(sys.argv[3])
words, known, socks, heard, left, num_taken = struct.Struct("<6Q"), set(), {}, {}, {}, 0

def listeners():
    with open("/proc/net/tcp") as file:
        rows = [line.split() for line in file][1:]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and row[7] == "0"]

def say(sock, data):
    sock.setblocking(True)
    with contextlib.suppress(OSError):
        sock.sendall(data)
    sock.setblocking(False)

known.update(listeners())
print("watching", flush=True)
while time.monotonic() < end:
    for port in listeners():
        if port not in known:
            known.add(port)
            for number in (0, 1):
                sock = socket.socket()
                sock.settimeout(1)
                with contextlib.suppress(OSError):
                    sock.connect(("127.0.0.1", port))
                    sock.sendall(struct.pack("<q", number))
                    sock.setblocking(False)
                    socks[sock.fileno()], heard[sock.fileno()] = sock, b""
    for fd in select.select(list(socks), [], [], 0.001)[0]:
        sock = socks[fd]
        try:
            data = sock.recv(65536)
        except OSError:
            data = b""
        if not data:
            del socks[fd]
            continue
        heard[fd] += data
        while len(heard[fd]) >= words.size:
            total, code, slot, _, length, _ = words.unpack_from(heard[fd])
            if code not in (1, 2, 3) or (total > words.size and len(heard[fd]) < total):
                break
            heard[fd] = heard[fd][max(total, words.size):]
            if code == 3:
                rest = left.setdefault(fd, struct.pack("<q", size) + evil)
                body, left[fd] = (rest[:length] + bytes(length))[:length], rest[length:]
                num_taken += 1
                head = words.pack(words.size, 2, slot, 0, length, 0)
                say(sock, head + words.pack(words.size + length, 1, slot, 0, length, 0) + body)
            elif code == 2:
                say(sock, words.pack(words.size, 3, slot, 0, length, 0))
print(len(known), num_taken, flush=True)
"""

OBJECTS = """
import time
import horovod.torch as hvd
hvd.init()
if hvd.rank() == 0:
    time.sleep(1.0)
got = hvd.allgather_object({"rank": hvd.rank(), "pad": "x" * 300})
assert [one["rank"] for one in got] == [0, 1], got
print("got both objects", flush=True)
"""


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_who_takes_a_ranks_place_at_gloos_listener_runs_nothing(tmp_path: Path):
    """Over gloo, which a user has to ask for. The job may fail there, in words; what must not be is that it runs the pickle."""
    trap = tmp_path / "executed"
    evil = pickle.dumps(_Touch(trap))
    evil += b"." * (400 - len(evil))
    job = script(tmp_path, OBJECTS)
    thief = other_user.start(HIJACK, base64.b64encode(evil).decode(), str(len(evil)), "20")
    try:
        assert thief.stdout is not None
        assert thief.stdout.readline() == "watching\n"
        line = ["horovodrun", "-np", "2", sys.executable, job]
        status, out, err = run_command(*line, env={"HORA_TRANSPORT": "gloo", "HOROVOD_GLOO_TIMEOUT_SECONDS": "15"})
        said, _ = thief.communicate(timeout=60)
    finally:
        thief.kill()
    assert not trap.exists()
    assert status == 0 or "Error" in err, err
    assert status != 0 or out.count("got both objects") == 2
    assert int(said.split()[0]) > 0, said


class _Touch:
    """Unpickling it leaves a trace."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple:
        return exec, (f"open({str(self.trap)!r}, 'w')",)


WAITS = """
import pathlib, sys, time, torch
import horovod.torch as hvd
hvd.init()
print("rank up", flush=True)
while not hvd.allreduce(torch.tensor([float(pathlib.Path(sys.argv[1]).exists())])).item():
    time.sleep(0.02)
print("sum", hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), flush=True)
"""


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="listening on the network needs root")
def test_a_handshake_that_was_heard_is_worth_nothing(tmp_path: Path):
    """Said again, answered with what the server said, spliced with another one, cut short, or a byte at a time."""
    flag = tmp_path / "finish"
    heard: dict[int, bytes] = {}  # port -> the first words of a genuine client
    over = threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                packet = listener.recv(70_000)[14:]  # behind the link's header: IP, TCP
                body = packet[(packet[0] & 15) * 4 :]
                data = body[(body[12] >> 4) * 4 :]
                if packet[9] == 6 and data.startswith(b"HORA/"):
                    heard.setdefault(int.from_bytes(body[2:4], "big"), bytes(data))

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800)) as listener:
        listener.bind(("lo", 0))
        listener.settimeout(0.2)
        thread = threading.Thread(target=listen)
        thread.start()
        job = JobProcess([*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, WAITS), str(flag)], tmp_path)
        try:
            wait_until("both ranks are up", lambda: job.text().count("rank up") == 2)
            over.set()
            thread.join(30)
            mine = {c.laddr.port for p in job.processes() for c in p.net_connections("tcp") if c.status == "LISTEN"}
            ports = heard.keys() & mine
            assert ports, "a genuine handshake was heard"
            for port in ports:
                hello = heard[port]
                first, second = _opened(port), _opened(port)
                answers = [_say(first, hello), _say(second, hello)]
                # Each answer is fresh, so who has no key cannot go on, neither with the server's own words nor with another's.
                assert answers[0] != answers[1] or not answers[0]
                assert _say(first, answers[0] or b"x" * 48) == b""
                assert _say(second, answers[0] or b"y" * 48) == b""
                flipped = bytes([*hello[:-1], hello[-1] ^ 1])
                assert _say(_opened(port), flipped) in (b"", b"refused\n")
                with _opened(port) as slow:
                    for number in range(6):
                        slow.sendall(hello[number : number + 1])
            flag.touch()
            assert job.wait() == 0, job.text()
            assert job.text().count("sum 2.0") == 2
        finally:
            over.set()
            job.kill()


def _opened(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=10)


def _say(sock: socket.socket, data: bytes) -> bytes:
    """Return the answer, nothing where the server hangs up."""
    try:
        sock.sendall(data)
        return sock.recv(4096)
    except OSError:
        return b""


SQUAT = """
held = []
for name in sys.argv[1:]:
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].bind("\\0" + name)
    held[-1].listen(1)
print("held", flush=True)
sys.stdin.readline()
"""


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_another_user_who_takes_a_sessions_name_does_not_keep_it_from_starting(tmp_path: Path):
    """And a process of the same user in another container, which shares the network alone, does not find the session."""
    launch = [
        "hora",
        "workers",
        "launch",
        "-n",
        "1",
        "--cpu",
        "0.1",
        "--memory",
        "0.1",
        "--code",
        "import time; time.sleep(600)",
    ]

    def names() -> set[str]:
        with open("/proc/net/unix") as file:
            return {line.split()[-1][1:] for line in file if "@hora-workers-" in line}

    @contextmanager
    def session() -> Iterator[str]:
        done = subprocess.run([BIN / launch[0], *launch[1:]], cwd=tmp_path, capture_output=True, text=True, timeout=100)
        try:
            assert done.returncode == 0, done.stderr
            yield done.stderr
        finally:
            ended = subprocess.run([BIN / "hora", "workers", "end"], cwd=tmp_path, capture_output=True, timeout=100)
            assert ended.returncode == 0

    before = names()
    with session() as complaints:
        assert complaints == ""
        mine = names() - before
        assert mine
        if subprocess.run([*APART, "true"], capture_output=True).returncode == 0:
            apart = [*APART, str(BIN / "hora"), "workers", "list"]
            seen = subprocess.run(apart, cwd=tmp_path, capture_output=True, text=True, timeout=100)
            assert "running" not in seen.stdout, seen.stdout
    wait_until("the name is free", lambda: not names() & mine)
    squatter = other_user.start(SQUAT, *mine)
    try:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "held\n"
        with session():
            listed = subprocess.run(
                [BIN / "hora", "workers", "list"], cwd=tmp_path, capture_output=True, text=True, timeout=100
            )
            assert "running" in listed.stdout, listed.stderr
    finally:
        squatter.communicate("\n", timeout=60)


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_another_user_who_takes_a_gpus_name_keeps_that_one_alone_and_is_named(tmp_path: Path):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "97,98"}

    def workers(*words: str) -> subprocess.CompletedProcess[str]:
        line = [BIN / "hora", "workers", *words]
        return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)

    def launched() -> subprocess.CompletedProcess[str]:
        small = ["--cpu", "0.1", "--memory", "0.1", "--all-or-nothing"]
        return workers("launch", *small, "--gpus", "1", "--code", "import time; time.sleep(600)")

    squatter = other_user.start(SQUAT, "hora-gpu-97")
    try:
        assert squatter.stdout is not None
        assert squatter.stdout.readline() == "held\n"
        first, second = launched(), launched()
        assert first.returncode == 0, first.stderr
        assert second.returncode != 0
        assert f"GPU 97: process {squatter.pid} of user {other_user.UID}" in second.stdout, second.stdout
    finally:
        squatter.communicate("\n", timeout=60)
        ended = workers("end")
    assert ended.returncode == 0, ended.stderr


@pytest.mark.security
@pytest.mark.spark
def test_a_tampered_model_of_spark_runs_nothing_under_strict(spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from horovod.spark.torch import TorchModel

    trap, folder = tmp_path / "trap", tmp_path / "model"
    module = torch.nn.Linear(2, 1)
    TorchModel(model=module, optimizer=torch.optim.SGD(module.parameters(), lr=0.5), run_id="run").save(
        f"file://{folder}"
    )
    assert torch.equal(TorchModel.load(f"file://{folder}").getModel().weight, module.weight)
    (part,) = (folder / "metadata").glob("part-*")
    card = json.loads(part.read_text())
    evil = base64.b64encode(pickle.dumps(Exploit(trap))).decode()
    for values in card["paramMap"], card["defaultParamMap"]:
        values.update(dict.fromkeys(values, evil))
    part.write_text(json.dumps(card))
    for leftover in folder.rglob(".*.crc"):
        leftover.unlink()
    monkeypatch.setenv("HORA_STRICT", "1")
    with pytest.raises((ValueError, pickle.UnpicklingError)):
        TorchModel.load(f"file://{folder}")
    assert not trap.exists()


class Exploit:
    """Leaves a trace when it is unpickled."""

    def __init__(self, trap: Path) -> None:
        self.trap = trap

    def __reduce__(self) -> tuple:
        return os.system, (f"touch {self.trap}",)


# A member of the job that speaks the documented protocol (docs/protocol.md) and holds its own key. It says each of these to the
# launcher, on a connection of its own, before it does its work.
MEMBER = """
import os, pickle, socket, struct, sys
sys.path.insert(0, sys.argv[1])
import another_end

class Exploit:
    def __reduce__(self):
        return exec, (f"open({sys.argv[2]!r}, 'w').write('executed in the launcher')",)

def connect():
    env, worker = os.environ, int(os.environ["HORA_WORKER"])
    where = env["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(env["HOROVOD_GLOO_RENDEZVOUS_PORT"])
    with open(env["HORA_SECRET_FILE"], "rb") as file:
        key = file.read()
    return another_end.Client(key, env["HORA_JOB"], worker).connect(socket.create_connection(where, timeout=30))

def said(text, payload=b""):
    return len(text).to_bytes(2, "big") + text.encode() + payload

DEEP = '{"_n":0,"op":"get","x":' + "[" * 20000 + "]" * 20000 + "}"
NONSENSE = [b"", b"abc", b"\\xff" * 60000, said("[1]"), said("{}"), said('{"_n":-5,"op":"pong"}'), said(DEEP),
    said('{"_n":true,"op":"pong"}', b"x"), said('{"_n":1000000000000000000,"op":"pong"}'), said('{"_n":0,"op":[]}'),
    said('{"_n":0,"op":"get","id":1,"key":"k","timeout_s":Infinity}'), said('{"_n":0,"op":"set","key":"k"}'),
    said('{"_n":0,"op":"get","id":1e999,"key":"k","timeout_s":1e999}'), said('{"_n":0,"op":"check","id":1,"keys":null}'),
    said('{"_n":0,"op":"gather","id":1,"key":"k","rank":1e999,"size":20000000,"timeout_s":1}')]

if os.environ["HOROVOD_RANK"] == "1":
    for body in NONSENSE:
        member = connect()
        member.sock.sendall(member.out.frame(body))
        member.sock.settimeout(0.2)
        try:
            member.sock.recv(100)
        except OSError:
            pass
    member = connect()
    member.send({"op": "hello", "id": 1, "name": "x", "worker": -1})
    member.receive()
    for op in ("raised", "returned"):
        lie = {"op": op, "id": 2, "type": "X", "message": "m", "traceback": "t", "consequence": True}
        member.send(lie, pickle.dumps(Exploit()))
        member.receive()
    print("lied", flush=True)
"""


@pytest.mark.security
def test_a_member_that_sends_nonsense_and_pickles_harms_itself_only(tmp_path: Path):
    trap, unit = tmp_path / "trap", Path(__file__).parents[1] / "unit"
    line = [*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, MEMBER + MEET), str(unit), str(trap)]
    job = JobProcess(line, tmp_path)
    status = job.wait()
    assert "lied" in job.text(), job.text()
    assert "Traceback" not in job.text(), job.text()
    assert all(f"rank {rank} sum 2.0" in job.text() for rank in (0, 1)), (status, job.text())
    assert not trap.exists()
    job.assert_nothing_left()


WHISPER = """
import pathlib, os
import torch
import horovod.torch as hvd
hvd.init()
pathlib.Path(f"key {hvd.rank()}").write_bytes(pathlib.Path(os.environ["HORA_SECRET_FILE"]).read_bytes())
numbers = torch.frombuffer(bytearray(b"a tensor, whispered " * 400), dtype=torch.uint8)
assert torch.equal(hvd.allgather(numbers, name="the name of a tensor")[:8000], numbers)
assert hvd.allgather_object("an object, whispered " * 50) == ["an object, whispered " * 50] * 2
"""


@pytest.mark.security
@pytest.mark.skipif(os.geteuid() != 0, reason="listening on the network needs root")
@pytest.mark.parametrize("encrypt", ["always", "never"])
def test_who_listens_hears_no_key_no_message_and_no_number(tmp_path: Path, encrypt: str):
    """With `never` numbers and objects are heard, which also shows that this test listens well."""
    heard, over = bytearray(), threading.Event()

    def listen() -> None:
        while not over.is_set():
            with suppress(TimeoutError):
                heard.extend(listener.recv(70_000))

    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)) as listener:
        listener.bind(("lo", 0))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 2**20)
        listener.settimeout(0.2)
        thread = threading.Thread(target=listen)
        thread.start()
        try:
            line = [*HOROVODRUN, "-np", "2", sys.executable, script(tmp_path, WHISPER)]
            job = JobProcess(line, tmp_path, HORA_TRANSPORT="tcp", HORA_ENCRYPT=encrypt)
            assert job.wait() == 0, job.text()
        finally:
            over.set()
            thread.join(30)
    keys = [(tmp_path / f"key {rank}").read_bytes() for rank in (0, 1)]
    assert b"HORA/" in heard
    for said in (b"a tensor, whispered", b"an object, whispered"):
        assert (said in heard) == (encrypt == "never"), said
    for secret in (b"the name of a tensor", *keys, *(key.hex().encode() for key in keys)):
        assert secret not in heard
