"""Detect another distribution that owns the import name `horovod`, when it is imported or a job is launched."""

from __future__ import annotations

import importlib.util
import os
import sys
import warnings
from pathlib import Path

__all__ = ["foreign_conflict", "foreign_message", "warn_if_foreign_horovod"]


def _foreign_horovod() -> str | None:
    """Return `horovod <version>` if that distribution is installed beside Hora, else None."""
    # importlib.metadata would do it too, and takes longer to import than a job's launch may wait.
    for folder in sys.path:
        try:
            names = os.listdir(folder or ".")
        except OSError:  # an archive, a folder that is not there, or one that others may not read
            continue
        for name in names:
            if name.startswith("horovod-") and name.endswith((".dist-info", ".egg-info")):
                return f"horovod {name.removesuffix('-info').rpartition('.')[0].split('-')[1]}"
    return None


def foreign_conflict() -> tuple[str, str] | None:
    """Describe the conflict of two distributions that claim `horovod`, and its remedy; None if Hora is the only one."""
    found = _foreign_horovod()
    if found is None:
        return None
    spec = importlib.util.find_spec("horovod")
    path = Path(spec.origin) if spec is not None and spec.origin else None
    ours = path is not None and (path.parent / "_modules.py").exists() and "hora" in path.read_text()
    problem = (
        f"{found} is installed beside Hora, and both own the import name `horovod`. In use now: "
        f"{'Hora' if ours else found}'s {path}"
    )
    # Uninstalling the other one deletes the files that both have.
    return problem, "run `pip uninstall -y horovod`, then `pip install --force-reinstall --no-deps hora`"


def foreign_message() -> str | None:
    """Return `foreign_conflict` as one text."""
    found = foreign_conflict()
    return None if found is None else f"{found[0]}. Their files overwrite one another: {found[1]}."


def warn_if_foreign_horovod() -> None:
    """Warn with `foreign_message`, if there is one."""
    message = foreign_message()
    if message is not None:
        warnings.warn(message, stacklevel=3)
