"""The package's version: the tag `vX.Y.Z` of the commit that is built. Evaluated by hatchling (`[tool.hatch.version]`).

After a tag it is X.Y.Z.postN+gCOMMIT. Without git or tags (a source archive, a shallow clone, an image) it is that of
the newest dated section of CHANGELOG.md; a tag without such a section is an error.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def released() -> str:
    """Return the version of the newest dated section of the changelog; 0.0.0 before the first release."""
    found = re.search(r"^## (\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    return found[1] if found else "0.0.0"


def described() -> tuple[str, int, str] | None:
    """Return the last tag's version, the number of commits since, and the commit; None without git or a tag."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--tags", "--long", "--match", "v[0-9]*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    tag, num_commits, commit = done.stdout.strip().rsplit("-", 2)
    return tag.removeprefix("v"), int(num_commits), commit


def version() -> str:
    """Return the version to build."""
    found = described()
    if found is None:
        return released()
    tagged, num_commits, commit = found
    if num_commits:
        return f"{tagged}.post{num_commits}+{commit}"
    if tagged != released():
        raise RuntimeError(
            f"tag v{tagged}: CHANGELOG.md's newest dated section is {released()}; add '## {tagged} - DATE'"
        )
    return tagged
