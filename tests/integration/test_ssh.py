"""Jobs on other hosts: a real sshd on loopback with its own keys, and two network namespaces."""

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from job_process import lines_of, run_command, running, wait_until_gone
from ssh_server import SSHD, SshServer

import horovod
from hora.launch.options import Options
from hora.launch.providers.ssh import Ssh, SshHosts
from hora.launch.slots import HostInfo
from hora.launch.start import start
from hora.watch.recording import read_run

pytestmark = [
    pytest.mark.ssh,
    pytest.mark.skipif(
        not (os.path.exists(SSHD) and shutil.which("ssh") and shutil.which("ssh-keygen")),
        reason="needs ssh, ssh-keygen and sshd (apt install openssh-server)",
    ),
]

SLEEPER = (
    "import os, pathlib, time;pathlib.Path(os.environ['READY'], os.environ['HOROVOD_RANK']).touch();time.sleep(300)"
)


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """nodea and nodeb: two separate hosts from the launcher's point of view."""
    with SshServer(tmp_path_factory.mktemp("ssh"), {"nodea": "127.0.0.1", "nodeb": "127.0.0.2"}) as server:
        yield server


@pytest.fixture
def ready(tmp_path):
    folder = tmp_path / "ready"
    folder.mkdir()
    return folder


REPORT = """
import json, os
names = ["HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK",
         "HOROVOD_CROSS_SIZE", "HOROVOD_HOSTNAME", "ODD", "CUDA_VISIBLE_DEVICES", "_HOROVOD_SECRET_KEY",
         "OLDPWD", "HOROVOD_CYCLE_TIME", "HOROVOD_CONTROLLER"]
print(json.dumps([os.getcwd()] + [os.environ.get(name) for name in names]))
"""


def test_ranks_directory_and_environment_reach_the_hosts(hosts, tmp_path):
    odd = "two\nlines, 'quotes', \"more\", $HOME, `id`, ü"
    folder = tmp_path / "it's a $directory"
    folder.mkdir()
    env = {
        "HORA_SSH": hosts.command,
        "ODD": odd,
        "CUDA_VISIBLE_DEVICES": "3",
        "_HOROVOD_SECRET_KEY": "x",
        "OLDPWD": "/x",
    }
    code, out, err = run_command(
        "horovodrun", "-np", "3", "-H", "nodea:1,nodeb:2", "--cycle-time-ms", "2", "python", "-c", REPORT,
        cwd=folder, env=env,
    )  # fmt: skip
    assert code == 0, err
    private = [None, None, None]
    expected = {
        0: ["0", "3", "0", "1", "0", "2", "nodea"],
        1: ["1", "3", "0", "2", "1", "2", "nodeb"],
        2: ["2", "3", "1", "2", "0", "1", "nodeb"],
    }
    for rank, place in expected.items():
        assert json.loads(lines_of(out, rank)[0]) == [str(folder), *place, odd, *private, "2.0", "gloo"]


@pytest.mark.slow
def test_the_page_shows_ranks_on_another_host_and_this_one(hosts, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import torch, hora, horovod.torch as hvd\nhvd.init()\nhora.report(loss=0.5 + hvd.rank())\n"
        "print(hvd.allreduce(torch.arange(3.) + hvd.rank(), op=hvd.Sum).tolist())\n"
    )
    record = tmp_path / "run.hora"
    code, out, err = run_command(
        "hora", "run", "-np", "2", "-H", "nodeb:1,localhost:1", "--dashboard", "--record", str(record),
        "python", str(script), env={"HORA_SSH": hosts.command},
    )  # fmt: skip
    assert code == 0, err
    assert [lines_of(out, rank) for rank in range(2)] == [["[1.0, 3.0, 5.0]"]] * 2
    assert "see it live: http://127.0.0.1:" in err
    seen = read_run(record)  # the data behind the page
    assert {place.host: place.state for place in seen.places.values()} == {"nodeb": "done", "localhost": "done"}
    assert seen.hosts.keys() == {"nodeb", "localhost"}
    assert "loss" in seen.grid.metrics
    assert seen.outcome == "done"


SPY = """
import os, pathlib, sys
secret = pathlib.Path(os.environ["HORA_SECRET_FILE"]).read_bytes()
seen = []
for process in pathlib.Path("/proc").iterdir():
    for name in ("cmdline", "environ"):
        try:
            content = (process / name).read_bytes()
        except OSError:
            continue
        if secret in content or secret.hex().encode() in content:
            seen.append(f"{process}/{name}")
print(len(secret) >= 16, seen)
"""


def test_the_secret_is_in_no_process_list_and_no_environment(hosts):
    code, out, err = run_command(
        "hora",
        "run",
        "-np",
        "2",
        "-H",
        "nodea:1,nodeb:1",
        "python",
        "-c",
        SPY,
        env={"HORA_SSH": hosts.command},
    )
    assert code == 0, err
    assert lines_of(out, 0) == lines_of(out, 1) == ["True []"]


def test_fail_rank_1_on_another_host(hosts):
    """Reports the first failure with its output, returns its status, and leaves no process."""
    script = (
        "import os, sys, time\nif os.environ['HOROVOD_RANK'] == '1': sys.exit('the disk is on fire')\ntime.sleep(300)"
    )
    job = ["-np", "2", "-H", "nodea:1,nodeb:1", "python", "-c", script]
    code, _, err = run_command("horovodrun", *job, env={"HORA_SSH": hosts.command})
    assert code == 1
    assert "Traceback" not in err  # of the launcher; the rank prints only its message
    assert "Horovod detected that one or more processes exited with non-zero status" in err
    assert "Process name: 1\nExit code: 1\n" in err
    assert "the disk is on fire" in err.partition("Process name: 1")[2]
    assert "process 1 on host nodeb failed" in err


def test_a_program_that_the_host_does_not_have(hosts):
    code, _, err = run_command(
        "hora", "run", "-np", "1", "-H", "nodeb:1", "no-such-program", "x", env={"HORA_SSH": hosts.command}
    )
    assert code == 127
    assert "cannot run 'no-such-program': No such file or directory" in err


def test_a_function_on_two_hosts_and_its_failure_there(hosts, monkeypatch):
    monkeypatch.setenv("HORA_SSH", hosts.command)
    factor = 5

    def work(x):
        host = os.environ["HOROVOD_HOSTNAME"]
        if x < 0 and host == "nodeb":
            raise ValueError(f"no {x} on {host}")
        return host, factor * x

    values = horovod.run(work, (3,), num_proc=2, hosts="nodea:1,nodeb:1")
    assert values == [("nodea", 15), ("nodeb", 15)]
    with pytest.raises(RuntimeError, match="ValueError: no -1 on nodeb") as caught:
        horovod.run(work, (-1,), num_proc=2, hosts="nodea:1,nodeb:1")
    assert isinstance(caught.value.__cause__, ValueError)


def run_on(provider):
    start(Options(num_proc=1, command=("true",)), dict(os.environ), provider=provider)


def test_a_host_without_the_interpreter_is_distinguished_from_an_unreachable_one(hosts):
    class Elsewhere(SshHosts):
        def start(self, host, order):
            super().start(host, dataclasses.replace(order, command=("/nowhere/python", *order.command[1:])))

    words = r"(?s)reaches these hosts.*nodeb: env: .*/nowhere/python.*No such.*at the same place: /nowhere/python"
    with pytest.raises(RuntimeError, match=words):
        run_on(Elsewhere([HostInfo("nodeb", 1)], Ssh.from_environ({"HORA_SSH": hosts.command})))


def test_a_host_with_another_version_is_rejected_with_an_explanation(hosts, tmp_path):
    """Its Python finds a Hora that differs only in its version number."""
    (tmp_path / "sitecustomize.py").write_text("import hora.version\nhora.version.version = lambda: '0.0.1'\n")
    ssh = dataclasses.replace(Ssh.from_environ({"HORA_SSH": hosts.command}), python_path=str(tmp_path))
    words = r"(?s)nodeb: hora: node nodeb: .*it has Hora 0.0.1, but the first node has .*; install the same version"
    with pytest.raises(RuntimeError, match=words):
        run_on(SshHosts([HostInfo("nodeb", 1)], ssh))


@pytest.mark.parametrize("number", [None, signal.SIGTERM, signal.SIGINT], ids=["limit", "SIGTERM", "SIGINT"])
def test_a_host_that_never_answers(number, tmp_path):
    """The launcher gives up at the start timeout or on a signal, and ends the hanging ssh."""
    marker = tmp_path / "ready"
    marker.mkdir()
    fake = tmp_path / "ssh"
    fake.write_text(f"#!/bin/sh\n[ $1 = -G ] && exec echo hostname 127.0.0.1\ntouch {marker}/0\nexec sleep 300\n")
    fake.chmod(0o755)
    limit = "2" if number is None else "100"
    job = ["horovodrun", "-np", "1", "-H", "nodez:1", "--start-timeout", limit, "true"]
    with running(*job, env={"HORA_SSH": str(fake)}, ready=marker, count=1) as launcher:
        if number is not None:
            launcher.process.send_signal(number)
        code, _, err = launcher.finish()
    assert code == (1 if number is None else 128 + number)
    assert "Traceback" not in err
    assert number is not None or "nodez: no answer within 2 s (--start-timeout)" in err


# Messages of a compromised host: its agent joins and then sends one of these.
NONSENSE = {
    "no name": "({'a': 1},)",
    "an unknown name": "({'op': 'Halt'},)",
    "no JSON": "({'op': 'Exited'}, b'{}}')",
    "a field is missing": "({'op': 'Exited'}, b'{\"worker\": 0}')",
    "deep JSON": "({'op': 'Exited'}, b'[' * 40000)",
    "a code that is none": '({\'op\': \'Exited\'}, b\'{"worker": 0, "code": 1e999, "reason": ""}\')',
    "a list": "({'op': 'Exited'}, b'[1]')",
    "a number for a stream": "({'op': 'Output', 'worker': 0, 'stream': 7}, b'x')",
    "the end of another host's worker": '({\'op\': \'Exited\'}, b\'{"worker": 7, "code": 0, "reason": ""}\')',
}
# An `ssh` that runs such an agent instead of the requested command.
LIAR = """#!{python}
import json, struct, sys
if '-G' in sys.argv: print('hostname 127.0.0.1'); sys.exit()
from hora.launch.agent.protocol import Join, Start, Welcome, MESSAGES
from hora.net.messages import pack, unpack
from hora.net.wire import connect
from hora.net.session import ClientSession
from hora.net.wire import Credentials
from hora.version import version
given = json.loads(sys.stdin.readline())
key = Credentials(bytes.fromhex(given['key']), 'nodes', given['speaker'])
session = ClientSession(connect(tuple(given['where']), key, timeout_s=30), None)
name, index, slots = given['name'], given['speaker'], given['slots']
session.send(*pack(Join({index}, name, slots, version(), [], [])))
answer = unpack(MESSAGES, *session.receive(limit_s=30))
if not isinstance(answer, Welcome): sys.exit(str(answer))
while not isinstance(unpack(MESSAGES, *session.receive(limit_s=30)), Start): pass
session.send(*{lie})
try:
    while True: session.receive(limit_s=60)
except (EOFError, OSError): pass
"""


@pytest.mark.parametrize("what", NONSENSE)
def test_an_agent_that_sends_invalid_messages_is_dropped(what, tmp_path):
    fake = tmp_path / "ssh"
    fake.write_text(LIAR.format(python=sys.executable, index="index", lie=NONSENSE[what]))
    fake.chmod(0o755)
    code, _, err = run_command("horovodrun", "-np", "1", "-H", "nodez:1", "true", env={"HORA_SSH": str(fake)})
    assert code == 1
    assert "the agent on host nodez ended unexpectedly" in err
    assert "it sent what no agent sends" in err


@pytest.mark.parametrize("index", ["index + 1", "index - 1"])
def test_an_agent_that_joins_under_another_hosts_index_is_rejected(index, tmp_path):
    fake = tmp_path / "ssh"
    fake.write_text(LIAR.format(python=sys.executable, index=index, lie="({'op': 'Pong'},)"))
    fake.chmod(0o755)
    line = ["horovodrun", "-np", "2", "-H", "nodey:1,nodez:1", "true"]
    code, _, err = run_command(*line, env={"HORA_SSH": str(fake)})
    assert code == 1
    assert "nobody waits for it any more" in err


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare (util-linux)")
def test_a_host_that_does_not_have_the_working_directory(tmp_path_factory):
    """Another file system is mounted there over the launcher's directory."""
    folder = tmp_path_factory.mktemp("mounted")
    (folder / "work").mkdir()
    elsewhere = ("unshare", "-m", "sh", "-c", f'mount -t tmpfs none {folder} && exec "$@"', "sh")
    with SshServer(tmp_path_factory.mktemp("ssh"), {"elsewhere": "127.0.0.1"}, prefix=elsewhere) as server:
        code, _, err = run_command(
            "hora", "run", "-np", "1", "-H", "elsewhere:1", "pwd", cwd=folder / "work", env={"HORA_SSH": server.command}
        )
    assert code == 127
    assert f"cannot enter the directory '{folder}/work': No such file or directory" in err
    assert "process 0 on host elsewhere" in err


def test_a_missing_ssh_is_reported():
    code, _, err = run_command("horovodrun", "-np", "1", "-H", "nodez:1", "true", env={"HORA_SSH": "/nowhere/ssh"})
    assert code == 1
    assert "nodez: cannot run '/nowhere/ssh': No such file or directory; is ssh installed?" in err


def test_unreachable_hosts_are_reported_one_by_one(hosts, ready):
    """nodea is reachable, but with two hosts out of reach the launcher starts nothing there either."""
    env = {"HORA_SSH": hosts.command, "READY": str(ready)}
    code, _, err = run_command(
        "horovodrun", "-np", "3", "-H", "nodea:1,locked:1,down:1", "python", "-c", SLEEPER, env=env
    )
    assert code == 1
    assert "could not connect to some hosts via ssh" in err
    assert "Traceback" not in err
    listed = {line.split(":")[0].strip(): line for line in err.splitlines() if line.startswith("  ")}
    assert set(listed) == {"locked", "down"}
    assert "Permission denied" in listed["locked"]
    assert "Connection refused" in listed["down"]
    assert list(ready.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda n: n.name)
def test_the_end_of_the_launcher_ends_the_remote_workers(hosts, ready, number):
    env = {"HORA_SSH": hosts.command, "READY": str(ready)}
    job = ["hora", "run", "-np", "2", "-H", "nodea:1,nodeb:1", "sh", "-c", f'python -c "{SLEEPER}"; true']
    with running(*job, env=env, ready=ready, count=2) as launcher:
        above = [parent for process in launcher.processes() for parent in process.parents()]
        agents = {process.pid for process in above if "hora.launch.agent.session" in process.cmdline()}
        assert len(agents) == 4  # each with its guardian
        launcher.process.send_signal(number)
        code, _, _ = launcher.finish()
        wait_until_gone(*agents)
        assert code == (-signal.SIGKILL if number == signal.SIGKILL else 128 + number)


COUNTING = """
import os, pathlib, sys, time
pathlib.Path(os.environ["READY"], os.environ["HOROVOD_RANK"]).touch()
while not os.path.exists(os.environ["GO"]): time.sleep(0.05)
print("still here", flush=True)
"""


@pytest.mark.parametrize("victim", ["ssh", "sshd"])
def test_a_job_continues_without_the_ssh_that_started_its_agents(hosts, ready, tmp_path, victim):
    """The ranks' output and exit codes still arrive."""
    env = {"HORA_SSH": hosts.command, "READY": str(ready), "GO": str(tmp_path / "go")}
    job = ["hora", "run", "-np", "2", "-H", "nodea:1,nodeb:1", "python", "-c", COUNTING]
    with running(*job, env=env, ready=ready, count=2) as launcher:
        for host in ("nodea", "nodeb"):
            ssh = _ssh_client(launcher, host)
            killed = ssh if victim == "ssh" else _agent_of(launcher, ("nodea", "nodeb").index(host)).parents()[1].pid
            os.kill(killed, signal.SIGKILL)
            wait_until_gone(ssh)
        (tmp_path / "go").touch()
        code, out, err = launcher.finish()
    assert code == 0, err
    assert lines_of(out, 0) == lines_of(out, 1) == ["still here"]


def test_the_end_of_an_agent_ends_its_host_and_the_job(hosts, ready):
    env = {"HORA_SSH": hosts.command, "READY": str(ready)}
    job = ["hora", "run", "-np", "2", "-H", "nodea:1,nodeb:1", "python", "-c", SLEEPER]
    with running(*job, env=env, ready=ready, count=2) as launcher:
        agents = [_agent_of(launcher, rank).pid for rank in (0, 1)]
        os.kill(agents[1], signal.SIGKILL)
        code, _, err = launcher.finish()
        wait_until_gone(*agents)
    assert code == 255
    assert "process 1 on host nodeb failed" in err
    assert "the agent on host nodeb ended unexpectedly" in err


def _agent_of(job, rank):
    """Return the agent on a rank's host, the child of its guardian."""
    (worker,) = [process for process in job.processes() if process.environ().get("HOROVOD_RANK") == str(rank)]
    agent = worker.parents()[0]
    assert "hora.launch.agent.session" in agent.cmdline()
    return agent


def test_a_silent_host_is_dropped_and_ends_its_workers_when_it_resumes(hosts, ready):
    """Its ssh connection works, but no process behind it answers."""
    env = {"HORA_SSH": hosts.command, "READY": str(ready)}
    job = ["hora", "run", "-np", "2", "-H", "nodea:1,nodeb:1", "--silence-timeout", "12", "python", "-c", SLEEPER]
    with running(*job, env=env, ready=ready, count=2) as launcher:
        (rank,) = [process for process in launcher.processes() if process.environ().get("HOROVOD_RANK") == "1"]
        stopped = [rank, *rank.parents()[:2]]  # its agent, and the agent's guardian
        for process in stopped:
            process.suspend()
        launcher.process.wait(150)
        for process in stopped:
            process.resume()
        code, _, err = launcher.finish()
    assert code == 255
    assert "process 1 on host nodeb failed" in err
    assert "host nodeb has not answered for 12 s and was given up" in err


def _ssh_client(job, hostname):
    for process in job.processes():
        words = process.cmdline()
        if words[:1] == ["ssh"] and hostname in words:
            return process.pid
    raise AssertionError(f"no ssh to {hostname} is running")


def test_doctor_examines_hosts_and_reports_the_locked_one(hosts):
    code, out, err = run_command("hora", "doctor", "-H", "nodeb:2,locked,localhost", env={"HORA_SSH": hosts.command})
    assert (code, err) == (1, "")
    nodeb, locked, localhost, between, end = out.split("\n\n")
    assert "an allreduce was tried and works" in nodeb
    assert "Permission denied" in locked
    assert "an allreduce was tried and works" in localhost
    assert "agree on all hosts" in between
    assert "every host can open connections to every other" in between
    assert end == "1 problem found.\n"


@pytest.fixture(scope="module")
def namespaces(tmp_path_factory):
    """Two hosts joined by a cable: the launcher runs in the first, sshd in the second."""
    if os.geteuid() != 0 or not shutil.which("ip"):
        pytest.skip("needs root and ip (iproute2)")
    here, there = f"hora-h{os.getpid()}", f"hora-t{os.getpid()}"
    inside = ("ip", "netns", "exec")
    try:
        for command in (
            f"netns add {here}", f"netns add {there}",
            f"link add cable0 netns {here} type veth peer name cable1 netns {there}",
            f"-n {here} addr add 10.77.0.1/24 dev cable0", f"-n {there} addr add 10.77.0.2/24 dev cable1",
            f"-n {here} link set lo up", f"-n {there} link set lo up",
            f"-n {here} link set cable0 up", f"-n {there} link set cable1 up",
        ):  # fmt: skip
            done = subprocess.run(["ip", *command.split()], capture_output=True, text=True, check=False)
            if done.returncode != 0:
                pytest.skip(f"cannot make network namespaces: {done.stderr.strip()}")
        folder = tmp_path_factory.mktemp("netns")
        with SshServer(folder, {"there": "10.77.0.2"}, prefix=(*inside, there)) as server:
            yield here, there, server
    finally:
        for name in (here, there):
            subprocess.run(["ip", "netns", "delete", name], capture_output=True, check=False)


# Reduces until the file exists, so that any disturbance shows.
BUSY = """
import os, pathlib, sys, torch, horovod.torch as hvd
hvd.init()
over = rounds = 0
while not over:
    over = hvd.allreduce(torch.tensor([float(os.path.exists(sys.argv[1]))]), op=hvd.Max).item()
    total = hvd.allreduce(torch.ones(1000) * (hvd.rank() + 1), op=hvd.Sum)
    assert total.tolist() == [3.0] * 1000, total
    if rounds == 0:
        pathlib.Path(sys.argv[2], str(hvd.rank())).touch()
    rounds += 1
print(rounds > 1, hvd.local_size(), hvd.cross_size(), flush=True)
"""

# An attacker on the other host: garbage, half messages, huge lengths, a pickle that runs a command, a crowd.
STRANGER = """
import json, os, pickle, socket, sys
class Exploit:
    def __reduce__(self):
        return os.system, ("touch " + sys.argv[2],)
evil = pickle.dumps(Exploit())
attacks = [b"", b"GET / HTTP/1.1\\r\\n\\r\\n", os.urandom(100_000), b"\\xff" * 8, evil,
           len(evil).to_bytes(4, "big") + evil, len(evil).to_bytes(8, "little") + evil]
for address, port in json.loads(sys.argv[1]):
    for attack in attacks:
        with socket.create_connection((address, port), timeout=10) as sock:
            try:
                sock.sendall(attack)
            except OSError:
                pass
    crowd = [socket.create_connection((address, port), timeout=10) for _ in range(200)]
print("done")
"""


@pytest.mark.netns
def test_a_job_on_two_network_namespaces_survives_attacks_over_the_cable(namespaces, tmp_path, ready):
    """One rank runs in each. Every listener is bound to the cable's own address and survives the attack."""
    here, there, server = namespaces
    flag, trap = tmp_path / "finish", tmp_path / "executed"
    job = ["horovodrun", "-np", "2", "-H", "10.77.0.1:1,10.77.0.2:1", "-p", str(server.ports["there"])]
    command = [*job, "-i", str(server.key), "python", "-c", BUSY, str(flag), str(ready)]
    prefix = ("ip", "netns", "exec", here)
    with running(*command, env={"HORA_SSH": server.command}, prefix=prefix, ready=ready, count=2) as launcher:
        ports = {(a, p) for name in (here, there) for a, p in _listening(name)} - {("10.77.0.2", server.ports["there"])}
        assert {address for address, _ in ports} <= {"10.77.0.1", "10.77.0.2"}
        assert any(address == "10.77.0.1" for address, _ in ports)
        for address, attacker in (("10.77.0.1", there), ("10.77.0.2", here)):
            targets = json.dumps([port for port in ports if port[0] == address])
            attack = ["ip", "netns", "exec", attacker, sys.executable, "-c", STRANGER, targets, str(trap)]
            assert subprocess.run(attack, capture_output=True, text=True, timeout=60, check=True).stdout == "done\n"
        flag.touch()
        code, out, err = launcher.finish()
    assert code == 0, err
    assert lines_of(out, 0) == lines_of(out, 1) == ["True 1 2"]
    assert not trap.exists()


def _listening(namespace):
    """Yield the addresses and ports on which processes listen in a namespace, except on loopback."""
    table = subprocess.run(["ip", "netns", "exec", namespace, "cat", "/proc/net/tcp"], capture_output=True, check=True)
    for row in (line.split() for line in table.stdout.decode().splitlines()[1:]):
        address, port = row[1].split(":")
        numbers = [str(byte) for byte in reversed(bytes.fromhex(address))]
        if row[3] == "0A" and numbers[0] != "127":
            yield ".".join(numbers), int(port, 16)


@pytest.mark.netns
def test_a_cut_cable_ends_the_job_here_and_the_workers_there(namespaces, ready):
    here, there, server = namespaces
    job = ["run", "-np", "2", "-H", "10.77.0.1:1,there:1", "--network-interface", "cable0", "--silence-timeout", "10"]
    command = ["hora", *job, "python", "-c", SLEEPER]
    env = {"HORA_SSH": f"{server.command} -o ServerAliveInterval=1", "READY": str(ready)}
    try:
        with running(*command, env=env, prefix=("ip", "netns", "exec", here), ready=ready, count=2) as launcher:
            subprocess.run(["ip", "-n", there, "link", "set", "cable1", "down"], check=True)
            code, _, err = launcher.finish()
    finally:
        subprocess.run(["ip", "-n", there, "link", "set", "cable1", "up"], check=True)
    assert code == 255
    assert "process 1 on host there failed" in err
