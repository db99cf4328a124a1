"""The manifests of `hora kubernetes` applied to a stand-in for a cluster, whose pods run the node agent."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import yaml
from job_process import BIN
from kubernetes_standin import Kubernetes, kubernetes

from waiting import wait_until

pytestmark = [
    pytest.mark.netns,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None,
        reason="needs root, ip (iproute2) and unshare",
    ),
]
PATHS = {
    "Secret": "api/v1/namespaces/default/secrets",
    "Service": "api/v1/namespaces/default/services",
    "Job": "apis/batch/v1/namespaces/default/jobs",
    "JobSet": "apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets",
    "NetworkPolicy": "apis/networking.k8s.io/v1/namespaces/default/networkpolicies",
    "PodDisruptionBudget": "apis/policy/v1/namespaces/default/poddisruptionbudgets",
}

TRAINING = """
import os, sys, time
import torch
import horovod.torch as hvd

hvd.init()
state = hvd.elastic.TorchState(step=0)
state.persist("commits")

@hvd.elastic.run
def train(state):
    while not hvd.broadcast_object(os.path.exists("over"), root_rank=0):
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="step").item() == hvd.size()
        state.step += 1
        if hvd.rank() == 0:
            print("step", state.step, "of", hvd.size(), flush=True)
        time.sleep(0.05)  # arithmetic
        state.commit()

train(state)
print("done", flush=True)
"""


class User:
    """A user with a terminal.

    Commands run with `kubectl` if it is installed; otherwise equivalent requests are sent directly.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self._url, self._kubectl = url, shutil.which("kubectl")
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": {"server": url}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "", "namespace": "default"}}],
            "current-context": "test",
        }
        (folder / "config").write_text(yaml.safe_dump(config))
        self._env = {**os.environ, "KUBECONFIG": str(folder / "config"), "HOME": str(folder)}

    def start(self, manifest: str) -> None:
        """Create the Secret as the manifest's comment says, then apply the manifest."""
        (line,) = re.findall(r"^#   (openssl .*)$", manifest, re.MULTILINE)
        name = line.split()[line.split().index("generic") + 1]
        if self._kubectl:
            # `create` would send Kubernetes' binary format, which the stand-in does not read.
            self._run(f"{line} --dry-run=client -o json | kubectl apply --validate=false -f -")
            self._run("kubectl apply --validate=false -f -", manifest)
        else:
            secret = self._run(line.partition("|")[0]).encode()
            data = {"secret": base64.b64encode(secret).decode()}
            self._post({"kind": "Secret", "metadata": {"name": name}, "data": data})
            for part in yaml.safe_load_all(manifest):
                self._post(part)

    def _run(self, line: str, given: str | None = None) -> str:
        done = subprocess.run(
            ["sh", "-c", line], input=given, capture_output=True, text=True, env=self._env, timeout=280
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def _post(self, manifest: dict) -> None:
        path = PATHS[manifest["kind"]]
        data = json.dumps(manifest).encode()
        with urllib.request.urlopen(urllib.request.Request(f"{self._url}/{path}", data), timeout=60) as answer:
            assert answer.status == 201

    def delete_pod(self, name: str) -> None:
        if self._kubectl:
            self._run(f"kubectl delete pod {name} --wait=false")
            return
        request = urllib.request.Request(f"{self._url}/api/v1/namespaces/default/pods/{name}", method="DELETE")
        urllib.request.urlopen(request, timeout=60).close()


@pytest.fixture
def cluster(tmp_path: Path):
    try:
        entered = kubernetes(tmp_path / "pods")
        running, url = entered.__enter__()
    except (AssertionError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make namespaces: {error}")
    try:
        yield running, User(tmp_path, url)
    finally:
        entered.__exit__(None, None, None)


def manifest(kind: str, *arguments: str) -> str:
    line = [str(BIN / "hora"), "kubernetes", "manifest", kind, "--name", "train", "--image", "i", *arguments]
    return subprocess.run(line, capture_output=True, text=True, check=True, timeout=60).stdout


def assert_secret_is_hidden(cluster: Kubernetes) -> None:
    """Check that the secret is in no command line, environment or log, but only in the pods' files."""
    ((_, found),) = [(key, one) for key, one in cluster.objects.items() if key[0] == "secrets"]
    secret = base64.b64decode(found["data"]["secret"]).strip()
    assert len(secret) == 64
    processes = [process for pod in cluster.pods.values() for process in pod.job.processes()]
    assert len(processes) >= 4
    for process in processes:
        for name in ("cmdline", "environ"):
            try:
                assert secret not in Path(f"/proc/{process.pid}/{name}").read_bytes()
            except OSError:  # it has ended
                continue
    assert not any(secret.decode() in pod.log() for pod in cluster.pods.values())


@pytest.mark.slow
def test_pods_of_an_elastic_job_leave_or_are_killed_and_are_replaced(cluster, tmp_path: Path):
    running, user = cluster
    (tmp_path / "train.py").write_text(TRAINING)
    command = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} train.py"]
    user.start(manifest("job", "--min-nodes", "1", "--", *command))

    def first() -> str:
        return running.pods["train-0"].log() if "train-0" in running.pods else ""

    def wait_for(size: int, after: str) -> None:
        wait_until(f"a world of {size}", lambda: f"of {size}\n" in first()[len(after) :] or "train-0" in failed(), 120)
        assert not failed(), first()

    def failed() -> list[str]:
        return [name for name, pod in running.pods.items() if pod.status() not in (None, 0, 75, -9)]

    wait_for(2, "")
    assert_secret_is_hidden(running)
    gone, before = running.pods["train-1"], first()
    user.delete_pod("train-1")
    wait_until("the pod has left", lambda: gone.status() is not None, 120)
    assert gone.status() == 75, gone.log()  # its ranks have committed
    wait_for(1, before)
    assert "failed" not in first()
    wait_for(2, first())  # a new pod has replaced it
    before = first()
    running.pods["train-1"].kill()
    wait_until("the first one goes on alone", lambda: "of 1\n" in first()[len(before) :], 120)
    wait_until("it is one of two again", lambda: "of 2\n" in first()[len(before) :].rpartition("of 1\n")[2], 120)
    (tmp_path / "over").touch()
    wait_until("the job is over", lambda: running.outcome("train"), 120)
    assert running.outcome("train") == "Complete", first()
    for pod in [*running.past, *running.pods.values()]:
        pod.job.assert_nothing_left(60)


@pytest.mark.slow
def test_an_elastic_job_survives_preemption_and_the_loss_of_a_node_and_succeeds_with_its_first_pod(cluster, tmp_path):
    running, user = cluster
    (tmp_path / "train.py").write_text(TRAINING)
    command = ["sh", "-c", f"cd {tmp_path} && exec {sys.executable} train.py"]
    user.start(manifest("job", "--min-nodes", "1", "--", *command))

    def wait_for(size: int, after: int) -> None:
        wait_until(f"a world of {size}", lambda: f"of {size}\n" in running.pods["train-0"].log()[after:], 120)

    wait_until("both pods are there", lambda: len(running.pods) == 2)
    wait_for(2, 0)
    for disrupt in (running.preempt, running.lose_node_of):
        before = len(running.pods["train-0"].log())
        disrupt("train-1")
        wait_for(1, before)
        wait_for(2, len(running.pods["train-0"].log()))  # a new pod has replaced it
    assert not running.outcome("train")
    (tmp_path / "over").touch()
    wait_until("the job is over", lambda: running.outcome("train"), 120)
    assert running.outcome("train") == "Complete", running.pods["train-0"].log()
    for pod in [*running.past, *running.pods.values()]:
        pod.job.assert_nothing_left(60)


def test_a_job_set_starts_again_after_preemption_but_not_after_a_failure(cluster, tmp_path: Path):
    running, user = cluster
    script = f"echo I run; test ! -e {tmp_path}/over || exit 7; exec sleep 600"
    user.start(manifest("jobset", "--", "sh", "-c", script))
    wait_until("both pods are there", lambda: len(running.pods) == 2)
    first = running.pods["train-node-0-0"]
    wait_until("both ranks run", lambda: first.log().count("I run") == 2, 120)
    running.preempt("train-node-0-1")
    wait_until("the job has started again", lambda: running.num_restarts == 1, 120)
    wait_until("with new pods", lambda: running.pods["train-node-0-0"] is not first, 120)
    first = running.pods["train-node-0-0"]
    wait_until("both ranks run again", lambda: first.log().count("I run") == 2, 120)
    (tmp_path / "over").touch()
    first.kill()
    wait_until("the job has failed", lambda: running.outcome("train-node-0"), 120)
    assert (running.outcome("train-node-0"), running.num_restarts) == ("Failed", 1)
    for pod in [*running.past, *running.pods.values()]:
        pod.job.assert_nothing_left(60)


@pytest.mark.parametrize("what", ["a rank fails", "the second pod is killed", "the first pod is killed"])
def test_a_failure_in_a_pod_of_a_job_set_fails_the_job_and_is_reported(cluster, what):
    running, user = cluster
    fails = "echo I run; test $HOROVOD_RANK != 1 || { echo oh no >&2; exit 7; }; sleep 600"
    user.start(manifest("jobset", "--", "sh", "-c", fails if what == "a rank fails" else "echo I run; exec sleep 600"))
    wait_until("both pods are there", lambda: len(running.pods) == 2)
    first, second = (running.pods[f"train-node-0-{index}"] for index in (0, 1))
    if "killed" in what:
        wait_until("both ranks run", lambda: first.log().count("I run") == 2, 120)
        (first if "first" in what else second).kill()
    wait_until("the job has failed", lambda: running.outcome("train-node-0"), 120)
    wait_until("both pods have ended", lambda: None not in (first.status(), second.status()), 120)
    assert running.outcome("train-node-0") == "Failed"
    if what == "a rank fails":
        assert (first.status(), second.status()) == (7, 7)
        assert "hora run: process 1 on host train-node-0-1 failed with exit code 7" in first.log()
        assert "oh no" in first.log()
    elif what == "the second pod is killed":
        assert "the agent on host train-node-0-1" in first.log()
    else:
        assert "the first node, 10.81.0.1, is gone" in second.log()
    for pod in running.pods.values():
        pod.job.assert_nothing_left(60)
