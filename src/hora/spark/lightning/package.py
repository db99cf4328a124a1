"""Lightning's two packages, `lightning` and `pytorch_lightning`, each with its own classes.

Every subclass of a Lightning class is therefore created by a function, once per `Package`. Nothing is imported before
it is needed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

MIN_PL_VERSION = "1.3.8"  # Horovod's oldest; Hora is tested with 2.x
_NAMES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


@dataclass(frozen=True)
class Package:
    """One of the two packages. `module` is what users import as `pl`."""

    name: str

    @property
    def module(self) -> Any:
        return importlib.import_module(_NAMES[self.name])

    def part(self, path: str) -> Any:
        """Return a submodule, such as `strategies.parallel`."""
        return importlib.import_module(f"{_NAMES[self.name]}.{path}")


@functools.cache
def _installed() -> tuple[Package, ...]:
    found = tuple(Package(name) for name in _NAMES if importlib.util.find_spec(name) is not None)
    if not found:
        raise ImportError(
            "horovod.spark.lightning needs the package lightning or pytorch_lightning: pip install lightning"
        )
    return found


def default_package() -> Package:
    """Return `lightning` if it is installed, else `pytorch_lightning`; raises ImportError without either."""
    return _installed()[0]


def package_of(model: object) -> Package | None:
    """Return the package of a LightningModule; None for other modules."""
    for package in _installed():
        if isinstance(model, package.module.LightningModule):
            return package
    return None
