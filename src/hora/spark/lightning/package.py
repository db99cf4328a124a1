"""Lightning's two packages, `lightning` and `pytorch_lightning`, each with its own classes.

A package is the module that users import as `pl`. Every subclass of a Lightning class is created by a function, once
per package. Nothing is imported before it is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator
from types import ModuleType

MIN_PL_VERSION = "1.3.8"  # Horovod's oldest; Hora is tested with 2.x
_MODULES = {"lightning": "lightning.pytorch", "pytorch_lightning": "pytorch_lightning"}


def _installed() -> Iterator[ModuleType]:
    names = [name for name in _MODULES if importlib.util.find_spec(name) is not None]
    if not names:
        raise ImportError(
            "horovod.spark.lightning needs lightning or pytorch_lightning: pip install 'hora-train[lightning]'"
        )
    for name in names:
        yield importlib.import_module(_MODULES[name])


def default_package() -> ModuleType:
    """Return `lightning` if it is installed, else `pytorch_lightning`; raises ImportError without either."""
    return next(_installed())


def package_of(model: object) -> ModuleType | None:
    """Return the package of a LightningModule; None for other modules."""
    return next((package for package in _installed() if isinstance(model, package.LightningModule)), None)
