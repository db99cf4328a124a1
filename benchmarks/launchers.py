"""The time of a job of two empty ranks, by every launcher: `python benchmarks/launchers.py [--repeats 5] [--docs]`.

Wall seconds from the command to its end, medians, all launchers in turns: this machine alone, the same command on two
nodes (both are this machine), mpirun's line by the stand-in and by a real Open MPI, ssh (a real sshd), a Slurm
allocation (a real Slurm of two nodes; the time is that of `hora run` inside it), two pods of a Job (on the stand-in of
the tests; as root), a `HorovodRunner` on a running Spark cluster and a `RayExecutor` on a running Ray cluster of two
nodes, where these are installed. Prints the table of docs/launchers.md; `--docs` puts it there.
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
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

sys.path += [str(Path(__file__).parents[1] / "tests" / part) for part in (".", "integration")]

HORA = str(Path(sys.executable).with_name("hora"))
RANK = ["true"]
DOCS = Path(__file__).parents[1] / "docs" / "launchers.md"

# The rows of the table: place, command, what a job there can survive.
PLACES = (
    ("this machine", "`hora run -np 4 python train.py`", "elastic (`--min-np`): any worker"),
    (
        "ssh",
        "`horovodrun -np 8 -H a:4,b:4 python train.py`",
        "elastic: any worker, any host but the launcher's",
    ),
    (
        "an mpirun line",
        "`hora mpirun -np 8 -H a:4,b:4 … python train.py`",
        "nothing: mpirun lines have no elastic jobs",
    ),
    (
        "the same command on every node",
        "`hora run --join -np 8 python train.py`",
        "elastic: any worker, any node but the first ([with a store](elastic.md#without-a-process-that-must-not-die): "
        "any node)",
    ),
    (
        "Slurm",
        "`sbatch -N2 --ntasks-per-node=4 --wrap 'exec horovodrun -np 8 python train.py'`",
        "elastic: any worker; a commit before the time limit",
    ),
    ("[Spark](runner.md)", "`HorovodRunner(np=8).run(train)`", "`horovod.spark.run_elastic`: any worker"),
    ("[Ray](ray.md)", '`@hora.distributed(num_processes=8, on="ray")`', "`ElasticRayExecutor`: any worker, any node"),
    (
        "Kubernetes",
        "`hora kubernetes manifest job … \\| kubectl apply -f -`",
        "elastic (`--min-nodes`): any pod but the first; with `--any-leader` any pod",
    ),
)
_UNMEASURED = "not measured"


def table(seconds: Mapping[str, str]) -> str:
    """The table of docs/launchers.md, with the time of each place."""
    rows = [
        f"| {place} | {line} | {seconds.get(place, _UNMEASURED)} | {survives} |" for place, line, survives in PLACES
    ]
    return "\n".join(["| place | command | start | survives |", "|---|---|---|---|", *rows, ""])


def table_in(text: str) -> str:
    """The table as it stands in a page."""
    lines = text.splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if line.startswith("| place |"))
    return "".join(itertools.takewhile(lambda line: line.startswith("|"), lines[first:]))


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

    from hora.launch.providers.kubernetes import ManifestRequest, manifests
    from waiting import wait_until

    request = ManifestRequest(name="empty", image="any", command=tuple(RANK))
    with kubernetes(folder) as (cluster, _):
        cluster.apply("secrets", {"metadata": {"name": request.secret}, "data": {"secret": "c2VjcmV0" * 8}})
        began = time.perf_counter()
        for manifest in manifests("job", request):
            cluster.apply(f"{manifest['kind'].lower()}s", manifest)
        wait_until("the job is complete", lambda: cluster.outcome("empty"))
        return time.perf_counter() - began


def on_spark() -> float:
    from sparkdl import HorovodRunner

    began = time.perf_counter()
    HorovodRunner(np=2).run(os.getpid)
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
        "the same command on every node": lambda: on_two_nodes(folder),
        "an mpirun line": lambda: run([HORA, "mpirun", "-np", "2", *RANK]),
    }
    if (mpirun := shutil.which("mpirun")) is not None:
        found["Open MPI"] = lambda: run([mpirun, "--allow-run-as-root", "--oversubscribe", "-np", "2", *RANK])
    from slurm_cluster import SlurmCluster, missing

    if not missing():
        (folder / "slurm").mkdir()
        slurm = stack.enter_context(SlurmCluster(folder / "slurm"))
        job = [HORA, "run", "-np", "2", *RANK]
        inside = f"import time, subprocess; b = time.time(); subprocess.run({job!r}, check=True)"

        def in_an_allocation() -> float:
            line = ["salloc", "-Q", "-N2", sys.executable, "-c", f"{inside}; print('took', time.time() - b)"]
            return float(slurm.command(*line).rpartition("took ")[2])

        found["Slurm"] = in_an_allocation
    if shutil.which("ssh") and os.path.exists("/usr/sbin/sshd"):
        from ssh_server import SshServer

        (folder / "ssh").mkdir()
        server = stack.enter_context(SshServer(folder / "ssh", {"alpha": "127.0.0.1"}))
        found["ssh"] = lambda: run(
            [HORA, "run", "-np", "2", "-H", "localhost:1,alpha:1", *RANK], HORA_SSH=server.command
        )
    if os.geteuid() == 0 and shutil.which("ip"):
        numbers = itertools.count()
        found["Kubernetes"] = lambda: in_pods(folder / f"pods{next(numbers)}")
    if shutil.which("java"):
        from spark_cluster import StandaloneCluster, spark_session

        cluster = stack.enter_context(StandaloneCluster())
        stack.enter_context(spark_session(cluster.url))
        on_spark()  # the first one starts what later ones find running
        found["[Spark](runner.md)"] = on_spark
    if importlib.util.find_spec("ray"):
        from ray_cluster import RayCluster

        stack.enter_context(RayCluster())
        on_ray()  # the first one starts what later ones find running
        found["[Ray](ray.md)"] = on_ray
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--docs", action="store_true", help="put the table into docs/launchers.md")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        found = launchers(stack)
        times: dict[str, list[float]] = {name: [] for name in found}
        for _ in range(arguments.repeats):
            for name, measure in found.items():
                times[name].append(measure())
    medians = {name: f"{statistics.median(seconds):.1f} s" for name, seconds in times.items()}
    print(table(medians))
    for name in medians.keys() - {place for place, _, _ in PLACES}:
        print(f"{name}: {medians[name]}")
    if arguments.docs:
        text = DOCS.read_text()
        DOCS.write_text(text.replace(table_in(text), table(medians)))


if __name__ == "__main__":
    main()
