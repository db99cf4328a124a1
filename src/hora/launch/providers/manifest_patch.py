"""Users' patches of the manifests that `kubernetes` makes: of an object, or of all pods of a job, whatever its kind.

Pure. A TrainJob has no pods of its own: what Trainer takes for the container "node" goes into the job's `trainer`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hora.launch.providers.strategic_merge import is_removal, merge

Manifest = dict[str, Any]

# What Trainer lets a TrainJob change of its runtime's pods. The rest of the container "node" stands in `trainer`.
_PATCHABLE = {
    "affinity", "containers", "imagePullSecrets", "initContainers", "nodeSelector", "schedulingGates",
    "securityContext", "serviceAccountName", "terminationGracePeriodSeconds", "tolerations", "volumes",
}  # fmt: skip
_PATCHABLE_CONTAINER = {"env", "name", "securityContext", "volumeMounts"}


def patched(made: Sequence[Manifest], patch: Manifest) -> list[Manifest]:
    """Return the manifests with a user's patch applied to those of its kind, or to all pods if its kind is Pod."""
    kind, name = patch.get("kind"), patch.get("metadata", {}).get("name")
    if kind == "Pod":
        if name is not None:
            raise ValueError(f"a patch of kind Pod is for all pods and has no name, but it has {name!r}")
        return [
            _with_pods(manifest, {key: patch[key] for key in ("metadata", "spec") if key in patch}) for manifest in made
        ]
    chosen = [one for one in made if one["kind"] == kind and name in (None, one["metadata"]["name"])]
    if not chosen:
        found = ", ".join(f"{one['kind']} {one['metadata']['name']}" for one in made)
        raise ValueError(f"a patch is for {kind} {name or ''}, but there are only: {found}, and Pod for all pods")
    for one in chosen:
        if patch.get("apiVersion", one["apiVersion"]) != one["apiVersion"]:
            raise ValueError(f"{kind} is of {one['apiVersion']} here, but a patch is of {patch['apiVersion']}")
    return [merge(one, patch) if one in chosen else one for one in made if not (one in chosen and is_removal(patch))]


def _with_pods(manifest: Manifest, patch: Manifest) -> Manifest:
    """Return a manifest with a patch applied to its pod templates."""
    spec = manifest.get("spec", {})
    if manifest["kind"] == "Job":
        return _merge_template(manifest, ("spec", "template"), patch)
    if manifest["kind"] == "JobSet":
        jobs = [_merge_template(job, ("template", "spec", "template"), patch) for job in spec["replicatedJobs"]]
        return {**manifest, "spec": {**spec, "replicatedJobs": jobs}}
    if manifest["kind"] == "MPIJob":
        both = {role: _merge_template(one, ("template",), patch) for role, one in spec["mpiReplicaSpecs"].items()}
        return {**manifest, "spec": {**spec, "mpiReplicaSpecs": both}}
    return _with_trainer_pods(manifest, patch) if manifest["kind"] == "TrainJob" else manifest


def _merge_template(whole: Manifest, path: tuple[str, ...], patch: Manifest) -> Manifest:
    """Return `whole` with a pod template at `path` patched."""
    name, *rest = path
    if rest:
        return {**whole, name: _merge_template(whole[name], tuple(rest), patch)}
    template = merge(whole[name], patch)
    for container in template["spec"]["containers"]:
        if "image" not in container:
            others = ", ".join(one["name"] for one in whole[name]["spec"]["containers"])
            raise ValueError(f"a patch adds the container {container['name']!r} without an image; there is {others}")
    return {**whole, name: template}


def _with_trainer_pods(manifest: Manifest, patch: Manifest) -> Manifest:
    """Put what Trainer takes from its `trainer` there, and the rest into the runtime's patch."""
    patch_spec, trainer = dict(patch.get("spec", {})), manifest["spec"]["trainer"]
    containers = []
    for container in patch_spec.get("containers", []):
        own = {"env", "image", "resources"} & container.keys() if container["name"] == "node" else set()
        moved = {("resourcesPerNode" if field == "resources" else field): container[field] for field in own}
        trainer = merge(trainer, moved)
        containers.append({field: value for field, value in container.items() if field not in own})
    if containers:
        patch_spec["containers"] = containers
    refused = sorted(patch_spec.keys() - _PATCHABLE)
    refused += sorted({field for one in containers for field in one} - _PATCHABLE_CONTAINER)
    if refused:
        raise ValueError(
            f"a TrainJob cannot set {', '.join(refused)} of its pods, only {', '.join(sorted(_PATCHABLE))}; put it "
            "into the ClusterTrainingRuntime"
        )
    (runtime,) = manifest["spec"]["runtimePatches"]
    (job,) = runtime["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pods = job["template"]["spec"]["template"]
    job = {**job, "template": {"spec": {"template": merge(pods, {**patch, "spec": patch_spec})}}}
    runtime = {**runtime, "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": [job]}}}}
    return {**manifest, "spec": {**manifest["spec"], "trainer": trainer, "runtimePatches": [runtime]}}
