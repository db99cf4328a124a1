"""Minimal Kubernetes stand-in: an API server that accepts manifests, and pods that are processes in namespaces.

The API covers what `kubectl apply`, `create secret` and `delete pod` need of Secrets, Services, Jobs, JobSets and the
objects beside them. A pod has its own network, host name, processes and /etc: its Secrets are files there, its hosts
file names the other pods, an `emptyDir` is the machine's own folder, and its command is process 1, which gets SIGTERM,
a grace period and SIGKILL. The controllers follow a Job's `backoffLimit`, `podFailurePolicy` and `successPolicy`, and
a JobSet's `failurePolicy`, for pods that end, are deleted, preempted, or lost with their node. Not implemented: images,
scheduling, probes, quotas, DNS, access control.
"""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from job_process import BIN, JobProcess
from namespaces import Host, joined

Manifest = dict[str, Any]

_ADDRESSES = ("10.81.0.1", "10.81.0.2")
_RESOURCES = {
    "/api/v1": [("Secret", "secrets"), ("Service", "services"), ("Pod", "pods")],
    "/apis/batch/v1": [("Job", "jobs")],
    "/apis/networking.k8s.io/v1": [("NetworkPolicy", "networkpolicies")],
    "/apis/policy/v1": [("PodDisruptionBudget", "poddisruptionbudgets")],
    "/apis/jobset.x-k8s.io/v1alpha2": [("JobSet", "jobsets")],
}
# Overlay this pod's files on the machine's in a new mount namespace; then run the command as process 1.
_ENTER = (
    "hostname $NAME && mount -t tmpfs tmpfs /mnt && cp -a /etc/. /mnt/ && cp -a $FILES/. /mnt/ && mount --bind /mnt "
    "/etc && "
    'unset NAME FILES && exec "$@"'
)


class Pod:
    """A container's process. `node`: the host that runs it; `name`: its host name."""

    def __init__(self, name: str, container: Manifest, spec: Manifest, node: Host, folder: Path, files: Path) -> None:
        self.name, self._grace_s = name, spec["terminationGracePeriodSeconds"]
        self.conditions: list[str] = []
        env = {item["name"]: item["value"] for item in container["env"] if "value" in item}
        index = name.rpartition("-")[2]
        env |= {item["name"]: index for item in container["env"] if "valueFrom" in item}
        enter = ["unshare", "--uts", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", _ENTER]
        argv = node.command(*enter, name, *container["command"])
        path = {"PATH": f"{BIN}:{os.environ['PATH']}", "NAME": name, "FILES": str(files)}
        self.job = JobProcess(argv, folder, **env, **path)

    def log(self) -> str:
        return self.job.text()

    def status(self) -> int | None:
        return self.job.process.poll()

    def delete(self) -> None:
        """Delete the pod as the kubelet does; return when it is gone."""
        self._signal(signal.SIGTERM)
        try:
            self.job.process.wait(self._grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self.job.process.wait(60)

    def _signal(self, number: signal.Signals) -> None:
        """Signal the container's process 1, which `unshare` has started."""
        outer = self.job.process.pid
        with suppress(OSError):
            for child in Path(f"/proc/{outer}/task/{outer}/children").read_text().split():
                os.kill(int(child), number)


class Kubernetes:
    """`folder`: for logs and files."""

    def __init__(self, folder: Path, nodes: list[Host]) -> None:
        self._folder, self._nodes = folder, nodes
        self._lock = threading.Lock()
        self.objects: dict[tuple[str, str], Manifest] = {}
        self.pods: dict[str, Pod] = {}
        self.past: list[Pod] = []
        self._outcomes: dict[str, str] = {}
        self.num_restarts = 0  # of JobSets
        self._closed = threading.Event()
        self._threads: list[threading.Thread] = []

    # ---- requests of the API server -------------------------------------------------------------------------------

    def apply(self, kind: str, manifest: Manifest) -> None:
        name = manifest["metadata"]["name"]
        with self._lock:
            self.objects[kind, name] = manifest
        if kind == "jobs":
            self._start(self._run_job, name, manifest["spec"], manifest["spec"]["template"]["spec"]["subdomain"])
        elif kind == "jobsets":
            self._start(self._run_job_set, name, manifest["spec"])

    def delete_pod(self, name: str) -> None:
        self.pods[name].delete()

    def preempt(self, name: str) -> None:
        """Have a pod make room for another one, as the scheduler does."""
        self.pods[name].conditions.append("DisruptionTarget")
        self.pods[name].delete()

    def lose_node_of(self, name: str) -> None:
        """Stop a pod's processes; the pod is collected with its node."""
        self.pods[name].conditions.append("DisruptionTarget")
        self.pods[name].kill()

    def outcome(self, job: str) -> str:
        """Return "Complete", "Failed", or "" while the job runs."""
        return self._outcomes.get(job, "")

    # ---- the controllers of Jobs and JobSets ------------------------------------------------------------------------

    def _start(self, controller: Callable[..., Any], *arguments: Any) -> None:
        thread = threading.Thread(target=controller, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run_job_set(self, name: str, spec: Manifest) -> None:
        network = spec["network"]
        assert network["enableDNSHostnames"]
        (part,) = spec["replicatedJobs"]
        assert part["replicas"] == 1
        while not self._closed.is_set():
            reason = self._run_job(f"{name}-{part['name']}-0", part["template"]["spec"], network["subdomain"])
            rules = [r for r in spec.get("failurePolicy", {}).get("rules", []) if reason in r["onJobFailureReasons"]]
            if not reason or not rules or rules[0]["action"] != "RestartJobSetAndIgnoreMaxRestarts":
                return
            self.num_restarts += 1

    def _run_job(self, name: str, spec: Manifest, subdomain: str) -> str:
        """Run an indexed Job to its end; return the reason of its failure, or nothing."""
        assert spec["completionMode"] == "Indexed"
        assert spec["completions"] == spec["parallelism"] == len(self._nodes)
        self._outcomes.pop(name, None)
        missing, pods, done, num_failures = [*reversed(range(spec["completions"]))], dict[int, Pod](), set[int](), 0
        while not self._closed.wait(0.05):
            pods |= {index: self._create_pod(name, index, spec, subdomain) for index in missing}
            missing = []
            if any(pod.status() is not None for pod in pods.values()):
                self._closed.wait(1.0)  # the controller counts once a second
            ended = {index: pods.pop(index) for index, pod in [*pods.items()] if pod.status() is not None}
            actions = {index: _action(spec, pod) for index, pod in ended.items() if pod.status()}
            done |= ended.keys() - actions.keys()
            num_failures += [*actions.values()].count("Count")
            if "FailJob" in actions.values() or num_failures > spec["backoffLimit"]:
                self._end(name, pods, "Failed")
                return "PodFailurePolicy" if "FailJob" in actions.values() else "BackoffLimitExceeded"
            if _succeeded(spec, done):
                self._end(name, pods, "Complete")
                return ""
            missing = [*actions]
        return ""

    def _end(self, name: str, pods: Mapping[int, Pod], outcome: str) -> None:
        """End the pods that still run."""
        deletions = [threading.Thread(target=pod.delete) for pod in pods.values()]
        for deletion in deletions:
            deletion.start()
        for deletion in deletions:
            deletion.join()
        self._outcomes[name] = outcome

    def _create_pod(self, job: str, index: int, spec: Manifest, subdomain: str) -> Pod:
        pod_spec = spec["template"]["spec"]
        (container,) = pod_spec["containers"]
        name = f"{job}-{index}"
        folder = self._folder / f"{name}.{time.monotonic_ns()}"
        files = folder / "etc"
        files.mkdir(parents=True)
        hosts = [f"{address} {job}-{i}.{subdomain} {job}-{i}" for i, address in enumerate(_ADDRESSES)]
        (files / "hosts").write_text("\n".join(["127.0.0.1 localhost", *hosts, ""]))
        for mount in container["volumeMounts"]:
            (volume,) = [volume for volume in pod_spec["volumes"] if volume["name"] == mount["name"]]
            if "secret" in volume:
                assert mount["mountPath"].startswith("/etc/")
                self._mount_secret(volume["secret"], files / Path(mount["mountPath"]).name)
        pod = Pod(name, container, pod_spec, self._nodes[index], folder, files)
        with self._lock:
            self.past += [self.pods[name]] if name in self.pods else []
            self.pods[name] = pod
        return pod

    def _mount_secret(self, secret: Manifest, where: Path) -> None:
        where.mkdir()
        for name, text in self.objects["secrets", secret["secretName"]]["data"].items():
            (where / name).touch(mode=secret["defaultMode"])
            (where / name).write_bytes(base64.b64decode(text))

    def close(self) -> None:
        self._closed.set()
        for pod in [*self.past, *self.pods.values()]:
            pod.job.kill()
        for thread in self._threads:
            thread.join(60)


def _action(spec: Manifest, pod: Pod) -> str:
    """Return what the Job's podFailurePolicy says of a pod that has failed."""
    for rule in spec.get("podFailurePolicy", {}).get("rules", []):
        conditions = [one["type"] for one in rule.get("onPodConditions", []) if one["status"] == "True"]
        codes = rule.get("onExitCodes", {"operator": "In", "values": []})
        assert codes["operator"] == "In"
        if set(conditions) & set(pod.conditions) or pod.status() in codes["values"]:
            return str(rule["action"])
    return "Count"


def _succeeded(spec: Manifest, done: set[int]) -> bool:
    for rule in spec.get("successPolicy", {}).get("rules", []):
        indexes = {int(rule["succeededIndexes"])} if "succeededIndexes" in rule else set(range(spec["completions"]))
        if len(done & indexes) >= rule.get("succeededCount", len(indexes)):
            return True
    return len(done) == spec["completions"]


class ApiServer(ThreadingHTTPServer):
    def __init__(self, cluster: Kubernetes) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.cluster = cluster
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: ApiServer

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in ("/api", "/apis", *_RESOURCES):
            self._answer(200, _discovery(path))
            return
        kind, name = self._named()
        found = self.server.cluster.objects.get((kind, name))
        self._answer(*((200, found) if found is not None else (404, _status("NotFound", 404))))

    def do_POST(self) -> None:
        manifest = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind, _ = self._named()
        self.server.cluster.apply(kind, manifest)
        self._answer(201, manifest)

    def do_DELETE(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length", "0")))
        _, name = self._named()
        threading.Thread(target=self.server.cluster.delete_pod, args=(name,), daemon=True).start()
        self._answer(200, {"kind": "Pod", "apiVersion": "v1", "metadata": {"name": name}})

    def _named(self) -> tuple[str, str]:
        found = re.search(r"/namespaces/[\w-]+/(\w+)/?([\w.-]*)", self.path.partition("?")[0])
        return (found[1], found[2]) if found else ("", "")

    def _answer(self, code: int, content: Mapping[str, Any]) -> None:
        data = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


def _discovery(path: str) -> Mapping[str, Any]:
    """Return the API discovery documents that `kubectl` requests."""
    if path == "/api":
        return {"kind": "APIVersions", "versions": ["v1"]}
    if path == "/apis":
        groups = [name.removeprefix("/apis/") for name in _RESOURCES if name.startswith("/apis/")]
        versions = [{"groupVersion": group, "version": group.rpartition("/")[2]} for group in groups]
        return {
            "kind": "APIGroupList",
            "apiVersion": "v1",
            "groups": [
                {"name": one["groupVersion"].rpartition("/")[0], "versions": [one], "preferredVersion": one}
                for one in versions
            ],
        }
    verbs = ["create", "delete", "get", "list", "patch"]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": path.rpartition("/api/")[2] if path.startswith("/api/") else path.removeprefix("/apis/"),
        "resources": [
            {"name": plural, "singularName": kind.lower(), "namespaced": True, "kind": kind, "verbs": verbs}
            for kind, plural in _RESOURCES[path]
        ],
    }


def _status(reason: str, code: int) -> Mapping[str, Any]:
    return {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "code": code}


@contextmanager
def kubernetes(folder: Path) -> Iterator[tuple[Kubernetes, str]]:
    """Start a cluster of two nodes; yield it and its API server's URL.

    Raise AssertionError or CalledProcessError if namespaces are not available.
    """
    with ExitStack() as stack:
        cluster = Kubernetes(folder, stack.enter_context(joined(_ADDRESSES)))
        stack.callback(cluster.close)
        server = ApiServer(cluster)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        stack.callback(thread.join, 30)
        stack.callback(server.server_close)
        stack.callback(server.shutdown)
        yield cluster, server.url
