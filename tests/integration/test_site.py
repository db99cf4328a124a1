"""The documentation's site in a real browser: nothing is cut off at two widths, search works from files."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow

CUT_OFF = """() => [...document.querySelectorAll("article pre > code, article table")]
    .filter((e) => e.scrollWidth > e.clientWidth + 2 && getComputedStyle(e).overflowX !== "visible")
    .map((e) => e.textContent.slice(0, 60))"""


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs: make docs installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine: apt-get install chromium")
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.mark.parametrize("width", [1280, 414])
def test_no_page_is_wider_than_the_window_and_no_code_is_cut_off(site, browser, width):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    pages = [page for page in sorted(site.rglob("*.html")) if "examples" not in page.parts and page.name != "404.html"]
    assert len(pages) > 30
    for page in pages:
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.name
        assert tab.evaluate(CUT_OFF) == [], page.name
    tab.close()


def test_search_works_from_files_and_nothing_is_fetched_from_elsewhere(site, browser):
    tab = browser.new_page()
    fetched: list[str] = []
    tab.on("request", lambda request: fetched.append(request.url))
    tab.goto((site / "reference" / "environment.html").as_uri())
    tab.click("input.md-search__input")
    tab.keyboard.type("straggler", delay=60)
    tab.locator(".md-search-result__item").first.wait_for(timeout=30_000)
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
    tab.close()
