"""The command `hora kubernetes`: prints manifests for kubectl.

hora kubernetes manifest job --name train --image example.com/train --nodes 2 --slots 4 -- python train.py | kubectl
apply -f -
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from hora.launch.providers.kubernetes import GANGS, KINDS, ManifestRequest, manifests, needs, secret_command
from hora.launch.providers.manifest_patch import Manifest
from hora.spelling import Parser


def main(argv: Sequence[str]) -> None:
    end = argv.index("--") if "--" in argv else len(argv)
    arguments = vars(make_parser().parse_args(list(argv[:end])))
    kind, files = arguments.pop("kind"), arguments.pop("patch")
    request = ManifestRequest(**arguments, command=tuple(argv[end + 1 :]))
    made = manifests(kind, request, [patch for file in files for patch in read_patches(file)])
    import yaml

    minor, operators = needs(kind, request)
    print(f"# For Kubernetes 1.{minor} or later{f', with {operators}' if operators else ''}.")
    if kind != "mpijob":
        print(f"# The nodes' secret, once, before this is applied:\n#   {secret_command(request)}")
    print(yaml.safe_dump_all(json.loads(json.dumps(made)), sort_keys=False), end="")  # without YAML's references


def read_patches(file: str) -> list[Manifest]:
    """Return the documents of a YAML file."""
    import yaml

    try:
        found = [document for document in yaml.safe_load_all(Path(file).read_text()) if document is not None]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"the patch {file} is no YAML: {error}") from error
    for document in found:
        if not isinstance(document, dict) or "kind" not in document:
            raise ValueError(f"a patch in {file} must name its kind, for example `kind: Pod`, but it is {document!r}")
    return found


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="hora kubernetes", description="Print manifests of jobs for Kubernetes, for kubectl apply -f -."
    )
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    about = "Print a manifest, for kubectl apply -f -."
    manifest = actions.add_parser(
        "manifest", help=about, description=about, epilog="After --: the command and its arguments."
    )
    add = manifest.add_argument
    add("kind", choices=KINDS, help="a plain Job with its Service, a JobSet, or Kubeflow's TrainJob or MPIJob")
    add("--name", required=True, help="name of the job")
    add("--image", required=True, help="container image that has Hora and the training")
    add("--nodes", dest="num_nodes", metavar="N", type=int, default=2, help="number of pods (default: 2)")
    add("--slots", metavar="N", type=int, default=1, help="processes per pod (default: 1)")
    add("--min-nodes", metavar="N", type=int, help="smallest number of pods; makes the job elastic")
    add("--any-leader", action="store_true", help="any pod may lead: the job's state is in a Lease and a Secret")
    add("--namespace", help="namespace (default: kubectl's)")
    add("--cpu", help="cores per pod")
    add("--memory", help="memory per pod, for example 16Gi")
    add("--gpus", metavar="N", type=int, default=0, help="NVIDIA GPUs per pod (default: 0)")
    about = "seconds for a last commit when pods are removed (default: 25)"
    add("--leave-timeout", dest="leave_s", metavar="SECONDS", type=int, default=25, help=about)
    about = "let the command write anywhere in its container, not only to /tmp"
    add("--writable-root", action="store_true", help=about)
    about = "ClusterTrainingRuntime of a TrainJob (default: torch-distributed)"
    add("--runtime", default="torch-distributed", help=about)
    add("--queue", metavar="NAME", help="queue of Kueue, or of Volcano with --gang volcano")
    add("--gang", choices=GANGS, help="scheduler that starts all pods of the job or none")
    about = "version of the cluster, for example 1.33; an error if the manifest needs a later one"
    add("--kubernetes-version", dest="cluster", metavar="VERSION", help=about)
    about = "YAML file of strategic merge patches, by kind; `kind: Pod` is for all pods of the job (repeatable)"
    add("--patch", metavar="FILE", action="append", default=[], help=about)
    return parser
