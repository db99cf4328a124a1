"""The addresses in the package's metadata, the README on the package index, and where messages find a page."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from email.message import Message
from pathlib import Path

import pytest

from hora.version import page

ROOT = Path(__file__).parents[2]
FORGE = {"GITHUB_SERVER_URL": "https://forge.example", "GITHUB_REPOSITORY": "Founders/hora"}


@pytest.fixture(scope="module")
def hook():
    pytest.importorskip("hatchling")
    sys.path.insert(0, str(ROOT))
    try:
        import hatch_metadata

        return hatch_metadata
    finally:
        sys.path.remove(str(ROOT))


def test_a_release_names_its_addresses(hook):
    urls = hook.addresses(FORGE, "1.0.0")
    assert urls == {
        "Documentation": "https://founders.github.io/hora/1.0.0/",
        "Repository": "https://forge.example/Founders/hora",
        "Changelog": "https://forge.example/Founders/hora/blob/v1.0.0/CHANGELOG.md",
        "Issues": "https://forge.example/Founders/hora/issues",
        "Security": "https://forge.example/Founders/hora/security/advisories/new",
    }
    assert hook.addresses(FORGE, "1.0.0.dev3+gabc")["Documentation"].endswith("/hora/latest/")


def test_a_build_elsewhere_has_none_and_keeps_the_readme(hook, monkeypatch):
    monkeypatch.delenv("GITHUB_REPOSITORY", raising=False)
    metadata = {"version": "1.0.0"}
    hook.Addresses(str(ROOT), {}).update(metadata)
    assert "urls" not in metadata
    assert metadata["readme"]["text"] == (ROOT / "README.md").read_text()


def test_every_link_of_a_released_readme_is_absolute_and_leads_to_a_file(hook, monkeypatch):
    for name, value in FORGE.items():
        monkeypatch.setenv(name, value)
    metadata = {"version": "1.0.0"}
    hook.Addresses(str(ROOT), {}).update(metadata)
    links = re.findall(r'\]\(([^)\s]+)|src="([^"]+)"', metadata["readme"]["text"])
    targets = [first or second for first, second in links]
    assert len(targets) > 20
    for target in targets:
        assert target.startswith(("https://", "#")), target
        if found := re.match(r"https://forge.example/Founders/hora/(?:blob|raw)/v1.0.0/([^#]+)", target):
            assert (ROOT / found[1]).exists(), target


@pytest.mark.parametrize(
    ("urls", "expected"),
    [
        (
            ["Documentation, https://founders.github.io/hora/1.0.0/"],
            "https://founders.github.io/hora/1.0.0/elastic.html",
        ),
        ([], "docs/elastic.md"),
    ],
)
def test_messages_name_the_page_where_their_reader_has_it(urls, expected, monkeypatch):
    metadata = Message()
    for url in urls:
        metadata["Project-URL"] = url
    monkeypatch.setattr(importlib.metadata, "metadata", lambda name: metadata)
    assert page("elastic.md") == expected
