"""Python files that only the driver has, for the ranks of a job: `HorovodRunner(py_files=…)`.

On a cluster they travel as Spark's own files do (`addPyFile`, or artifacts of a Connect session). Modules and packages
become one archive that is named by its content: Spark never replaces a file that it has, and users edit theirs.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib.util
import os
import shutil
import site
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from typing import Any

from hora.launch.providers.spark.cluster import is_connect

_ARCHIVES = (".zip", ".egg", ".whl")
_sent: set[tuple[str, str]] = set()  # applications or sessions, and the archives that they have


def checked(given: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None) -> tuple[str, ...]:
    """Return absolute paths. Raises ValueError for what is no module, package or archive."""
    entries = [given] if isinstance(given, str | os.PathLike) else list(given or ())
    paths = tuple(os.path.abspath(entry) for entry in entries)
    for path in paths:
        if not os.path.exists(path):
            raise ValueError(f"py_files: there is no {path}")
        if not os.path.isdir(path) and not path.endswith((".py", *_ARCHIVES)):
            raise ValueError(
                f"py_files takes modules (.py), folders of packages and {', '.join(_ARCHIVES)}, not {path}"
            )
    return paths


def local_path(paths: Iterable[str]) -> list[str]:
    """Return the entries of `sys.path` under which a process of this machine imports them."""
    return list(dict.fromkeys(path if path.endswith(_ARCHIVES) else os.path.dirname(path) for path in paths))


def send(cluster: Any, paths: Iterable[str]) -> None:
    """Have Spark give them to the tasks of this SparkContext or Connect session."""
    owner = str(cluster.session_id if is_connect(cluster) else cluster.applicationId)
    archives = [path for path in paths if path.endswith(_ARCHIVES)]
    sources = [path for path in paths if not path.endswith(_ARCHIVES)]
    for copy in [*(_copied(path) for path in archives), *([_archived(sources)] if sources else [])]:
        if (owner, copy) in _sent:
            continue
        if is_connect(cluster):
            cluster.addArtifacts(copy, pyfile=True)
        else:
            before = list(sys.path)
            cluster.addPyFile(copy)
            sys.path[:] = before  # the driver goes on importing the files themselves
        _sent.add((owner, copy))


@functools.cache
def _folder() -> str:
    """Return a folder of this process, from which Spark serves the files to later executors too."""
    folder = tempfile.mkdtemp(prefix="hora-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _named(path: str, digest: str) -> str:
    """Rename a file to a name that no other content has; return it. Spark imports from zip files."""
    named = os.path.join(_folder(), f"hora-files-{digest[:16]}.zip")
    os.rename(path, named)
    return named


def _copied(archive: str) -> str:
    copy = shutil.copyfile(archive, os.path.join(_folder(), "copy"))
    with open(copy, "rb") as file:
        return _named(copy, hashlib.sha256(file.read()).hexdigest())


def _archived(sources: Iterable[str]) -> str:
    """Write modules and packages to an archive; return its path."""
    whole = os.path.join(_folder(), "all")
    digest = hashlib.sha256()
    with zipfile.ZipFile(whole, "w", zipfile.ZIP_DEFLATED) as archive:
        for path, name in sorted(_files(sources), key=lambda entry: entry[1]):
            with open(path, "rb") as file:
                content = file.read()
            digest.update(f"{name}\0{len(content)}\0".encode() + content)
            archive.writestr(name, content)
    return _named(whole, digest.hexdigest())


def _files(sources: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each file and its name in the archive."""
    for source in sources:
        if not os.path.isdir(source):
            yield source, os.path.basename(source)
        for folder, folders, names in os.walk(source):
            folders[:] = [name for name in folders if name != "__pycache__" and not name.startswith(".")]
            for path in (os.path.join(folder, name) for name in names):
                yield path, os.path.relpath(path, os.path.dirname(source))


def advice(missing: BaseException | None) -> str:
    """Return how a module gets to the ranks that the driver has and they lack; empty for any other exception."""
    if not isinstance(missing, ModuleNotFoundError) or not missing.name:
        return ""
    with contextlib.suppress(ImportError, ValueError):
        found = importlib.util.find_spec(missing.name.partition(".")[0])
        if found is not None and (path := next(iter(found.submodule_search_locations or ()), found.origin)):
            installed = path.startswith(tuple(site.getsitepackages()))
            how = "install it on every node" if installed else f"send it with HorovodRunner(…, py_files=[{path!r}])"
            return f"\nThe driver has the module {found.name}, and the ranks have not: {how}."
    return ""
