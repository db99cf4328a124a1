"""Misbehaving workers and callers: clients without the key, floods, daemons, ignored SIGTERM, killed helpers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from job_process import wait_until_gone

import other_user
from hora.launch.job import OutputOptions
from hora.net.sockets import open_socket
from hora.net.wire import REFUSAL, ClientHandshake, Credentials, connect
from hora.workers import daemon
from hora.workers.capacity import GpuClaims
from hora.workers.gateway import Gateway, call_session, find, name_of, server_pid
from hora.workers.gateway import _credentials as credentials
from hora.workers.session import WorkerSession
from waiting import wait_until

KEY = "the key"
FOR_EVER = "import time\nprint('up', flush=True)\ntime.sleep(600)"
NOBODY = 65534


@pytest.fixture
def session(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = f"hora-test-{os.getpid()}-{time.monotonic_ns()}"
    gateway = Gateway(name, KEY, output=OutputOptions(console=False))
    gateway.session.gateway = gateway
    yield gateway.session
    gateway.close()


def launch(session, code, **more):
    request = {"cpu": 0.5, "memory": 1.0, "nvidia_gpu": 0, "env": {}, "code": code, "backend": "local"} | more
    (worker,) = session.launch(1, request)
    return worker["id"]


def ended(session, worker):
    (found,) = [w for ws in session.wait([worker], for_completion=True, timeout_s=60).values() for w in ws]
    return found


def running(session, worker):
    assert session.wait([worker], for_completion=False, timeout_s=60)["workers"]


def num_calls():
    return sum(thread.name == "hora-workers-call" for thread in threading.enumerate())


def silent(name):
    return open_socket(name, limit_s=20)


HELLO = ClientHandshake(Credentials(b"?" * 32, "workers")).hello


@pytest.mark.parametrize(
    "sent",
    [
        json.dumps({"call": "workers", "key": KEY}).encode(),
        b"[" * 100_000,
        b"\0" * 1000,
        HELLO[:5] + b"\n",
        HELLO + b"\xff" * 32,
        HELLO + json.dumps({"call": "workers", "key": KEY}).encode(),
    ],
    ids=["a call", "brackets", "zeros", "half a hello", "a hello and noise", "a hello and a call"],
)
def test_a_connection_without_the_key_is_closed_without_an_answer(session, sent):
    with silent(session.gateway.name) as sock:
        sock.settimeout(20)
        heard = b""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it hung up before reading everything
            sock.sendall(sent)
            while data := sock.recv(4096):
                heard += data
    # At most a refusal is returned, and only for a valid hello.
    assert heard in ((b"", REFUSAL) if sent.startswith(HELLO) else (b"",))
    assert call_session(session.gateway.name, KEY, call="workers") == []


@pytest.mark.parametrize("key", ["", "wrong", "schlüssel", "the key "])
def test_another_key_is_rejected(session, key):
    with pytest.raises(ConnectionError, match="the session of workers refused the connection"):
        call_session(session.gateway.name, key, call="workers")
    assert call_session(session.gateway.name, KEY, call="workers") == []


@pytest.mark.parametrize("payload", [b"", b"not json", b"[" * 100_000, b'["the key"]'])
def test_an_invalid_request_is_answered_with_an_error(session, payload):
    with connect(session.gateway.name, credentials(KEY), timeout_s=20) as connection:
        connection.send({"call": "wait"}, payload)
        assert "error" in json.loads(connection.receive(limit_s=20)[1])
    assert call_session(session.gateway.name, KEY, call="workers") == []


def test_an_invalid_call_is_answered_with_an_error(session):
    with pytest.raises(ValueError, match="unknown call 'dance'"):
        call_session(session.gateway.name, KEY, call="dance")
    with pytest.raises(RuntimeError, match=r"answered: .*'ids'"):
        call_session(session.gateway.name, KEY, call="wait")


INTRUDER = """
import os, socket, sys
os.setuid(65534)
name, hello = sys.argv[1:]
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("\\0" + name)
    try:
        sock.sendall(bytes.fromhex(hello))
        answer = sock.recv(100)
    except (BrokenPipeError, ConnectionResetError):
        answer = b""
print(answer)
"""

SQUATTER = """
import os, socket, sys
os.setuid(65534)
sock = socket.socket(socket.AF_UNIX)
sock.bind("\\0" + sys.argv[1])
sock.listen()
print("ready", flush=True)
while True:
    connection, _ = sock.accept()
    connection.settimeout(5)
    print("heard", connection.recv(100), flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_another_user_is_not_answered_even_with_the_key(session):
    hello = ClientHandshake(credentials(KEY)).hello.hex()
    done = subprocess.run(
        [sys.executable, "-S", "-c", INTRUDER, session.gateway.name, hello],
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert done.stdout == "b''\n", done.stderr


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_no_request_is_sent_to_a_name_held_by_another_user(tmp_path):
    name = name_of(str(tmp_path))
    squatter = subprocess.Popen([sys.executable, "-S", "-c", SQUATTER, name], stdout=subprocess.PIPE, text=True)
    try:
        assert squatter.stdout.readline() == "ready\n"
        assert find(str(tmp_path)) is None
        with pytest.raises(ConnectionError, match=f"belongs to user {NOBODY}"):
            call_session(name, "key", call="launch", code="secret")
        # The session starts without the name and can still be found.
        found = daemon.start(str(tmp_path))
        assert found[0] != name
        assert find(str(tmp_path)) == found
        assert call_session(*found, call="workers") == []
        assert daemon.end(str(tmp_path))
        assert find(str(tmp_path)) is None
    finally:
        squatter.kill()
        heard = squatter.stdout.read()
        squatter.wait()
        squatter.stdout.close()
    assert "secret" not in heard


def test_a_thousand_silent_connections_use_no_threads_and_block_no_calls(session):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)), hard))
    with contextlib.ExitStack() as stack:
        most = 0
        for _ in range(1000):
            stack.enter_context(silent(session.gateway.name))
            most = max(most, num_calls())
        assert call_session(session.gateway.name, KEY, call="workers") == []
        assert most == 0  # unauthenticated connections get no thread
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    wait_until("no call waits", lambda: num_calls() == 0)


def test_a_call_ends_when_its_caller_disconnects(session):
    worker = launch(session, FOR_EVER)
    connection = connect(session.gateway.name, credentials(KEY), timeout_s=20)
    connection.send({"call": "wait"}, json.dumps({"ids": [worker], "for_completion": True, "timeout_s": 0}).encode())
    wait_until("the call has come", lambda: num_calls() == 1)
    connection.close()
    wait_until("no call waits", lambda: num_calls() == 0)


def test_a_hundred_megabytes_of_output(session, tmp_path):
    before = psutil.Process().memory_info().rss
    code = "for _ in range(100):\n    print('x' * 999_999)\nprint('done')"
    worker = launch(session, code, log_dir=str(tmp_path))
    found = ended(session, worker)
    assert (found["status"], found["log_tail"][-1]) == ("succeeded", "done")
    assert (tmp_path / f"{worker}.log").stat().st_size == 100 * 1_000_000 + len("done\n")
    assert psutil.Process().memory_info().rss - before < 64 * 2**20
    assert sum(map(len, found["log_tail"])) <= 2**15


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        {ignore}
        print("daemon", os.getpid(), flush=True)
        time.sleep(600)
    os._exit(0)
os.wait()
{then}
"""


def daemon_pid(session, worker):
    written = re.compile(r"daemon (\d+)")
    wait_until("the daemon has begun", lambda: written.search(session.tail(worker)))
    return int(written.search(session.tail(worker))[1])


@pytest.mark.parametrize("how", ["ends", "is stopped"])
def test_daemons_end_with_their_worker(session, how):
    ignore = "import signal; signal.signal(signal.SIGTERM, signal.SIG_DFL)"
    then = "time.sleep(0.5)" if how == "ends" else "time.sleep(600)"
    worker, other = launch(session, DAEMON.format(ignore=ignore, then=then)), launch(session, FOR_EVER)
    running(session, other)
    pid = daemon_pid(session, worker)
    if how == "ends":
        assert ended(session, worker)["status"] == "succeeded"
    else:
        session.stop([worker])
        assert ended(session, worker)["status"] == "stopped"
    wait_until_gone(pid)
    assert session.workers()[1]["status"] == "running"


def test_a_worker_that_ignores_sigterm_is_killed(session):
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)"
    )
    worker = launch(session, code)
    wait_until("the worker has begun", lambda: "deaf" in session.tail(worker))
    assert session.stop([worker]) == [(worker, 204)]
    (found,) = session.workers()
    assert (found["status"], found["exit_code"]) == ("stopped", 128 + signal.SIGKILL)


def test_a_killed_agent_fails_its_workers_and_the_next_launch_starts_another(session):
    worker = launch(session, FOR_EVER)
    running(session, worker)
    (guardian,) = [p for p in psutil.Process().children() if "hora.launch.agent.agent" in " ".join(p.cmdline())]
    family = guardian.children(recursive=True)
    for process in (guardian, *family):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    found = ended(session, worker)
    assert found["status"] == "failed"
    assert ended(session, launch(session, "print('hello')"))["status"] == "succeeded"


def test_an_agent_whose_guardian_was_killed_gets_no_new_workers(session):
    """It still ends its workers and reports their exit."""
    worker = launch(session, FOR_EVER)
    running(session, worker)
    (guardian,) = [p for p in psutil.Process().children() if "hora.launch.agent.agent" in " ".join(p.cmdline())]
    with open(os.pidfd_open(guardian.pid)) as alive:
        guardian.kill()
        assert select.select([alive], [], [], 20)[0] == [alive]
    assert ended(session, launch(session, "print('hello')"))["status"] == "succeeded"
    assert ended(session, worker)["status"] == "failed"


def test_an_invalid_log_folder_releases_the_granted_resources(session, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"log_dir='.*file/logs' cannot be written: Not a directory"):
        launch(session, "pass", log_dir=str(tmp_path / "file" / "logs"))
    assert session.workers() == []
    assert ended(session, launch(session, "pass", cpu=float(len(os.sched_getaffinity(0)))))["status"] == "succeeded"


def test_code_runs_in_a_real_main_module_and_tracebacks_show_it(session):
    code = "import pickle\ndef f():\n    return 1 / 0\nassert pickle.loads(pickle.dumps(f)) is f\nf()"
    found = ended(session, launch(session, code))
    assert found["exit_code"] == 1
    assert "    return 1 / 0" in found["log_tail"]


def test_workers_do_not_inherit_a_rank(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = os.environ | {"HOROVOD_RANK": "1", "HOROVOD_SIZE": "2", "HOROVOD_CYCLE_TIME": "1"}
    session = WorkerSession(environment, address="-", key="", output=OutputOptions(console=False))
    try:
        code = "import os\nprint(sorted(name for name in os.environ if name.startswith('HOROVOD_')))"
        assert ended(session, launch(session, code))["log_tail"] == ["['HOROVOD_CYCLE_TIME']"]
    finally:
        session.close()


def test_two_sessions_never_share_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    gpus = [f"test-{os.getpid()}-{number}" for number in range(2)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(gpus)}
    first, second = (
        WorkerSession(environment, address="-", key="", output=OutputOptions(console=False)) for _ in range(2)
    )
    code = "import os\nprint(os.environ['CUDA_VISIBLE_DEVICES'])"
    try:
        held = launch(first, code + "\nimport time; time.sleep(600)", nvidia_gpu=1)
        assert ended(second, launch(second, code, nvidia_gpu=1))["log_tail"] == [gpus[1]]
        request = {"cpu": 0.5, "memory": 1.0, "nvidia_gpu": 2, "env": {}, "code": code, "backend": "local"}
        (refused,) = second.launch(1, request)
        assert "1 of 2 are free; 1 are in use by workers of other sessions (GPU test-" in refused["message"]
        first.stop([held])
        assert ended(second, launch(second, code, nvidia_gpu=2))["log_tail"] == [",".join(gpus)]
    finally:
        first.close()
        second.close()


def hora(*arguments):
    return [sys.executable, "-m", "hora", "workers", *arguments]


def assert_unseen_by_a_sidecar(folder):
    """Check that a process in another container of the same user and network does not learn the key."""
    program = (
        f"from hora.workers import gateway as d; print(d.runs(d.name_of({str(folder)!r})), d.find({str(folder)!r}))"
    )
    apart = ["unshare", "--pid", "--fork", "--mount-proc"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode == 0:
        seen = subprocess.run([*apart, sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
        assert seen.stdout == "True None\n", seen.stderr


@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_the_holder_of_a_gpu_is_reported():
    holder = other_user.start(
        'sock = socket.socket(socket.AF_UNIX); sock.bind("\\0hora-gpu-99"); sock.listen(); print("held", flush=True);'
        "sys.stdin.readline()"
    )
    try:
        assert holder.stdout.readline() == "held\n"
        assert GpuClaims().claim("99") == f"GPU 99: process {holder.pid} of user {other_user.UID}"
    finally:
        holder.communicate("", timeout=30)
    ours = GpuClaims()
    assert ours.claim("99") == ours.claim("99") == ""
    assert GpuClaims().claim("99") == f"GPU 99: process {os.getpid()} of user {os.getuid()}"
    ours.keep(())
    assert GpuClaims().claim("99") == ""


def test_a_killed_daemon_session_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    at_once = [
        subprocess.Popen(hora("launch", "--cpu", "0.5", "--memory", "1", "--code", FOR_EVER), stdout=subprocess.PIPE)
        for _ in range(2)
    ]
    ids = [process.communicate(timeout=60)[0].split()[0].decode() for process in at_once]
    assert [process.returncode for process in at_once] == [0, 0]
    name, key = find(str(tmp_path))
    found = call_session(name, key, call="wait", ids=ids, for_completion=False, timeout_s=60)
    assert {worker["id"] for worker in found["workers"]} == set(ids)  # both are in one session
    assert_unseen_by_a_sidecar(tmp_path)
    process = psutil.Process(server_pid(name))
    family = process.children(recursive=True)
    assert len(family) >= 4  # guardian, agent, two workers
    process.kill()
    wait_until_gone(process.pid, *[one.pid for one in family])
    assert find(str(tmp_path)) is None
    with pytest.raises(OSError):
        socket.socket(socket.AF_UNIX).connect("\0" + name)
    assert list(Path(tmp_path).iterdir()) == []
