"""Versions of Hora, of the Horovod whose interface it keeps, and of other packages; a foreign Horovod beside Hora."""

from __future__ import annotations

import glob
import importlib.util
import re
import sys
import warnings
from pathlib import Path

HOROVOD_BASELINE = "0.28.1"  # the Horovod release whose interface is implemented

# The oldest versions that Hora accepts. `pyproject.toml` has the same; `runtimes/oldest.txt` installs them.
FLOORS = {
    "torch": "2.3",
    "numpy": "1.23",
    "pyspark": "3.4",
    "pandas": "1.5",
    "pyarrow": "11",
    "lightning": "2.0",
    "ray": "2.9",
}

# Published vulnerabilities of `torch.load(weights_only=True)`, each with the version that fixed it.
_TORCH_ADVISORIES = {"CVE-2025-32434": "2.6", "CVE-2026-24747": "2.10"}


def version() -> str:
    import importlib.metadata  # here: it costs 15 ms, which `hora --help` can save

    try:
        return importlib.metadata.version("hora")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def horovod_version() -> str:
    """Return the text of `horovodrun --version`: Horovod's version first, as scripts read it, then Hora's."""
    return f"{HOROVOD_BASELINE} (Hora {version()})"


def too_old(package: str, found: str) -> bool:
    """Return whether this version of a package is below its floor."""
    return _numbers(found) < _numbers(FLOORS[package])


def require(package: str, found: str, *, feature: str = "Hora", floor: str | None = None) -> None:
    """Raise ImportError if this version of a package is below its floor, or below the floor of one feature."""
    floor = floor or FLOORS[package]
    if _numbers(found) < _numbers(floor):
        raise ImportError(
            f"{package} {found} is too old for {feature}, which needs {floor} or newer: pip install "
            f"'{package}>={floor}', or choose an image or runtime that has it"
        )


def missing_extra(error: ModuleNotFoundError, feature: str, extra: str) -> ModuleNotFoundError:
    """Return an error that names the extra of a missing package. Raises the given one if it is about another module."""
    if error.name not in ("tensorflow", "keras", "pyspark", "lightning"):
        raise error
    words = f"{feature} needs {error.name}: install Hora with the extra {extra!r}, for example pip install '.[{extra}]'"
    return ModuleNotFoundError(words, name=error.name)


def advisories(torch_version: str) -> list[str]:
    """Return the vulnerabilities of this torch that let a file run code in `torch.load(weights_only=True)`."""
    found = _numbers(torch_version)
    return [name for name, fixed in _TORCH_ADVISORIES.items() if found < _numbers(fixed)]


def require_gil() -> None:
    """Raise RuntimeError in a free-threaded Python (3.13t, 3.14t) that runs without the GIL."""
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        raise RuntimeError(
            "this Python runs without the global interpreter lock, which Hora does not support; set PYTHON_GIL=1 on "
            "all ranks (or start python with -X gil=1), or use a Python that is not free-threaded"
        )


def _numbers(text: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: `(2, 3)` of `2.3.1+cpu`."""
    return tuple(int(part) for part in re.findall(r"\d+", text.split("+")[0])[:2])


def foreign_conflict() -> tuple[str, str] | None:
    """Describe the conflict of two distributions that own `horovod`, and its remedy; None if Hora is the only one."""
    # importlib.metadata knows distributions too, but its import is too slow for the launch of a job.
    folders = [name for folder in sys.path for name in glob.glob("horovod-*.*-info", root_dir=folder or ".")]
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
