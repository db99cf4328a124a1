"""The addresses in the package's metadata, and its README with absolute links. Called by hatchling.

On the forge, GITHUB_SERVER_URL and GITHUB_REPOSITORY name the repository, and a source archive keeps the addresses that
it was made with. A build elsewhere has none: its user has the pages in a checkout.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

ROOT = Path(__file__).resolve().parent
# Of a Markdown link or picture: what stands before and after a path of the repository.
_LINK = re.compile(r'(\]\(|src=")(?![a-z]+:|#)([^)#"\s]+)')


class Addresses(MetadataHookInterface):
    """Adds `urls` and `readme`."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        urls = addresses(os.environ, metadata.get("version") or "")
        text = (ROOT / "README.md").read_text()
        if urls:
            metadata["urls"] = urls
            text = with_absolute_links(text, urls["Repository"], _revision(metadata.get("version") or ""))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


def addresses(environ: Mapping[str, str], version: str) -> dict[str, str]:
    """Return the project's addresses by their labels; none if the repository has no known address."""
    archived = ROOT / "PKG-INFO"
    if archived.exists():
        return dict(re.findall(r"^Project-URL: ([^,]+), (\S+)$", archived.read_text(), re.MULTILINE))
    name = environ.get("GITHUB_REPOSITORY", "")
    if not name:
        return {}
    repository = f"{environ.get('GITHUB_SERVER_URL') or 'https://github.com'}/{name}"
    owner, _, project = name.partition("/")
    return {
        "Documentation": f"https://{owner.lower()}.github.io/{project}/{'latest' if '.dev' in version else version}/",
        "Repository": repository,
        "Changelog": f"{repository}/blob/{_revision(version)}/CHANGELOG.md",
        "Issues": f"{repository}/issues",
        "Security": f"{repository}/security/advisories/new",
    }


def with_absolute_links(text: str, repository: str, revision: str) -> str:
    """Return the README as the package index shows it, where a relative link leads nowhere."""

    def absolute(found: re.Match[str]) -> str:
        before, path = found.groups()
        if path.startswith("../../"):  # a page of the forge, which is not in the repository
            return f"{before}{repository}/{path.removeprefix('../../')}"
        kind = "raw" if path.endswith((".svg", ".gif", ".png")) else "blob"
        return f"{before}{repository}/{kind}/{revision}/{path}"

    return _LINK.sub(absolute, text)


def _revision(version: str) -> str:
    return "main" if not version or ".dev" in version else f"v{version}"
