"""Requirements on other packages and on Python: oldest versions, extras, the GIL, known vulnerabilities of torch."""

from __future__ import annotations

import re
import sys

from hora.version import DISTRIBUTION

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
    words = f"{feature} needs {error.name}: install Hora with its extra, pip install '{DISTRIBUTION}[{extra}]'"
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
