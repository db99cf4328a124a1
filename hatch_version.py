"""The package's version. Evaluated by hatchling (`[tool.hatch.version]`).

`VERSION` is the next release. The commit tagged with it is that release; any other commit is a build on the way there,
which sorts before it and carries the commit: 1.0.0rc1.dev1234+gabcdef0. A source archive keeps
the version it was made with.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent
VERSION = "1.0.0rc1"


def version() -> str:
    """Return the version to build."""
    archived = ROOT / "PKG-INFO"
    if archived.exists():
        return re.findall(r"^Version: (.+)$", archived.read_text(), re.MULTILINE)[0]
    if not (ROOT / ".git").exists():
        return f"{VERSION}.dev0"
    try:
        tags = [tag for tag in _git("tag", "--points-at", "HEAD").split() if re.match(r"v\d", tag)]
        if tags:
            return _released(tags[0])
        return f"{VERSION}.dev{_git('rev-list', '--count', 'HEAD')}+g{_git('rev-parse', '--short', 'HEAD')}"
    except (OSError, subprocess.SubprocessError):
        return f"{VERSION}.dev0"


def _released(tag: str) -> str:
    """Check that this tag, the version here and the changelog name the same release."""
    if tag != f"v{VERSION}":
        raise RuntimeError(f"tag {tag}: VERSION in hatch_version.py is {VERSION}")
    changes = (ROOT / "CHANGELOG.md").read_text()
    if not re.search(rf"^## {re.escape(VERSION)} - \d{{4}}-\d\d-\d\d$", changes, re.MULTILINE):
        raise RuntimeError(f"tag {tag}: CHANGELOG.md has no section '## {VERSION} - DATE'")
    return VERSION


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30).stdout.strip()


if __name__ == "__main__":
    print(version())
