"""The documentation's site in a real browser: no content is cut off at two widths, pages look unchanged, and search
works from files.

`HORA_UPDATE_PICTURES=1 pytest …` rewrites the thumbnails: inspect them before committing.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image, ImageChops, ImageStat

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow

SITE_URL = "https://hora.example.org/"
WIDE, PHONE = 1280, 414
# On a phone wide tables and drawings scroll in their own boxes; code wraps everywhere.
CUT_OFF = """(phone) => [...document.querySelectorAll("article :is(pre > code, img, .md-typeset__scrollwrap)")]
    .filter((e) => e.scrollWidth > e.clientWidth + 2 || e.getBoundingClientRect().right > innerWidth + 1)
    .filter((e) => !(phone && getComputedStyle(e).overflowX === "auto"
        && e.matches(".md-typeset__scrollwrap, .language-text code")))
    .map((e) => e.textContent.slice(0, 60))"""
LOOKED_AT = ("index", "first_script", "install", "reference/tasks")
THUMBNAILS = Path(__file__).parent / "site_thumbnails.png"
THUMBNAIL = (96, 120)
# Of 255, averaged over a thumbnail. Other fonts and frames of the animation stay below it; a missing style sheet,
# picture or column does not.
MOST_DIFFERENCE = 12.0


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("no mkdocs: make setup installs it")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "HORA_SITE_URL": SITE_URL}
    subprocess.run(command, cwd=ROOT, check=True, timeout=500, env=environment)
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


@pytest.mark.parametrize("width", [WIDE, PHONE])
def test_no_page_is_wider_than_the_window_and_no_code_is_cut_off(site, browser, width):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    pages = _pages(site)
    assert len(pages) > 30
    for page in pages:
        tab.goto(page.as_uri())
        assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth"), page.name
        assert tab.evaluate(CUT_OFF, width == PHONE) == [], page.name
    tab.close()


def test_pages_look_unchanged(site, browser):
    pictures = []
    for width, scheme in itertools.product((WIDE, PHONE), ("light", "dark")):
        tab = browser.new_page(viewport={"width": width, "height": width * 5 // 4}, color_scheme=scheme)
        for name in LOOKED_AT:
            tab.goto((site / f"{name}.html").as_uri())
            picture = Image.open(io.BytesIO(tab.screenshot(animations="disabled"))).convert("RGB")
            pictures.append((f"{name}, {width} wide, {scheme}", picture.resize(THUMBNAIL, Image.Resampling.BOX)))
        tab.close()
    places = [(index * THUMBNAIL[0] % (4 * THUMBNAIL[0]), index // 4 * THUMBNAIL[1]) for index in range(len(pictures))]
    if os.environ.get("HORA_UPDATE_PICTURES"):
        sheet = Image.new("RGB", (4 * THUMBNAIL[0], len(pictures) // 4 * THUMBNAIL[1]))
        for place, (_, picture) in zip(places, pictures, strict=True):
            sheet.paste(picture, place)
        sheet.save(THUMBNAILS, optimize=True)
    before = Image.open(THUMBNAILS).convert("RGB")
    for (left, top), (what, picture) in zip(places, pictures, strict=True):
        old = before.crop((left, top, left + THUMBNAIL[0], top + THUMBNAIL[1]))
        difference = sum(ImageStat.Stat(ImageChops.difference(old, picture)).mean) / 3
        assert difference < MOST_DIFFERENCE, f"{what} looks different (HORA_UPDATE_PICTURES=1 takes it as it is now)"


def test_the_sitemap_has_every_page_and_no_page_loads_external_files(site):
    sitemap = (site / "sitemap.xml").read_text()
    for page in _pages(site):
        assert f"<loc>{SITE_URL}{page.relative_to(site)}</loc>" in sitemap
    for page in [*_pages(site), site / "404.html"]:
        assert (
            re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://(?!hora\.example)[^"]+)', page.read_text())
            == []
        )


def _pages(site: Path) -> list[Path]:
    return [page for page in sorted(site.rglob("*.html")) if "examples" not in page.parts and page.name != "404.html"]


def test_search_works_from_files_without_external_requests(site, browser):
    tab = browser.new_page()
    fetched: list[str] = []
    tab.on("request", lambda request: fetched.append(request.url))
    tab.goto((site / "reference" / "environment.html").as_uri())
    tab.click("input.md-search__input")
    tab.keyboard.type("straggler", delay=60)
    tab.locator(".md-search-result__item").first.wait_for(timeout=30_000)
    assert [url for url in fetched if not url.startswith(("file:", "data:"))] == []
    tab.close()
