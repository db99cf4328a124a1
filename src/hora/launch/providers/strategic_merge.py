"""Strategic merge patches of Kubernetes manifests, as `kubectl patch` and Kustomize apply them. Pure.

Mappings are merged, and null removes a field. Lists whose entries have a key (containers by name, mounts by path) are
merged entry by entry; other lists are replaced. `$patch: delete` removes an entry or a field, and `$patch: replace`
replaces it instead of merging.
"""

from __future__ import annotations

from typing import Any

_DIRECTIVE = "$patch"
# The keys of Kubernetes' types, and those of JobSet's and Trainer's lists.
_KEYS: dict[str, tuple[str, ...]] = {
    "containers": ("name",),
    "env": ("name",),
    "hostAliases": ("ip",),
    "imagePullSecrets": ("name",),
    "initContainers": ("name",),
    "ports": ("containerPort", "port"),  # of a container, of a Service
    "replicatedJobs": ("name",),
    "resourceClaims": ("name",),
    "runtimePatches": ("manager",),
    "schedulingGates": ("name",),
    "topologySpreadConstraints": ("topologyKey",),
    "volumeDevices": ("devicePath",),
    "volumeMounts": ("mountPath",),
    "volumes": ("name",),
}


def merge(target: Any, patch: Any, *, field: str = "") -> Any:
    """Return `target` with `patch` applied; neither is changed. `field`: the name of the field that both are."""
    if isinstance(patch, dict):
        return _merge_mappings(target if isinstance(target, dict) else {}, patch)
    if isinstance(patch, list):
        keys = _KEYS.get(field)
        if keys is None or not all(isinstance(entry, dict) for entry in patch):
            return patch
        return _merge_lists(target if isinstance(target, list) else [], patch, field, keys)
    return patch


def is_removal(patch: Any) -> bool:
    """Return whether a patch removes the object or field to which it applies."""
    return patch is None or (isinstance(patch, dict) and patch.get(_DIRECTIVE) == "delete")


def _merge_mappings(target: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in patch if name.startswith("$") and name != _DIRECTIVE]
    if unknown or patch.get(_DIRECTIVE, "merge") not in ("merge", "replace", "delete"):
        found = unknown[0] if unknown else f"{_DIRECTIVE}: {patch[_DIRECTIVE]}"
        raise ValueError(f"a patch may have $patch: delete, replace or merge, but it has {found}")
    made = {} if patch.get(_DIRECTIVE) == "replace" else dict(target)
    for name, value in patch.items():
        if name == _DIRECTIVE:
            continue
        if is_removal(value):
            made.pop(name, None)
        else:
            made[name] = merge(made.get(name), value, field=name)
    return made


def _merge_lists(target: list[Any], patch: list[Any], field: str, keys: tuple[str, ...]) -> list[Any]:
    made = [] if {_DIRECTIVE: "replace"} in patch else list(target)
    for entry in patch:
        if entry == {_DIRECTIVE: "replace"}:
            continue
        key = next((key for key in keys if key in entry), None)
        if key is None:
            raise ValueError(f"an entry of {field} in a patch needs {' or '.join(keys)}, but it is {entry}")
        place = next((number for number, other in enumerate(made) if other.get(key) == entry[key]), None)
        if is_removal(entry):
            made = [other for number, other in enumerate(made) if number != place]
        elif place is None:
            made.append(merge({}, entry))
        else:
            made[place] = merge(made[place], entry)
    return made
