"""`hora report-bug`: the facts that a developer needs to investigate a failure, in one file without secrets.

Versions, the findings of `hora doctor`, the variables of Hora and of launchers, and the end of the files that are
named: the job's output, its `verdict.json`. Names of hosts and users stay: read the file before you send it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import io
import os
import platform
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from hora.cli import doctor
from hora.launch.environment import variables
from hora.spelling import Parser
from hora.version import horovod_version

_PACKAGES = (
    *("torch", "numpy", "cloudpickle", "cryptography", "pyspark", "pandas", "pyarrow", "ray", "lightning"),
    *("pytorch-lightning", "transformers", "accelerate", "tensorflow", "tensorflow-cpu", "keras", "mpi4py", "horovod"),
)
_VARIABLES = re.compile(
    r"(HORA|HOROVOD|OMP|NCCL|TORCH|SPARK|PYSPARK|SLURM|OMPI|PMI|RANK|WORLD_SIZE|LOCAL_RANK|MASTER|CUDA|DATABRICKS)"
)
_SECRET_NAME = re.compile(r"SECRET|TOKEN|PASSW|CREDENTIAL|KEY|AUTH", re.IGNORECASE)
# Passwords in URLs, the live page's token, and whatever a line calls a secret.
_SECRETS = (
    (re.compile(r"(\w+://[^\s/:@]*):[^\s/@]+@"), r"\1:***@"),
    (re.compile(r"(#token=)\S+"), r"\1***"),
    (re.compile(r"((?:secret|token|passw\w*|api[_-]?key|authorization)\W{1,3})\S+", re.IGNORECASE), r"\1***"),
    (re.compile(r"\b[0-9a-fA-F]{32,}\b"), "***"),
)
_LAST_LINES = 300


def without_secrets(text: str) -> str:
    """Return a text with what looks like a password, a token or a key replaced by ***."""
    for pattern, replacement in _SECRETS:
        text = pattern.sub(replacement, text)
    return text


def report(environ: Mapping[str, str], files: Sequence[Path]) -> Iterator[str]:
    """Yield the sections of the report."""
    found = [(name, _version(name)) for name in _PACKAGES]
    versions = "\n".join(f"{name} {version}" for name, version in found if version)
    system = f"{platform.platform()}, Python {platform.python_version()}"
    yield f"horovodrun --version: {horovod_version()}\n{system}\n{versions}"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        doctor.main([])
    yield f"hora doctor\n{printed.getvalue()}"
    chosen = sorted(name for name in environ if _VARIABLES.match(name))
    yield "variables\n" + "\n".join(
        f"{name}={'***' if _SECRET_NAME.search(name) else environ[name]}" for name in chosen
    )
    for path in files:
        lines = path.read_text(errors="replace").splitlines()
        yield f"the last {min(len(lines), _LAST_LINES)} lines of {path}\n" + "\n".join(lines[-_LAST_LINES:])


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="hora report-bug", description="Write what a bug report needs into one file, without secrets.")
    parser.add_argument(
        "files", nargs="*", type=Path, metavar="FILE", help="the job's output, verdict.json: their end is added"
    )
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("hora-report.txt"), help="the file to write (default: %(default)s)"
    )
    return parser


def main(argv: Sequence[str]) -> None:
    """Run `hora report-bug`."""
    arguments = make_parser().parse_args(argv)
    for path in arguments.files:
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
    if arguments.output.exists():
        raise ValueError(f"{arguments.output} exists: remove it, or choose another name with --output")
    text = without_secrets("\n\n".join(report(variables(), arguments.files))) + "\n"
    with os.fdopen(os.open(arguments.output, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w") as file:
        file.write(text)
    print(f"wrote {arguments.output}. It names hosts, users and paths: read it before you send it.")
