"""A foreign launcher's job with a secret file, attacked at every port by another user of the machine."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from test_security_local import Victim, attacks, reaction

import other_user
from hora.errors import AuthenticationError
from hora.net.wire import REFUSAL, Credentials, connect, new_secret

# Starts its two ranks as mpirun does: with variables only.
JOB = """
import os, pathlib, subprocess, sys, time

def rank():
    import torch
    import horovod.torch as hvd
    hvd.init()
    rounds, over = 0, False
    while not over:
        finish = torch.tensor([float(pathlib.Path(sys.argv[1]).exists()), float(hvd.rank())])
        over, total = hvd.allreduce(finish, op=hvd.Sum, name=f"round {rounds}").tolist()
        assert total == 1.0
        rounds += 1
        time.sleep(0.01)  # the processors are for those who attack, too
        if rounds == 1:
            os.write(1, f"meeting {hvd.rank()}\\n".encode())  # at once: two ranks write to one file
    assert hvd.allgather_object({"rank": hvd.rank()}) == [{"rank": 0}, {"rank": 1}]

def launch():
    ranks = []
    for number in ("0", "1"):
        place = {"RANK": number, "SIZE": "2", "LOCAL_RANK": number, "LOCAL_SIZE": "2"}
        place = {f"OMPI_COMM_WORLD_{name}": value for name, value in place.items()}
        env = os.environ | place | {"OMPI_MCA_ess_base_jobid": str(os.getpid())}
        ranks.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
    codes = [rank.wait(200) for rank in ranks]
    print("RESULT [0, 10]" if codes == [0, 0] else codes, flush=True)

rank() if "OMPI_COMM_WORLD_RANK" in os.environ else launch()
"""

# Another user: probes each port as a client of torch's store and with empty messages, and opens too many connections.
STRANGER = """
_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
heard, held = b"", []
for port in map(int, sys.argv[1:]):
    for said in (b"", bytes([0]) + struct.pack("=I", 0x3C85F7CE), bytes([1]) + struct.pack("=Q", 4) + b"salt"):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=5) as sock:
            sock.sendall(said)
            sock.shutdown(socket.SHUT_WR)
            heard += sock.recv(1000)
    for _ in range(600):  # without waiting for each: a listener that is full lets them wait
        held.append(socket.socket())
        held[-1].setblocking(False)
        held[-1].connect_ex(("127.0.0.1", port))
print(len(heard), flush=True)
sys.stdin.readline()
"""


@pytest.fixture
def secret_file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


@pytest.mark.skipif(not other_user.possible, reason=other_user.WHY_NOT)
def test_a_foreign_launchers_job_with_a_secret_file_rejects_other_users(tmp_path: Path, secret_file: Path):
    victim = Victim(tmp_path, JOB, HORA_SECRET_FILE=str(secret_file), HORA_STRICT="1")
    try:
        assert {c.laddr.ip for c in victim.listening()} == {"127.0.0.1"}
        hello, said = attacks(victim.trap)
        for port in victim.ports:
            for attack in said:
                assert reaction(port, attack) in ((b"", REFUSAL) if attack.startswith(hello) else (b"",))
            with pytest.raises(AuthenticationError):
                connect(("127.0.0.1", port), Credentials(new_secret(), "job"), timeout_s=30)
        stranger = other_user.start(STRANGER, *map(str, victim.ports))
        try:
            assert stranger.stdout.readline() == "0\n"
            victim.finish()  # while the other user holds its connections
        finally:
            stranger.kill()
            stranger.communicate(timeout=60)
        assert "without a secret" not in victim.job.text()
    finally:
        victim.job.process.kill()
