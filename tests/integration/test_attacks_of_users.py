"""Attacks by other users of the machine, and the information and leftovers visible to them.

Uses commands, `horovod.torch` and sockets only. docs/security.md lists these tests and related ones in other files.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
import torch.distributed as dist
from attacked_jobs import MEET, MEETING, Meeting, script
from job_process import BIN, JobProcess, run_command
from namespaces import Host

import other_user
from waiting import wait_until

APART = ["unshare", "--pid", "--fork", "--mount-proc"]


SESSION = """
import pathlib, time
from hora.workers import await_workers, launch_workers
launched = launch_workers(1, cpu=0.1, memory=0.1, code="pass")
await_workers(launched, timeout_seconds=100)
print("session is open", flush=True)
while not pathlib.Path("over").exists():
    time.sleep(0.1)
"""


def test_commands_that_look_for_a_session_are_not_logged_as_rejected(tmp_path: Path):
    job = JobProcess([sys.executable, script(tmp_path, SESSION)], tmp_path)
    job.wait_for_text("session is open")
    status, out, _ = run_command("hora", "workers", "list", cwd=tmp_path)
    assert (status, "succeeded" in out) == (0, True), out
    (tmp_path / "over").touch()
    assert job.wait() == 0
    assert "closed a connection" not in job.text()
    job.assert_nothing_left()


# Another user who connects to every port and local socket of the job's user as soon as it opens, from one or many
# addresses.
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
def test_a_connection_flood_of_another_user_does_not_keep_a_job_from_starting(tmp_path: Path, num_addresses: int):
    """Both run in a separate network namespace, so that the flood does not reach the jobs of other tests."""
    try:
        host = Host()
    except (AssertionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"this machine does not let us make network namespaces: {error}")
    crowd = other_user.start(CROWD, str(os.getuid()), str(num_addresses), inside=host.command)
    try:
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "crowding\n"
        Meeting(tmp_path, inside=host.command).begun().finish()
    finally:
        crowd.communicate("over\n", timeout=60)
        host.close()


@pytest.mark.security
def test_a_running_job_does_not_reveal_its_secret(tmp_path: Path):
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
        spy = (
            "for one in sys.argv[1:]:\n"
            "    with contextlib.suppress(OSError), open(one, 'rb') as f: print(one, f.read(1))"
        )
        private = [f"/proc/{process.pid}/{name}" for process in processes for name in ("environ", "maps", "mem")]
        assert other_user.run(spy, *private, *files) == ""
    meeting.finish()
    text = meeting.job.log.read_bytes()
    assert not any(secret in text or secret.hex().encode() in text for secret in held)


@pytest.mark.security
def test_nothing_of_a_job_is_left_when_any_of_its_processes_is_killed(tmp_path: Path):
    """Kills the launcher, the agent, its guardian and each rank, in a separate job each."""
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


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
@pytest.mark.parametrize("what", ["--output-filename", "--record", "--timeline-filename"])
def test_files_of_a_job_follow_no_links_of_others_and_keep_none_of_their_files(tmp_path: Path, what: str):
    """Another user may write to the folder, and has put a link and a file there under the names that the job uses."""
    thesis, folder = tmp_path / "thesis", tmp_path / "shared"
    thesis.write_text("precious")
    names = ["rank.0/stdout", "rank.1/stdout"] if what == "--output-filename" else ["link", "file"]
    link, file = (folder / name for name in names)
    for place in {link.parent, file.parent, folder}:
        place.mkdir(parents=True, exist_ok=True)
        place.chmod(0o777)
    link.symlink_to(thesis)
    os.lchown(link, other_user.UID, other_user.UID)
    file.touch()
    file.chmod(0o666)
    os.chown(file, other_user.UID, other_user.UID)
    held = file.open("rb")
    train = script(tmp_path, MEET)
    for place in (folder,) if what == "--output-filename" else (link, file):
        done = run_command(str(BIN / "hora"), "run", "-np", "2", what, str(place), sys.executable, train)
        assert done[0] == 0, done
    assert thesis.read_text() == "precious"
    with held:
        assert held.read() == b""
    for place in (link, file):
        found = place.lstat()
        assert stat.S_ISREG(found.st_mode)
        assert found.st_uid == os.geteuid()
        assert found.st_size > 0
        assert what == "--timeline-filename" or not found.st_mode & 0o077


ASK_FOR = """
with socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=10) as sock:
    sock.sendall(f"GET {sys.argv[3]} HTTP/1.1\\r\\nHost: {sys.argv[1]}:{sys.argv[2]}\\r\\n\\r\\n".encode())
    if "half" in sys.argv:
        sock.shutdown(socket.SHUT_WR)
    while data := sock.recv(10000):
        print(data.decode())
"""


@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_the_address_with_which_a_browser_is_started_opens_the_page_for_its_user_alone(tmp_path: Path):
    """Every user reads the arguments of a browser's process in /proc."""
    browser, arguments, timeline = tmp_path / "browser", tmp_path / "arguments", tmp_path / "timeline.json"
    browser.write_text(f'#!/bin/sh\necho "$@" > {arguments}.part; mv {arguments}.part {arguments}\n')
    browser.chmod(0o755)
    spans = [{"ph": "B", "pid": 1, "name": "ALLREDUCE", "ts": 1}, {"ph": "E", "pid": 1, "ts": 2}]
    timeline.write_text(json.dumps(spans))
    job = JobProcess([str(BIN / "hora"), "view", "--open", str(timeline)], tmp_path, BROWSER=f"{browser} %s")
    wait_until("the browser has started", arguments.exists)
    address = urlsplit(arguments.read_text().strip())
    assert "token" not in address.geturl()
    assert address.fragment == address.query == ""
    assert not [one for process in job.processes() for one in process.cmdline() if "token" in one]
    place = (str(address.hostname), str(address.port))
    for how in ("whole", "half"):
        said = other_user.run(ASK_FOR, *place, address.path, how)
        assert "403" in said.splitlines()[0]
        assert "token" not in said

    def ask(path: str, **headers: str) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection(":".join(place), timeout=10)
        connection.request("GET", path, headers=headers)
        return connection.getresponse()

    answer = ask(address.path)
    found, _, token = answer.headers["Location"].partition("#token=")
    assert (answer.status, found) == (303, "/")
    assert ask("/api/run", Authorization=f"Bearer {token}").status == 200
    assert ask(address.path[:-1] + ("1" if address.path.endswith("0") else "0")).status == 403
    page = f"http://{':'.join(place)}/"
    top = subprocess.run(
        [str(BIN / "hora"), "top", "--url", page], input=f"{token}\n", capture_output=True, text=True, timeout=100
    )
    assert top.stdout.strip() == f"{page}#token={token}", top
    job.process.send_signal(signal.SIGINT)
    job.wait()


# Ranks of a foreign launcher, with its variables and a secret file.
@pytest.mark.security
@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_a_foreign_launchers_store_rejects_another_user(tmp_path: Path):
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
    """In addition, a process of the same user in another container, which shares only the network, does not find the
    session.
    """
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
def test_another_user_who_takes_a_gpus_name_blocks_only_that_gpu_and_is_reported(tmp_path: Path):
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
