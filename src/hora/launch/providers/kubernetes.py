"""Manifests for Kubernetes: a job whose pods run the node agent, as a plain Job, a JobSet, Kubeflow's TrainJob or
MPIJob. Pure.

The pods hold the job's secret as a file of a Secret that the user makes; no manifest contains it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from hora.launch.slots import DEFAULT_PORT

KINDS = ("job", "jobset", "trainjob", "mpijob")
Manifest = dict[str, Any]

_FOLDER, _FILE = "/etc/hora", "secret"
_START_LIMIT_S, _GRACE_SLACK_S = 600, 15
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # room for what the controllers append
_USER = 1000  # the first that `useradd` makes, and so that of the images in containers/
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


@dataclass(frozen=True, kw_only=True)
class ManifestRequest:
    """The user's request. `slots`: processes per node; `min_nodes`: the minimum for an elastic job to continue.

    `any_leader`: the job's state is in a Lease and a Secret, so that any pod may lead it. `writable_root`: the command
    may write anywhere in its container, not only to /tmp and to mounted volumes.
    """

    name: str
    image: str
    command: tuple[str, ...]
    num_nodes: int = 2
    slots: int = 1
    min_nodes: int | None = None
    any_leader: bool = False
    namespace: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0
    leave_s: int = 25
    writable_root: bool = False
    runtime: str = "torch-distributed"

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(
                "a job's name has small letters, digits and dashes, begins with a letter and is at most 40 long; it is "
                f"{self.name!r}"
            )
        if not self.command:
            raise ValueError("there is no command to run: put it after --, for example: -- python train.py")
        if self.num_nodes < 1 or self.slots < 1:
            raise ValueError(f"nodes and slots must be at least 1, but they are {self.num_nodes} and {self.slots}")
        if self.min_nodes is not None and not 1 <= self.min_nodes <= self.num_nodes:
            raise ValueError(f"--min-nodes must lie in 1..{self.num_nodes}, but it is {self.min_nodes}")
        if self.any_leader and self.min_nodes is None:
            raise ValueError("--any-leader is for elastic jobs; give --min-nodes as well")

    @property
    def secret(self) -> str:
        """The name of the Secret."""
        return f"{self.name}-hora"

    @property
    def state(self) -> str:
        """Return the name of the Lease and the Secret with the job's state, and of the role that may change them."""
        return f"{self.name}-hora-state"

    @property
    def num_proc(self) -> int:
        return self.num_nodes * self.slots

    @property
    def grace_s(self) -> int:
        return self.leave_s + _GRACE_SLACK_S

    def resources(self, field: str = "resources") -> Manifest:
        """Return a container's field of this name; empty if the user asks for no resources."""
        asked = (("cpu", self.cpu), ("memory", self.memory), ("nvidia.com/gpu", self.gpus or None))
        wanted = {name: str(value) for name, value in asked if value is not None}
        return {field: {"limits": dict(wanted), "requests": dict(wanted)}} if wanted else {}

    def size_flags(self) -> list[str]:
        flags = ["-np", str(self.num_proc)]
        if self.min_nodes is not None:
            flags += ["--min-np", str(self.min_nodes * self.slots), "--leave-timeout", str(self.leave_s)]
        return flags


def secret_command(request: ManifestRequest) -> str:
    """Return the shell command that creates the Secret without printing it."""
    where = f" --namespace {request.namespace}" if request.namespace else ""
    kubectl = f"kubectl create secret generic {request.secret}{where} --from-file={_FILE}=/dev/stdin"
    return f"openssl rand -hex 32 | {kubectl}"


def manifests(kind: str, request: ManifestRequest) -> list[Manifest]:
    """Return the manifests to apply, in order."""
    if kind not in KINDS:
        raise ValueError(f"the kind of manifest must be one of {', '.join(KINDS)}, but it is {kind!r}")
    if request.any_leader and kind == "mpijob":
        raise ValueError("--any-leader: an MPIJob has a launcher, which must stay; use job, jobset or trainjob")
    made = {"job": _job, "jobset": _job_set, "trainjob": _train_job, "mpijob": _mpi_job}[kind](request)
    made = [*(_state(request) if request.any_leader else []), *made]
    if request.namespace:
        for manifest in made:
            manifest["metadata"]["namespace"] = request.namespace
    return made


def _object(api_version: str, kind: str, name: str, **content: Any) -> Manifest:
    return {"apiVersion": api_version, "kind": kind, "metadata": {"name": name}, **content}


def _state(request: ManifestRequest) -> list[Manifest]:
    """Return the empty Lease and Secret, and an account that may read and change only these two."""
    rules = [
        {"apiGroups": [group], "resources": [kind], "resourceNames": [request.state], "verbs": ["get", "update"]}
        for group, kind in (("coordination.k8s.io", "leases"), ("", "secrets"))
    ]
    account = {"kind": "ServiceAccount", "name": request.state}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": request.state}
    return [
        _object("coordination.k8s.io/v1", "Lease", request.state),
        _object("v1", "Secret", request.state),
        _object("v1", "ServiceAccount", request.state),
        _object("rbac.authorization.k8s.io/v1", "Role", request.state, rules=rules),
        _object("rbac.authorization.k8s.io/v1", "RoleBinding", request.state, subjects=[account], roleRef=role),
    ]


def _variables(request: ManifestRequest) -> list[Manifest]:
    # Each pod sends about four requests per third of the lease time: about a hundred per second in total.
    lease = f"?ttl={request.num_nodes // 8}" if request.num_nodes >= 32 else ""
    store = [{"name": "HORA_STORE", "value": f"kubernetes://{request.state}{lease}"}] if request.any_leader else []
    home = [] if request.writable_root else [{"name": "HOME", "value": "/tmp"}]  # for caches of torch and others
    return [{"name": "HORA_SECRET_FILE", "value": f"{_FOLDER}/{_FILE}"}, *home, *store]


def _pod(request: ManifestRequest, account: Manifest, container: Manifest) -> Manifest:
    """Return a pod with this container: no root; the group can read the job's secret."""
    # 0440: for root, and for the group that a pod with an fsGroup gives it to.
    volumes: list[Manifest] = [{"name": "hora-secret", "secret": {"secretName": request.secret, "defaultMode": 0o440}}]
    mounts: list[Manifest] = [{"name": "hora-secret", "mountPath": _FOLDER, "readOnly": True}]
    limits: Manifest = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    if not request.writable_root:
        volumes.append({"name": "tmp", "emptyDir": {}})
        mounts.append({"name": "tmp", "mountPath": "/tmp"})
        limits["readOnlyRootFilesystem"] = True
    user = {"runAsNonRoot": True, "runAsUser": _USER, "runAsGroup": _USER, "fsGroup": _USER}
    return {
        **account,
        "securityContext": {**user, "seccompProfile": {"type": "RuntimeDefault"}},
        "terminationGracePeriodSeconds": request.grace_s,
        "containers": [{"name": "node", **container, "volumeMounts": mounts, "securityContext": limits}],
        "volumes": volumes,
    }


def _pods(request: ManifestRequest, first_node: str) -> Manifest:
    """The specification of an indexed Job: one pod for each node, which knows its number."""
    place = ["--nnodes", str(request.num_nodes), "--meet", f"{first_node}:{DEFAULT_PORT}"]
    slots = ["--slots-per-host", str(request.slots), "--start-timeout", str(_START_LIMIT_S)]
    container: Manifest = {
        "image": request.image,
        "command": ["hora", "run", *place, *slots, *request.size_flags(), *request.command],
        "env": [{"name": "HORA_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": _INDEX}}}, *_variables(request)],
        "ports": [{"containerPort": DEFAULT_PORT}],
        **request.resources(),
    }
    elastic = request.min_nodes is not None
    token = {"serviceAccountName": request.state} if request.any_leader else {"automountServiceAccountToken": False}
    return {
        "completions": request.num_nodes,
        "parallelism": request.num_nodes,
        "completionMode": "Indexed",
        # A failed node of an elastic job is restarted; otherwise the first failure ends the job.
        "backoffLimit": 10 if elastic else 0,
        "template": {
            "metadata": {"labels": {"app.kubernetes.io/name": request.name}},
            "spec": _pod(request, {"restartPolicy": "OnFailure" if elastic else "Never", **token}, container),
        },
    }


def _job(request: ManifestRequest) -> list[Manifest]:
    spec = _pods(request, f"{request.name}-0.{request.name}")
    spec["template"]["spec"]["subdomain"] = request.name
    selector, ports = {"app.kubernetes.io/name": request.name}, [{"name": "hora", "port": DEFAULT_PORT}]
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
    return [_object("v1", "Service", request.name, spec=service), _object("batch/v1", "Job", request.name, spec=spec)]


def _job_set(request: ManifestRequest) -> list[Manifest]:
    spec = _pods(request, f"{request.name}-node-0-0.{request.name}")
    job_set = {
        "network": {"enableDNSHostnames": True, "subdomain": request.name},
        "replicatedJobs": [{"name": "node", "replicas": 1, "template": {"spec": spec}}],
    }
    return [_object("jobset.x-k8s.io/v1alpha2", "JobSet", request.name, spec=job_set)]


def _train_job(request: ManifestRequest) -> list[Manifest]:
    """The runtime's PET_ variables say which node a pod is."""
    trainer: Manifest = {
        "image": request.image,
        "command": ["hora", "run", "--join", "--start-timeout", str(_START_LIMIT_S), *request.size_flags()],
        "args": list(request.command),
        "numNodes": request.num_nodes,
        "numProcPerNode": request.slots,
        "env": _variables(request),
        **request.resources("resourcesPerNode"),
    }
    # A patch of the runtime's pods cannot leave the token out, but an account can.
    account = _object("v1", "ServiceAccount", request.secret, automountServiceAccountToken=False)
    pods = _pod(request, {"serviceAccountName": request.state if request.any_leader else request.secret}, {})
    replicated = {"name": "node", "template": {"spec": {"template": {"spec": pods}}}}
    runtime = {"template": {"spec": {"replicatedJobs": [replicated]}}}
    patch = {"manager": "hora.example/manifest", "trainingRuntimeSpec": runtime}
    spec = {"runtimeRef": {"name": request.runtime}, "trainer": trainer, "runtimePatches": [patch]}
    job = _object("trainer.kubeflow.org/v1alpha1", "TrainJob", request.name, spec=spec)
    return [job] if request.any_leader else [account, job]


def _mpi_job(request: ManifestRequest) -> list[Manifest]:
    """mpi-operator brings root's ssh keys and `discover_hosts.sh`; its workers run the image's sshd as root."""
    hosts = ["--slots-per-host", str(request.slots), "--start-timeout", str(_START_LIMIT_S)]
    minimum = str((request.min_nodes or request.num_nodes) * request.slots)
    size = ["-np", str(request.num_proc), "--min-np", minimum, "--max-np", str(request.num_proc)]
    command = ["horovodrun", *size, *hosts, "--host-discovery-script", "/etc/mpi/discover_hosts.sh", *request.command]
    launcher: Manifest = {"name": "launcher", "image": request.image, "command": command}
    worker: Manifest = {"name": "worker", "image": request.image, "command": ["/usr/sbin/sshd", "-De"]}
    worker |= request.resources()

    def replicas(container: Manifest, count: int) -> Manifest:
        container["securityContext"] = {"allowPrivilegeEscalation": False}
        spec = {
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": request.grace_s,
            "containers": [container],
        }
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": spec}}

    both = {"Launcher": replicas(launcher, 1), "Worker": replicas(worker, request.num_nodes)}
    job = {"slotsPerWorker": request.slots, "runPolicy": {"cleanPodPolicy": "Running"}, "mpiReplicaSpecs": both}
    return [_object("kubeflow.org/v2beta1", "MPIJob", request.name, spec=job)]
