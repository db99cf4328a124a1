"""Another distribution that also owns the import name `horovod`: sought when `horovod.torch` is imported."""

from __future__ import annotations

import importlib.metadata
import warnings

__all__ = ["foreign_horovod", "warn_if_foreign_horovod"]


def foreign_horovod() -> str | None:
    """`horovod <version>` if that distribution is installed beside Hora, else None."""
    try:
        return f"horovod {importlib.metadata.version('horovod')}"
    except importlib.metadata.PackageNotFoundError:
        return None


def warn_if_foreign_horovod(package_path: str) -> None:
    """Warn that two distributions claim `horovod`, and say which files are in use (`package_path`)."""
    found = foreign_horovod()
    if found is not None:
        warnings.warn(
            f"{found} is installed beside Hora, and both own the import name `horovod`. In use now: Hora's "
            f"{package_path}. Their files overwrite one another: run `pip uninstall horovod`, then "
            "`pip install --force-reinstall --no-deps hora`.",
            stacklevel=3,
        )
