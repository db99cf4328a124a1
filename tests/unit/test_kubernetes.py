"""Manifests fit the schemas of Kubernetes, JobSet and Kubeflow, also with users' patches; their commands parse; they
contain no secret.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import yaml

from hora.cli.dispatch import main
from hora.config import allowed_ports
from hora.launch.options import Options, build_parser
from hora.launch.providers.join import find_place
from hora.launch.providers.kubernetes import KINDS, ManifestRequest, manifests, needs, secret_command
from hora.launch.providers.strategic_merge import merge
from hora.platforms.node import DEFAULT_PORT

models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow-trainer-api is not installed")

REQUEST = ManifestRequest(
    name="train",
    image="registry.example.com/train:1",
    command=("python", "train.py", "--epochs", "3"),
    num_nodes=3,
    slots=2,
    min_nodes=2,
    namespace="lab",
    cpu="4",
    memory="16Gi",
    gpus=2,
)
SCHEMAS = {
    "Service": "IoK8sApiCoreV1Service",
    "Secret": "IoK8sApiCoreV1Secret",
    "ServiceAccount": "IoK8sApiCoreV1ServiceAccount",
    "Job": "IoK8sApiBatchV1Job",
    "JobSet": "JobsetV1alpha2JobSet",
    "TrainJob": "TrainerV1alpha1TrainJob",
}


def by_kind(kind: str, request: ManifestRequest = REQUEST) -> dict:
    return {manifest["kind"]: manifest for manifest in manifests(kind, request)}


def made_with(patch: str, kind: str, **changes) -> dict:
    """Return the manifests with patches, by kind."""
    request = ManifestRequest(**{**REQUEST.__dict__, **changes})
    return {one["kind"]: one for one in manifests(kind, request, yaml.safe_load_all(patch))}


def pod_specs(kind: str) -> list[dict]:
    return find_pods(manifests(kind, REQUEST))


def find_pods(value) -> list[dict]:
    """Return the specifications of all pods in manifests."""
    if isinstance(value, dict):
        own = [value] if "containers" in value else []
        return own + [pod for entry in value.values() for pod in find_pods(entry)]
    return [pod for entry in value for pod in find_pods(entry)] if isinstance(value, list) else []


def assert_known(manifest: dict, schema: str) -> None:
    """Assert that the manifest fits the schema; a model drops fields that it does not know."""
    assert_contains(getattr(models, schema).from_dict(manifest).to_dict(), manifest)


def assert_contains(whole, part) -> None:
    if isinstance(part, dict):
        for name, value in part.items():
            assert name in whole, f"{name} is unknown"
            assert_contains(whole[name], value)
    elif isinstance(part, list):
        assert len(whole) == len(part)
        for one, other in zip(whole, part, strict=True):
            assert_contains(one, other)
    else:
        assert whole == part


def test_an_unknown_field_is_detected():
    job = by_kind("job")["Job"]
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(AssertionError, match="restartPolice is unknown"):
        assert_known(job, SCHEMAS["Job"])


KUEUE, VOLCANO = {"queue": "team"}, {"queue": "team", "gang": "volcano"}
SIZES = [{}, {"min_nodes": None}, {"any_leader": True}, {"num_nodes": 1, "min_nodes": None, "gpus": 0}]
# What a cluster's users change: volumes, environment, accounts, placement, priority, labels, containers of their own.
PATCH = """
kind: Pod
metadata: {labels: {team: vision}, annotations: {example.com/cost: "42"}}
spec:
  nodeSelector: {pool: a100}
  imagePullSecrets: [{name: registry}]
  tolerations: [{key: dedicated, operator: Equal, value: training, effect: NoSchedule}]
  affinity: {nodeAffinity: {requiredDuringSchedulingIgnoredDuringExecution: {nodeSelectorTerms: [
    {matchExpressions: [{key: gpu, operator: In, values: [a100]}]}]}}}
  containers:
  - name: node
    env:
    - {name: WANDB_API_KEY, valueFrom: {secretKeyRef: {name: wandb, key: key}}}
    - {name: LEVEL, valueFrom: {configMapKeyRef: {name: settings, key: level}}}
    volumeMounts: [{name: data, mountPath: /data, readOnly: true}]
  volumes:
  - {name: data, persistentVolumeClaim: {claimName: photos}}
---
kind: PodDisruptionBudget
spec: {minAvailable: 1}
---
kind: NetworkPolicy
$patch: delete
"""
PATCH_OF_A_POD = """
kind: Pod
spec:
  priorityClassName: high
  serviceAccountName: trainer
  containers:
  - name: node
    envFrom: [{secretRef: {name: keys}}, {configMapRef: {name: settings}}]
  - {name: copy, image: copy, command: [copy]}
  volumes:
  - {name: tmp, emptyDir: null, persistentVolumeClaim: {claimName: scratch}}
"""


def known_to_kubernetes(manifest: dict, version: str) -> bool:
    """Check a manifest against the schemas of a version of Kubernetes; False if it is of an operator."""
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    try:
        validator.validate(manifest, version, strict=True)
    except validator.SchemaNotFoundError:
        return False
    return True


def pod_template_of(manifest: dict) -> dict:
    return {"apiVersion": "v1", "kind": "Pod", **manifest}


def assert_fits(manifest: dict, minor: int) -> None:
    """Check against the schemas of the oldest version that the manifest is for, and of one of today."""
    kind = manifest["kind"]
    if kind in SCHEMAS:
        assert_known(manifest, SCHEMAS[kind])
    for version in (f"1.{minor}", "1.35"):
        is_known = known_to_kubernetes(manifest, version)
        assert is_known == (kind not in ("JobSet", "TrainJob", "MPIJob", "PodGroup")), kind
    if kind == "MPIJob":
        assert_allowed(manifest["spec"], MPI_JOB)
        for replica in manifest["spec"]["mpiReplicaSpecs"].values():
            assert known_to_kubernetes(pod_template_of(replica["template"]), "1.35")
    if kind == "PodGroup":
        assert_allowed(manifest["spec"], {"minMember": int, "queue": str})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("patch", ["", PATCH, PATCH_OF_A_POD], ids=["made", "patched", "pods patched"])
def test_every_combination_fits_the_schemas(kind, patch):
    for size, queue in itertools.product(SIZES, ({}, KUEUE, VOLCANO)):
        changes = {**size, **queue}
        cannot = (kind == "trainjob" and (queue is VOLCANO or patch == PATCH_OF_A_POD)) or (
            kind == "mpijob" and "any_leader" in size
        )
        request = ManifestRequest(**{**REQUEST.__dict__, **changes})
        if cannot or (kind == "mpijob" and patch):  # its launcher has another container: below
            continue
        for manifest in manifests(kind, request, yaml.safe_load_all(patch)):
            assert_fits(manifest, needs(kind, request)[0])
            assert manifest["metadata"]["namespace"] == "lab"


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_pods_that_may_lead_have_an_account_for_only_their_lease_and_secret(kind):
    request = ManifestRequest(**{**REQUEST.__dict__, "any_leader": True})
    made = by_kind(kind, request)
    own = {"resourceNames": ["train-hora-state"], "verbs": ["get", "update"]}
    assert made["Role"]["rules"] == [
        {"apiGroups": ["coordination.k8s.io"], "resources": ["leases"], **own},
        {"apiGroups": [""], "resources": ["secrets"], **own},
    ]
    names = {made[kind]["metadata"]["name"] for kind in ("Lease", "Secret", "ServiceAccount", "Role", "RoleBinding")}
    assert names == {made["RoleBinding"]["roleRef"]["name"], made["RoleBinding"]["subjects"][0]["name"]}
    text = yaml.safe_dump_all(manifests(kind, request))
    assert "serviceAccountName: train-hora-state" in text
    assert "value: kubernetes://train-hora-state\n" in text
    many = ManifestRequest(**{**REQUEST.__dict__, "any_leader": True, "num_nodes": 200})
    assert "value: kubernetes://train-hora-state?ttl=25\n" in yaml.safe_dump_all(manifests(kind, many))
    assert "train-hora-state" not in yaml.safe_dump_all(manifests(kind, REQUEST))


@pytest.mark.parametrize("kind", KINDS)
def test_pods_have_no_more_rights_than_they_need(kind):
    accounts = {one["metadata"]["name"]: one for one in manifests(kind, REQUEST) if one["kind"] == "ServiceAccount"}
    for pod in pod_specs(kind):
        account = accounts.get(pod.get("serviceAccountName"), pod)
        assert account["automountServiceAccountToken"] is False
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"]:
            assert container["securityContext"]["allowPrivilegeEscalation"] is False
        if kind != "mpijob":  # its sshd and keys belong to root
            assert pod["securityContext"]["runAsNonRoot"] is True
            assert pod["securityContext"]["runAsUser"] == pod["securityContext"]["fsGroup"] > 0
            (container,) = pod["containers"]
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert {"name": "tmp", "emptyDir": {}} in pod["volumes"]


def test_a_command_may_write_into_its_container_on_request():
    text = yaml.safe_dump_all(manifests("job", ManifestRequest(**{**REQUEST.__dict__, "writable_root": True})))
    assert "readOnlyRootFilesystem" not in text
    assert "emptyDir" not in text
    assert "runAsNonRoot: true" in text


# Fields of mpi-operator's CustomResourceDefinition (kubeflow.org/v2beta1), whose schema no package has.
# `kubeflow-training` has its predecessor's (v1, below); it is optional because it brings a whole client along.
MPI_JOB = {
    "slotsPerWorker": int,
    "runLauncherAsWorker": bool,
    "runPolicy": {
        "cleanPodPolicy": ("None", "Running", "All"),
        "ttlSecondsAfterFinished": int,
        "activeDeadlineSeconds": int,
        "backoffLimit": int,
        "schedulingPolicy": {
            "minAvailable": int,
            "queue": str,
            "minResources": dict,
            "priorityClass": str,
            "scheduleTimeoutSeconds": int,
        },
        "suspend": bool,
        "managedBy": str,
    },
    "mpiReplicaSpecs": {
        name: {"replicas": int, "restartPolicy": ("Never", "OnFailure"), "template": dict}
        for name in ("Launcher", "Worker")
    },
    "sshAuthMountPath": str,
    "launcherCreationPolicy": ("AtStartup", "WaitForWorkersReady"),
    "mpiImplementation": ("OpenMPI", "Intel", "MPICH"),
}


def assert_allowed(value, schema) -> None:
    if isinstance(schema, dict):
        for name, part in value.items():
            assert name in schema, f"{name} is unknown"
            assert_allowed(part, schema[name])
    elif isinstance(schema, tuple):
        assert value in schema
    else:
        assert type(value) is schema


def test_an_mpi_job_has_only_fields_of_the_operator_and_its_pods_fit_their_schema():
    job = by_kind("mpijob")["MPIJob"]
    assert job["apiVersion"] == "kubeflow.org/v2beta1"
    assert_allowed(job["spec"], MPI_JOB)
    replicas = job["spec"]["mpiReplicaSpecs"]
    assert replicas["Launcher"]["replicas"] == 1
    for name in ("Launcher", "Worker"):
        assert_known(replicas[name]["template"], "IoK8sApiCoreV1PodTemplateSpec")
    assert replicas["Worker"]["replicas"] == 3
    line = replicas["Launcher"]["template"]["spec"]["containers"][0]["command"]
    options = read_line(line)
    assert (options.num_proc, options.min_num_proc, options.slots) == (6, 4, 2)
    assert options.host_discovery_script == "/etc/mpi/discover_hosts.sh"


@pytest.mark.parametrize("elastic", [True, False])
def test_an_mpi_job_has_only_fields_that_its_predecessor_has_too(elastic):
    known = pytest.importorskip("kubeflow.training.models", reason="kubeflow-training is not installed")
    spec = by_kind("mpijob", ManifestRequest(**{**REQUEST.__dict__, "min_nodes": 2 if elastic else None}))["MPIJob"][
        "spec"
    ]
    parts = [(known.KubeflowOrgV1MPIJobSpec, spec), (known.KubeflowOrgV1RunPolicy, spec["runPolicy"])]
    parts += [(known.KubeflowOrgV1ReplicaSpec, replica) for replica in spec["mpiReplicaSpecs"].values()]
    for model, part in parts:
        assert part.keys() <= set(model.attribute_map.values())


def read_line(line: list[str]) -> Options:
    """Parse a command line with our own parser."""
    words = line[2:] if line[0] == "hora" else line[1:]
    assert line[0] == "horovodrun" or line[:2] == ["hora", "run"]
    args = build_parser(line[0], "", (), on_version=str, on_check_build=str).parse_args(words)
    return Options.from_args(args, {"HORA_NODE_RANK": "1"})


@pytest.mark.parametrize(("kind", "first"), [("job", "train-0.train"), ("jobset", "train-node-0-0.train")])
def test_the_pods_run_agents_that_find_the_first_pod(kind, first):
    (spec,) = pod_specs(kind)
    (container,) = spec["containers"]
    options = read_line(container["command"])
    assert options.command == REQUEST.command
    assert (options.num_proc, options.min_num_proc, options.slots) == (6, 4, 2)
    place = find_place(options, {}, "h")
    assert (place.num_nodes, place.index, place.host, place.port) == (3, 1, first, 29500)
    assert spec["terminationGracePeriodSeconds"] > 25
    if kind == "job":
        assert by_kind(kind)["Service"]["spec"]["selector"].items() <= pod_labels(by_kind(kind)["Job"]).items()
        assert spec["subdomain"] == by_kind(kind)["Service"]["metadata"]["name"]


def pod_labels(job: dict) -> dict:
    return job["spec"]["template"]["metadata"]["labels"]


def test_a_train_job_reads_kubeflows_variables():
    trainer = by_kind("trainjob")["TrainJob"]["spec"]["trainer"]
    options = read_line([*trainer["command"], *trainer["args"]])
    assert options.join
    assert options.joins
    assert (options.num_proc, options.command) == (6, REQUEST.command)
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (3, 2)


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_the_secret_appears_only_as_a_file_of_a_secret(kind):
    text = yaml.safe_dump_all(manifests(kind, REQUEST))
    assert "secretName: train-hora" in text
    assert "HORA_SECRET_FILE" in text
    assert not re.search(r"[0-9a-f]{32}", text)
    assert secret_command(REQUEST) == (
        "openssl rand -hex 32 | kubectl create secret generic train-hora --namespace lab --from-file=secret=/dev/stdin"
    )


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
def test_a_patch_of_pods_reaches_the_pods_of_every_kind(kind):
    made = made_with(PATCH, kind)
    text = yaml.safe_dump(made)
    assert "NetworkPolicy" not in made
    assert made["PodDisruptionBudget"]["spec"]["minAvailable"] == 1
    for words in ("claimName: photos", "team: vision", "pool: a100", "name: registry", "key: dedicated", "a100"):
        assert words in text, words
    assert "nvidia.com/gpu\n          operator" not in text  # tolerations have no key: they are replaced
    assert "secretName: train-hora" in text  # volumes have one
    assert "mountPath: /etc/hora" in text
    env = made["TrainJob"]["spec"]["trainer"]["env"] if kind == "trainjob" else None
    if env is None:
        (spec,) = find_pods(list(made.values()))
        env = spec["containers"][0]["env"]
    assert {"HORA_SECRET_FILE", "WANDB_API_KEY", "LEVEL"} <= {one["name"] for one in env}


def test_an_mpi_jobs_pods_are_patched_by_role():
    patch = """
kind: MPIJob
spec:
  mpiReplicaSpecs:
    Launcher: {template: {spec: {containers: [{name: launcher, resources: {limits: {memory: 4Gi}}}]}}}
    Worker: {template: {spec: {containers: [{name: worker, envFrom: [{secretRef: {name: keys}}]}]}}}
---
kind: Pod
spec: {priorityClassName: high}
"""
    made = made_with(patch, "mpijob")
    for manifest in made.values():
        assert_fits(manifest, 26)
    launcher, worker = find_pods(list(made.values()))
    assert launcher["priorityClassName"] == worker["priorityClassName"] == "high"
    assert launcher["containers"][0]["resources"]["limits"] == {"cpu": "1", "memory": "4Gi"}
    assert worker["containers"][0]["envFrom"] == [{"secretRef": {"name": "keys"}}]


def test_pods_of_gpus_run_on_tainted_nodes_and_near_one_another():
    for kind in KINDS:
        *_, pod = find_pods(manifests(kind, REQUEST))
        assert pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
        terms = pod["affinity"]["podAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"]
        assert [term["podAffinityTerm"]["topologyKey"] for term in terms] == [
            "kubernetes.io/hostname",
            "topology.kubernetes.io/zone",
        ]
    (pod,) = find_pods(manifests("job", ManifestRequest(name="train", image="i", command=("x",), num_nodes=1)))
    assert not {"tolerations", "affinity"} & pod.keys()


@pytest.mark.parametrize("kind", KINDS)
def test_queues_and_gangs(kind):
    job = manifests(kind, ManifestRequest(**{**REQUEST.__dict__, **KUEUE}))[-1]
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "team"}
    request = ManifestRequest(**{**REQUEST.__dict__, **VOLCANO})
    if kind == "trainjob":
        with pytest.raises(ValueError, match="podGroupPolicy"):
            manifests(kind, request)
        return
    made = by_kind(kind, request)
    assert "labels" not in manifests(kind, request)[-1]["metadata"]
    if kind == "mpijob":
        assert made["MPIJob"]["spec"]["runPolicy"]["schedulingPolicy"] == {"minAvailable": 3, "queue": "team"}
        return
    assert made["PodGroup"]["spec"] == {"minMember": 2, "queue": "team"}
    (pod,) = find_pods(list(made.values()))
    assert pod["schedulerName"] == "volcano"
    assert "scheduling.k8s.io/group-name: train" in yaml.safe_dump(list(made.values()))


@pytest.mark.parametrize(
    ("patch", "kind", "words"),
    [
        ("kind: Deployment", "job", "NetworkPolicy train.*Job train, and Pod for all pods"),
        ("{kind: Job, metadata: {name: other}}", "job", "Job other"),
        ("{kind: Job, apiVersion: batch/v2}", "job", "of batch/v1 here, but a patch is of batch/v2"),
        ("{kind: Pod, metadata: {name: train-0}}", "job", "has no name"),
        ("{kind: Pod, spec: {containers: [{name: main, env: []}]}}", "job", "'main' without an image; there is node"),
        ("{kind: Pod, spec: {containers: [{image: x}]}}", "job", "an entry of containers in a patch needs name"),
        ("{kind: Pod, spec: {hostNetwork: true}}", "trainjob", "hostNetwork.*ClusterTrainingRuntime"),
        ("{kind: Pod, spec: {$setElementOrder/volumes: []}}", "job", "setElementOrder"),
        ("{kind: Job, spec: {$patch: append}}", "job", "append"),
    ],
)
def test_patches_that_cannot_be_applied_are_explained(patch, kind, words):
    with pytest.raises(ValueError, match=words):
        made_with(patch, kind)


def test_a_strategic_merge():
    target = {"a": {"b": 1, "c": 2}, "volumes": [{"name": "x", "d": 1}, {"name": "y"}], "args": ["1", "2"]}
    patch = {
        "a": {"b": None, "d": 3},
        "volumes": [{"name": "x", "e": 2}, {"name": "y", "$patch": "delete"}, {"name": "z"}],
        "args": ["3"],
    }
    before = repr(target)
    assert merge(target, patch) == {
        "a": {"c": 2, "d": 3},
        "volumes": [{"name": "x", "d": 1, "e": 2}, {"name": "z"}],
        "args": ["3"],
    }
    assert merge(target, {"a": {"$patch": "replace", "e": 1}})["a"] == {"e": 1}
    assert merge(target, {"volumes": [{"$patch": "replace"}, {"name": "w"}]})["volumes"] == [{"name": "w"}]
    assert "a" not in merge(target, {"a": {"$patch": "delete"}})
    assert repr(target) == before


def test_patches_are_read_from_files(tmp_path, capsys):
    line = ["kubernetes", "manifest", "job", "--name", "train", "--image", "i", "--patch", str(tmp_path / "p.yaml")]
    (tmp_path / "p.yaml").write_text("kind: Job\nspec: {ttlSecondsAfterFinished: 600}\n---\n")
    assert main([*line, "--", "x"]) == 0
    assert "ttlSecondsAfterFinished: 600" in capsys.readouterr().out
    for text, words in (("a: [", "is no YAML"), ("- 1", "must name its kind"), ("spec: {}", "must name its kind")):
        (tmp_path / "p.yaml").write_text(text)
        assert main([*line, "--", "x"]) == 2
        assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("kind", "min_nodes", "first_line"),
    [
        ("job", None, "# For Kubernetes 1.26 or later."),
        ("job", 2, "# For Kubernetes 1.31 or later."),
        ("jobset", None, "# For Kubernetes 1.26 or later, with JobSet 0.6."),
        ("trainjob", 2, "# For Kubernetes 1.26 or later, with Kubeflow Trainer 2.2."),
    ],
)
def test_a_manifest_says_what_it_needs_and_a_cluster_that_is_too_old_is_refused(kind, min_nodes, first_line, capsys):
    line = ["kubernetes", "manifest", kind, "--name", "train", "--image", "i", "--nodes", "3"]
    line += [] if min_nodes is None else ["--min-nodes", str(min_nodes)]
    minor = int(first_line.split("1.")[1].split()[0])
    assert main([*line, "--kubernetes-version", f"v1.{minor}.2", "--", "x"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == first_line
    assert main([*line, "--kubernetes-version", f"1.{minor - 1}", "--", "x"]) == 2
    assert f"needs Kubernetes 1.{minor}" in capsys.readouterr().err


def test_the_pages_patch_and_queues():
    page = Path(__file__).parents[2] / "docs" / "launchers.md"
    patch, queues = re.findall(r"^```yaml\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    request = ManifestRequest(name="train", image="i", command=("x",), num_nodes=2, gpus=8, queue="team")
    made = {one["kind"]: one for one in manifests("job", request, yaml.safe_load_all(patch))}
    assert "NetworkPolicy" not in made
    assert made["Job"]["spec"]["ttlSecondsAfterFinished"] == 86400
    for manifest in made.values():
        assert_fits(manifest, 26)
    flavor, cluster_queue, queue = yaml.safe_load_all(queues)
    (group,) = cluster_queue["spec"]["resourceGroups"]
    assert group["flavors"][0]["name"] == flavor["metadata"]["name"]
    assert queue["spec"]["clusterQueue"] == cluster_queue["metadata"]["name"]
    assert made["Job"]["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": queue["metadata"]["name"]}
    (pod,) = find_pods(list(made.values()))
    assert set(pod["containers"][0]["resources"]["limits"]) <= set(group["coveredResources"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_command_prints_manifests_that_can_be_applied(kind, capsys):
    line = [
        "kubernetes",
        "manifest",
        kind,
        "--name",
        "train",
        "--image",
        "i",
        "--nodes",
        "4",
        "--",
        "python",
        "train.py",
    ]
    assert main(line) == 0
    made = list(yaml.safe_load_all(capsys.readouterr().out))
    assert made == manifests(
        kind, ManifestRequest(name="train", image="i", num_nodes=4, command=("python", "train.py"))
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "Train"}, "a job's name has small letters"),
        ({"command": ()}, "there is no command to run"),
        ({"num_nodes": 0}, "nodes and slots must be at least 1"),
        ({"min_nodes": 4}, "--min-nodes must lie in 1..3"),
        ({"min_nodes": None, "any_leader": True}, "--any-leader is for elastic jobs"),
        ({"gang": "slurm"}, "--gang must be volcano"),
        ({"cluster": "newest"}, "a version of Kubernetes is like 1.33"),
    ],
)
def test_invalid_requests_are_explained(changes, words, capsys):
    with pytest.raises(ValueError, match=words):
        ManifestRequest(**{**REQUEST.__dict__, **changes})
    assert main(["kubernetes", "manifest", "job", "--name", "Train", "--image", "i", "--", "x"]) == 2
    assert "small letters" in capsys.readouterr().err
    with pytest.raises(ValueError, match="an MPIJob has a launcher"):
        manifests("mpijob", ManifestRequest(**{**REQUEST.__dict__, "any_leader": True}))


def test_the_policy_of_the_page_about_ports_replaces_that_of_the_manifest():
    page = (Path(__file__).parents[2] / "docs" / "clusters.md").read_text()
    [policy] = [
        block for block in re.findall(r"^```yaml\n(.*?)^```", page, re.MULTILINE | re.DOTALL) if "endPort" in block
    ]
    made = made_with(policy, "job")["NetworkPolicy"]["spec"]
    pods = {"matchLabels": made_with("", "job")["Job"]["spec"]["template"]["metadata"]["labels"]}
    assert made["podSelector"] == pods
    [rule] = made["ingress"]
    assert rule["from"] == [{"podSelector": pods}]
    meeting, ours = rule["ports"]
    assert meeting["port"] == DEFAULT_PORT
    assert allowed_ports({"HORA_PORTS": f"{ours['port']}-{ours['endPort']}"}) == range(20000, 20101)
