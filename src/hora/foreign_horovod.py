"""A distribution of Horovod beside Hora: both own the import name `horovod`."""

from __future__ import annotations

import glob
import importlib.util
import sys
import warnings
from pathlib import Path


def foreign_conflict() -> tuple[str, str] | None:
    """Describe the conflict of two distributions that own `horovod`, and its remedy; None if Hora is the only one."""
    # importlib.metadata knows distributions too, but its import is too slow for the launch of a job.
    named = [name for folder in sys.path for name in glob.glob("horovod-*.*-info", root_dir=folder or ".")]
    folders = [name for name in named if "+hora" not in name]  # packaging/horovod brings no files
    if not folders:
        return None
    found = f"horovod {folders[0].removesuffix('-info').rpartition('.')[0].split('-')[1]}"
    spec = importlib.util.find_spec("horovod")
    path = Path(spec.origin) if spec is not None and spec.origin else None
    ours = path is not None and (path.parent / "_modules.py").exists() and "hora" in path.read_text()
    problem = (
        f"{found} is installed beside Hora, and both own the import name `horovod`. In use now: "
        f"{'Hora' if ours else found}'s {path}"
    )
    # Uninstalling the other distribution deletes the files that both have.
    return (
        problem,
        "run `pip uninstall -y horovod`, then install Hora again, with `pip install --force-reinstall --no-deps`",
    )


def foreign_message() -> str | None:
    """Return `foreign_conflict` as one text."""
    found = foreign_conflict()
    return None if found is None else f"{found[0]}. Their files overwrite one another: {found[1]}."


def warn_if_foreign_horovod() -> None:
    """Warn with `foreign_message`, if there is one."""
    message = foreign_message()
    if message is not None:
        warnings.warn(message, stacklevel=3)
