"""Manifests fit the schemas of Kubernetes, JobSet and Kubeflow; their commands parse; they contain no secret."""

from __future__ import annotations

import re

import pytest
import yaml

from hora.cli.dispatch import main
from hora.launch.options import Options, build_parser
from hora.launch.providers.join import find_place
from hora.launch.providers.kubernetes import KINDS, ManifestRequest, manifests, secret_command

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


def pod_specs(kind: str) -> list[dict]:
    found = []

    def search(value):
        if isinstance(value, dict):
            if "containers" in value:
                found.append(value)
            for entry in value.values():
                search(entry)
        elif isinstance(value, list):
            for entry in value:
                search(entry)

    search(manifests(kind, REQUEST))
    return found


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
    (_, job) = manifests("job", REQUEST)
    job["spec"]["template"]["spec"]["restartPolice"] = "Never"
    with pytest.raises(AssertionError, match="restartPolice is unknown"):
        assert_known(job, SCHEMAS["Job"])


@pytest.mark.parametrize("kind", ["job", "jobset", "trainjob"])
@pytest.mark.parametrize("changes", [{}, {"min_nodes": None}, {"any_leader": True}])
def test_manifests_fit_their_schemas(kind, changes):
    request = ManifestRequest(**{**REQUEST.__dict__, **changes})
    for manifest in manifests(kind, request):
        if manifest["kind"] not in ("Lease", "Role", "RoleBinding"):  # no package has their schemas
            assert_known(manifest, SCHEMAS[manifest["kind"]])
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
        "schedulingPolicy": {},
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
    ],
)
def test_invalid_requests_are_explained(changes, words, capsys):
    with pytest.raises(ValueError, match=words):
        ManifestRequest(**{**REQUEST.__dict__, **changes})
    assert main(["kubernetes", "manifest", "job", "--name", "Train", "--image", "i", "--", "x"]) == 2
    assert "small letters" in capsys.readouterr().err
    with pytest.raises(ValueError, match="an MPIJob has a launcher"):
        manifests("mpijob", ManifestRequest(**{**REQUEST.__dict__, "any_leader": True}))
