"""Manifests for Kubernetes: a job whose pods run the node agent, as a plain Job, a JobSet, Kubeflow's TrainJob or
MPIJob. Pure.

The pods hold the job's secret as a file of a Secret that the user makes; no manifest contains it. The user's patches
are applied to what is here (`manifest_patch`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from hora.launch.agent.agent import LEFT
from hora.launch.providers.manifest_patch import Manifest, patched
from hora.platforms.node import DEFAULT_PORT

KINDS = ("job", "jobset", "trainjob", "mpijob")
GANGS = ("volcano",)

_FOLDER, _FILE = "/etc/hora", "secret"
_START_LIMIT_S, _GRACE_SLACK_S = 600, 15
_NAME = re.compile(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?")  # room for what the controllers append
_USER = 1000  # the first that `useradd` makes, and so that of the images in containers/
_INDEX = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_QUEUE_LABEL, _GROUP_ANNOTATION = "kueue.x-k8s.io/queue-name", "scheduling.k8s.io/group-name"
# Preempted, evicted, or on a node that is gone.
_DISRUPTED = [{"type": "DisruptionTarget", "status": "True"}]


@dataclass(frozen=True, kw_only=True)
class ManifestRequest:
    """The user's request."""

    name: str
    image: str
    command: tuple[str, ...]
    num_nodes: int = 2
    slots: int = 1  # processes per node
    min_nodes: int | None = None  # the minimum for an elastic job to continue
    any_leader: bool = False  # the job's state is in a Lease and a Secret, so that any pod may lead it
    namespace: str | None = None
    cpu: str | None = None
    memory: str | None = None
    gpus: int = 0
    leave_s: int = 25
    # The command may write anywhere in its container, not only to /tmp and to mounted volumes
    writable_root: bool = False
    runtime: str = "torch-distributed"
    queue: str | None = None  # of Kueue, or of Volcano if it is the `gang` scheduler
    gang: str | None = None
    cluster: str | None = None  # the version of Kubernetes, checked against what the manifest needs

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
        if self.gang not in (None, *GANGS):
            raise ValueError(f"--gang must be {' or '.join(GANGS)}, but it is {self.gang!r}; Kueue only needs --queue")
        if self.cluster is not None and not re.fullmatch(r"v?1\.\d+(\.\d+)?", self.cluster):
            raise ValueError(f"a version of Kubernetes is like 1.33, but --kubernetes-version is {self.cluster!r}")

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

    @property
    def min_pods(self) -> int:
        """Return the number of pods without which the job cannot go on."""
        return self.num_nodes if self.min_nodes is None else self.min_nodes

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


def needs(kind: str, request: ManifestRequest) -> tuple[int, str]:
    """Return the minor version of Kubernetes that the manifest needs, and which operators, in words."""
    operators = {"jobset": "JobSet 0.6", "trainjob": "Kubeflow Trainer 2.2", "mpijob": "mpi-operator 0.5"}
    # successPolicy of elastic jobs; the podFailurePolicy of others.
    minor = 31 if request.min_nodes is not None and kind in ("job", "jobset") else 26
    also = [operators[kind]] if kind in operators else []
    also += ["Volcano"] if request.gang else ["Kueue"] if request.queue else []
    return minor, " and ".join(also)


def manifests(kind: str, request: ManifestRequest, patches: Iterable[Manifest] = ()) -> list[Manifest]:
    """Return the manifests to apply, in order. `patches`: strategic merge patches; of kind Pod for all of the pods."""
    if kind not in KINDS:
        raise ValueError(f"the kind of manifest must be one of {', '.join(KINDS)}, but it is {kind!r}")
    if request.any_leader and kind == "mpijob":
        raise ValueError("--any-leader: an MPIJob has a launcher, which must stay; use job, jobset or trainjob")
    if request.gang and kind == "trainjob":
        raise ValueError("--gang: a TrainJob's runtime says which scheduler it has (podGroupPolicy)")
    minor, _ = needs(kind, request)
    if request.cluster is not None and int(request.cluster.split(".")[1]) < minor:
        raise ValueError(
            f"this {kind} needs Kubernetes 1.{minor}, but --kubernetes-version is {request.cluster}"
            + (": leave out --min-nodes, or update the cluster" if minor == 31 else "")
        )
    made = {"job": _job, "jobset": _job_set, "trainjob": _train_job, "mpijob": _mpi_job}[kind](request)
    _enqueue(kind, made[-1], request)
    group = [_pod_group(request)] if request.gang and kind != "mpijob" else []
    made = [*(_state(request) if request.any_leader else []), *_protection(kind, request), *group, *made]
    for patch in patches:
        made = patched(made, patch)
    if request.namespace:
        for manifest in made:
            manifest["metadata"]["namespace"] = request.namespace
    return made


def _enqueue(kind: str, job: Manifest, request: ManifestRequest) -> None:
    """Have the job started as a whole, when there is room for it."""
    if request.gang and kind == "mpijob":
        policy = {"minAvailable": request.min_pods + 1, **({"queue": request.queue} if request.queue else {})}
        job["spec"]["runPolicy"]["schedulingPolicy"] = policy
    elif request.queue and not request.gang:
        job["metadata"]["labels"] = {_QUEUE_LABEL: request.queue}


def _pod_group(request: ManifestRequest) -> Manifest:
    spec = {"minMember": request.min_pods, **({"queue": request.queue} if request.queue else {})}
    return _object("scheduling.volcano.sh/v1beta1", "PodGroup", request.name, spec=spec)


def _pod_labels(kind: str, request: ManifestRequest) -> dict[str, str]:
    """Return labels that all pods of the job have, and no others."""
    names = {"trainjob": "jobset.sigs.k8s.io/jobset-name", "mpijob": "training.kubeflow.org/job-name"}
    return {names.get(kind, "app.kubernetes.io/name"): request.name}


def _protection(kind: str, request: ManifestRequest) -> list[Manifest]:
    """Return what keeps others' connections and a drain's evictions from the pods."""
    pods = {"matchLabels": _pod_labels(kind, request)}
    policy = {"podSelector": pods, "policyTypes": ["Ingress"], "ingress": [{"from": [{"podSelector": pods}]}]}
    budget = {"minAvailable": request.min_pods + (kind == "mpijob"), "selector": pods}
    return [
        _object("networking.k8s.io/v1", "NetworkPolicy", request.name, spec=policy),
        _object("policy/v1", "PodDisruptionBudget", request.name, spec=budget),
    ]


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


def _placement(kind: str, request: ManifestRequest) -> Manifest:
    """Return which nodes the pods may and should run on: of GPUs, on the same machine, or at least in the same zone."""
    found: Manifest = {}
    if request.gpus:
        found["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if request.num_nodes > 1:
        pods = {"labelSelector": {"matchLabels": _pod_labels(kind, request)}}
        near = [(100, "kubernetes.io/hostname"), (50, "topology.kubernetes.io/zone")]
        terms = [{"weight": weight, "podAffinityTerm": {**pods, "topologyKey": key}} for weight, key in near]
        found["affinity"] = {"podAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": terms}}
    return found


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
    metadata: Manifest = {"labels": _pod_labels("job", request)}
    scheduler = {}
    if request.gang:
        metadata["annotations"] = {_GROUP_ANNOTATION: request.name}
        scheduler = {"schedulerName": request.gang}
    more = {"restartPolicy": "Never", **token, **scheduler, **_placement("job", request)}
    return {
        "completions": request.num_nodes,
        "parallelism": request.num_nodes,
        "completionMode": "Indexed",
        # A failed node of an elastic job is replaced; otherwise the first failure ends the job.
        "backoffLimit": 10 if elastic else 0,
        **(_elastic_policies(request) if elastic else {}),
        "template": {"metadata": metadata, "spec": _pod(request, more, container)},
    }


def _elastic_policies(request: ManifestRequest) -> Manifest:
    """The leader's success is the job's. Pods that are taken away, or have left after a commit, did not fail."""
    left = {"containerName": "node", "operator": "In", "values": [LEFT]}
    ignored = [{"action": "Ignore", "onPodConditions": _DISRUPTED}, {"action": "Ignore", "onExitCodes": left}]
    leader = {"succeededCount": 1} if request.any_leader else {"succeededIndexes": "0"}
    return {"podFailurePolicy": {"rules": ignored}, "successPolicy": {"rules": [leader]}}


def _job(request: ManifestRequest) -> list[Manifest]:
    spec = _pods(request, f"{request.name}-0.{request.name}")
    spec["template"]["spec"]["subdomain"] = request.name
    selector, ports = {"app.kubernetes.io/name": request.name}, [{"name": "hora", "port": DEFAULT_PORT}]
    service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector, "ports": ports}
    return [_object("v1", "Service", request.name, spec=service), _object("batch/v1", "Job", request.name, spec=spec)]


def _job_set(request: ManifestRequest) -> list[Manifest]:
    spec = _pods(request, f"{request.name}-node-0-0.{request.name}")
    policy: Manifest = {}
    if request.min_nodes is None:  # a pod that is taken away ends the ranks of all: they start again
        spec["podFailurePolicy"] = {"rules": [{"action": "FailJob", "onPodConditions": _DISRUPTED}]}
        again = {"name": "disrupted", "action": "RestartJobSetAndIgnoreMaxRestarts"}
        policy["failurePolicy"] = {"maxRestarts": 0, "rules": [{**again, "onJobFailureReasons": ["PodFailurePolicy"]}]}
    job_set = {
        **policy,
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
    account_name = {"serviceAccountName": request.state if request.any_leader else request.secret}
    pods = _pod(request, {**account_name, **_placement("trainjob", request)}, {})
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
    few = {"cpu": "1", "memory": "1Gi"}  # it trains nothing; namespaces with a quota refuse pods that name none
    launcher: Manifest = {"name": "launcher", "image": request.image, "command": command}
    launcher["resources"] = {"limits": dict(few), "requests": dict(few)}
    worker: Manifest = {"name": "worker", "image": request.image, "command": ["/usr/sbin/sshd", "-De"]}
    worker |= request.resources()

    def replicas(container: Manifest, count: int, placement: Manifest) -> Manifest:
        container["securityContext"] = {"allowPrivilegeEscalation": False}
        spec = {
            **placement,
            "automountServiceAccountToken": False,
            "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
            "terminationGracePeriodSeconds": request.grace_s,
            "containers": [container],
        }
        return {"replicas": count, "restartPolicy": "Never", "template": {"spec": spec}}

    placement = _placement("mpijob", request)
    both = {"Launcher": replicas(launcher, 1, {}), "Worker": replicas(worker, request.num_nodes, placement)}
    job = {"slotsPerWorker": request.slots, "runPolicy": {"cleanPodPolicy": "Running"}, "mpiReplicaSpecs": both}
    return [_object("kubeflow.org/v2beta1", "MPIJob", request.name, spec=job)]
