"""Version of Hora, and of the Horovod whose interface it keeps."""

from __future__ import annotations

DISTRIBUTION = "hora-train"  # its name on the package index, where `hora` is another project
HOROVOD_BASELINE = "0.28.1"  # the Horovod release whose interface is implemented


def version() -> str:
    import importlib.metadata  # here: it costs 15 ms, which `hora --help` can save

    try:
        return importlib.metadata.version(DISTRIBUTION)
    except importlib.metadata.PackageNotFoundError:
        return "0+unknown"


def page(name: str) -> str:
    """Return where a page of the documentation is: its address in a release, its file in a checkout."""
    import importlib.metadata

    try:
        urls = importlib.metadata.metadata(DISTRIBUTION).get_all("Project-URL") or []
    except importlib.metadata.PackageNotFoundError:
        urls = []
    site = dict(url.split(", ", 1) for url in urls).get("Documentation")
    return f"{site}{name.replace('.md', '.html')}" if site else f"docs/{name}"


def horovod_version() -> str:
    """Return the text of `horovodrun --version`: Horovod's version first, as scripts read it, then Hora's."""
    return f"{HOROVOD_BASELINE} (Hora {version()})"
