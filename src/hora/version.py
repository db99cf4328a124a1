"""The version of the installed package, and the one that `horovod.__version__` shows."""

from __future__ import annotations

__all__ = ["HOROVOD_BASELINE", "horovod_version", "version"]

HOROVOD_BASELINE = "0.28.1"  # the Horovod release whose interface is kept


def version() -> str:
    """Hora's own version."""
    import importlib.metadata  # here: it costs 15 ms, which `hora --help` need not pay

    try:
        return importlib.metadata.version("hora")
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def horovod_version() -> str:
    """Return the text of `horovodrun --version`: Horovod's version first, as scripts read it, then Hora's."""
    return f"{HOROVOD_BASELINE} (Hora {version()})"
