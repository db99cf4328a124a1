"""Command lines of other projects, word for word, with the files that these projects use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from job_process import run_command

OPEN_MPI = shutil.which("mpirun")
SHOW = "from os import environ as e; print('rank', e['HOROVOD_RANK'], 'of', e['HOROVOD_SIZE'], e['HOROVOD_HOSTNAME'])"


@pytest.fixture
def discover_hosts(tmp_path):
    """A discovery script like mpi-operator's: prints the running workers, sorted, without slots."""
    script = tmp_path / "discover_hosts.sh"
    script.write_text("#!/bin/sh\necho localhost\n")
    script.chmod(0o555)
    return str(script)


# A machine with an interface eth0 and with mpi-operator's script at its usual path.
FLYTES_POD = """
{{ mount --bind {folder}/etc /etc && ip link set lo up && ip link add eth0 type veth peer name cable &&
ip addr add 10.88.0.2/24 dev eth0 && ip link set eth0 up && ip link set cable up; }} || exit 99
exec "$@"
"""
_ETC = ("passwd", "group", "hosts", "nsswitch.conf", "ld.so.cache", "localtime")


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare (util-linux)")
def test_flytes_horovodrun(discover_hosts, tmp_path):
    line = (
        "horovodrun -np 2 --log-level INFO --network-interface eth0 --min-np 2 --max-np 2 --slots-per-host 2 "
        "--host-discovery-script /etc/mpi/discover_hosts.sh --elastic-timeout 1200 --verbose"
    )
    (tmp_path / "etc" / "mpi").mkdir(parents=True)
    shutil.copy(discover_hosts, tmp_path / "etc" / "mpi" / "discover_hosts.sh")
    for path in (Path("/etc", name) for name in _ETC):
        if path.exists():
            shutil.copy(path, tmp_path / "etc")
    pod = ("unshare", "--mount", "--net", "sh", "-c", FLYTES_POD.format(folder=tmp_path), "sh")
    code, out, err = run_command(*line.split(), sys.executable, "-c", SHOW, prefix=pod)
    if code == 99:
        pytest.skip(f"cannot make namespaces: {err}")
    assert code == 0, err
    assert "rank 0 of 2 localhost" in out
    assert "rank 1 of 2 localhost" in out


def test_arenas_elastic_job(discover_hosts):
    line = (
        "horovodrun --verbose --log-level=DEBUG -np 2 --min-np 1 --max-np 2 --start-timeout 100 --elastic-timeout 1000 "
        f"--slots-per-host 2 --host-discovery-script {discover_hosts}"
    )
    code, out, err = run_command(*line.split(), sys.executable, "-c", SHOW)
    assert (code, out.count("of 2 localhost")) == (0, 2), err


def test_mpi_operators_sample_with_its_hostfile(tmp_path):
    hostfile = tmp_path / "hostfile"
    hostfile.write_text("localhost slots=1\n127.0.0.2 slots=1\n")
    line = (
        "hora mpirun -np 2 --allow-run-as-root -bind-to none -map-by slot -x LD_LIBRARY_PATH -x PATH -x "
        "NCCL_DEBUG=INFO -mca pml ob1 -mca btl ^openib"
    )
    env = {"OMPI_MCA_orte_default_hostfile": str(hostfile), "OMPI_MCA_orte_keep_fqdn_hostnames": "true"}
    code, out, err = run_command(*line.split(), sys.executable, "-c", SHOW, env=env)
    assert code == 0, err
    assert sorted(out.splitlines()) == ["rank 0 of 2 localhost", "rank 1 of 2 127.0.0.2"]


# The script that mpi-operator gave its launchers before it used ssh, with a `kubectl` that knows two pods, both of
# which are this machine.
KUBEXEC = """#!/bin/sh
set -x
POD_NAME=$1
shift
{folder}/kubectl exec{interactive} ${{POD_NAME}} -- /bin/sh -c "$*"
"""
KUBECTL = """#!/bin/sh
test "$1" = exec && shift
if test "$1" = -i; then shift; else exec </dev/null; fi
case $1 in job-worker-[01]) ;; *) echo "pods \\"$1\\" not found" >&2; exit 1;; esac
export OF_POD=$1; shift
test "$1" = -- && shift
exec "$@"
"""


@pytest.mark.parametrize("interactive", [" -i", ""])
def test_mpi_operators_kubexec(tmp_path, interactive):
    for name, text in {"kubexec.sh": KUBEXEC, "kubectl": KUBECTL}.items():
        (tmp_path / name).write_text(text.format(folder=tmp_path, interactive=interactive) if "{" in text else text)
        (tmp_path / name).chmod(0o555)
    (tmp_path / "hostfile").write_text("job-worker-0 slots=1\njob-worker-1 slots=1\n")
    env = {
        "OMPI_MCA_plm_rsh_agent": str(tmp_path / "kubexec.sh"),
        "OMPI_MCA_orte_default_hostfile": str(tmp_path / "hostfile"),
    }
    line = "hora mpirun -np 2 --allow-run-as-root -bind-to none -map-by slot -mca btl_tcp_if_include lo"
    code, out, err = run_command(*line.split(), "sh", "-c", "echo rank $OMPI_COMM_WORLD_RANK in $OF_POD", env=env)
    if interactive:
        assert code == 0, err
        assert sorted(out.splitlines()) == ["rank 0 in job-worker-0", "rank 1 in job-worker-1"]
    else:
        assert code != 0
        assert "job-worker-0: " in err
        assert "no order has come on standard input" in err
        assert "kubectl exec -i" in err


def test_nvidias_wrapper_keeps_its_own_flags(tmp_path):
    bind = tmp_path / "bind.sh"
    bind.write_text('shift 2; test "$1" = -- && shift; exec "$@"\n')
    line = f"horovodrun -np 2 -H localhost:2 --mpi-args=--oversubscribe bash {bind} --cpu=exclusive --ib=single --"
    code, out, err = run_command(*line.split(), sys.executable, "-c", SHOW)
    assert (code, out.count("of 2 localhost")) == (0, 2), err


@pytest.mark.skipif(OPEN_MPI is None, reason="Open MPI is not installed (Debian: openmpi-bin)")
@pytest.mark.parametrize(
    ("start", "total"),
    [
        (
            "import torch, horovod.torch as hvd; hvd.init(); rank = hvd.rank()",
            "hvd.allreduce(torch.ones(1), op=hvd.Sum).item()",
        ),
        (
            "import torch, torch.distributed as dist; dist.init_process_group('hora'); rank = dist.get_rank()",
            "(sent := torch.ones(1), dist.all_reduce(sent))[0].item()",
        ),
    ],
    ids=["hvd", "process group"],
)
def test_ranks_of_a_real_open_mpi_find_one_another(tmp_path, start, total):
    script = tmp_path / "train.py"
    script.write_text(f"{start}\ntotal = {total}\nprint(f'rank {{rank}} sum {{total}}\\n', end='', flush=True)\n")
    line = [
        OPEN_MPI,
        "--allow-run-as-root",
        "--oversubscribe",
        "-np",
        "2",
        "-bind-to",
        "none",
        sys.executable,
        str(script),
    ]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    done = subprocess.run(line, capture_output=True, text=True, timeout=280, env=env)
    assert sorted(done.stdout.splitlines()) == ["rank 0 sum 2.0", "rank 1 sum 2.0"], done.stderr
    assert "without a secret" in done.stderr  # the missing protection is logged
