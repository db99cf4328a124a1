"""How long does a job of two empty ranks take, by every launcher here? Run `python benchmarks/launchers.py [--repeats 5]`.

Wall seconds from the command to its end, medians, all launchers in turns: this machine alone, the same command on two nodes
(both are this machine), mpirun's line by the stand-in and by a real Open MPI, ssh (a real sshd), a Slurm allocation (a real
Slurm of two nodes; the time is that of `hora run` inside it), two pods of a Job (on the stand-in of the tests; as root) and
a `RayExecutor` on a running cluster of two nodes, where Ray is installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "tests" / part) for part in (".", "integration")]

HORA = str(Path(sys.executable).with_name("hora"))
RANK = ["true"]


def run(argv: list[str], **environment: str) -> float:
    began = time.perf_counter()
    env = os.environ | environment
    done = subprocess.run(argv, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, check=False)
    if done.returncode != 0:
        sys.exit(f"{' '.join(argv)} failed:\n{done.stdout}")
    return time.perf_counter() - began


def on_two_nodes(folder: Path) -> float:
    secret = folder / "secret"
    secret.touch(mode=0o600)
    secret.write_text("s" * 64)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        meet = f"127.0.0.1:{sock.getsockname()[1]}"
    line = [HORA, "run", "--nnodes", "2", "--meet", meet, "--secret-file", str(secret), "-np", "2"]
    other = subprocess.Popen([*line, "--node-rank", "1", *RANK])
    try:
        return run([*line, "--node-rank", "0", *RANK])
    finally:
        other.wait(60)


def in_pods(folder: Path) -> float:
    from kubernetes_standin import kubernetes

    from hora.launch.kubernetes import Request, manifests
    from waiting import wait_until

    request = Request(name="empty", image="any", command=tuple(RANK))
    with kubernetes(folder) as (cluster, _):
        cluster.apply("secrets", {"metadata": {"name": request.secret}, "data": {"secret": "c2VjcmV0" * 8}})
        began = time.perf_counter()
        for manifest in manifests("job", request):
            cluster.apply(f"{manifest['kind'].lower()}s", manifest)
        wait_until("the job is complete", lambda: cluster.outcome("empty"))
        return time.perf_counter() - began


def on_ray() -> float:
    from horovod.ray import RayExecutor

    began = time.perf_counter()
    with RayExecutor(RayExecutor.create_settings(timeout_s=120), num_workers=2) as executor:
        executor.start()
        executor.run(os.getpid)
    return time.perf_counter() - began


def launchers(stack: ExitStack) -> dict[str, Callable[[], float]]:
    """What is here, by name."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    found: dict[str, Callable[[], float]] = {
        "this machine": lambda: run([HORA, "run", "-np", "2", *RANK]),
        "same command on two nodes": lambda: on_two_nodes(folder),
        "hora mpirun": lambda: run([HORA, "mpirun", "-np", "2", *RANK]),
    }
    if (mpirun := shutil.which("mpirun")) is not None:
        found["Open MPI"] = lambda: run([mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK])
    from slurm_cluster import SlurmCluster, missing

    if not missing():
        (folder / "slurm").mkdir()
        slurm = stack.enter_context(SlurmCluster(folder / "slurm"))
        inside = f"import time, subprocess; b = time.time(); subprocess.run({[HORA, 'run', '-np', '2', *RANK]!r}, check=True)"

        def in_an_allocation() -> float:
            line = ["salloc", "-Q", "-N2", sys.executable, "-c", f"{inside}; print('took', time.time() - b)"]
            return float(slurm.command(*line).rpartition("took ")[2])

        found["Slurm allocation"] = in_an_allocation
    if shutil.which("ssh") and os.path.exists("/usr/sbin/sshd"):
        from ssh_server import SshServer

        (folder / "ssh").mkdir()
        server = stack.enter_context(SshServer(folder / "ssh", {"alpha": "127.0.0.1"}))
        found["ssh"] = lambda: run(
            [HORA, "run", "-np", "2", "-H", "localhost:1,alpha:1", *RANK], HORA_SSH=server.command
        )
    if os.geteuid() == 0 and shutil.which("ip"):
        numbers = itertools.count()
        found["pods of a Job"] = lambda: in_pods(folder / f"pods{next(numbers)}")
    if importlib.util.find_spec("ray"):
        from ray_cluster import RayCluster

        stack.enter_context(RayCluster())
        on_ray()  # the first one starts what later ones find running
        found["Ray"] = on_ray
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    with ExitStack() as stack:
        found = launchers(stack)
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(repeats):
            for name, measure in found.items():
                times[name].append(measure())
    for name, seconds in times.items():
        print(f"{name:28} {statistics.median(seconds):6.2f} s")


if __name__ == "__main__":
    main()
