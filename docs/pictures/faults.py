"""Make `faults.gif` from a real run: a rank is slowed and named on the live page, a rank is killed, training goes on.

    python docs/pictures/faults.py        # a minute; needs chromium, playwright and Pillow

It starts `hora demo faults`, looks at its page with a headless browser, and clicks the button that kills a rank.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont
from playwright.sync_api import Page, sync_playwright

HERE = Path(__file__).parent
SIZE = (1120, 800)
WIDTH = 900
CAPTION_HEIGHT = 44
START_LIMIT_S = 60.0
FRAME_MS, LAST_MS = 600, 4000


@contextlib.contextmanager
def demo() -> Iterator[str]:
    """The demo, and the address of its page."""
    command = [sys.executable, "-m", "hora", "demo", "faults", "--no-browser", "-np", "4"]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=printed)
        try:
            limit = time.monotonic() + START_LIMIT_S
            while not (found := re.search(rb"see it live: (\S+#token=\S+)", os.pread(printed.fileno(), 65536, 0))):
                if time.monotonic() > limit:
                    raise TimeoutError("the demo has printed no address")
                time.sleep(0.1)
            yield found[1].decode()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


def frames(page: Page, caption: str, count: int) -> Iterator[Image.Image]:
    """So many pictures of the page, a second apart, with a caption below."""
    for _ in range(count):
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture = picture.resize((WIDTH, SIZE[1] * WIDTH // SIZE[0]), Image.Resampling.LANCZOS)
        whole = Image.new("RGB", (WIDTH, picture.height + CAPTION_HEIGHT), "#16191d")
        whole.paste(picture, (0, 0))
        font = ImageFont.load_default(20)
        ImageDraw.Draw(whole).text((20, picture.height + 10), caption, fill="white", font=font)
        yield whole
        page.wait_for_timeout(1000)


def main() -> None:
    taken: list[Image.Image] = []
    with demo() as url, sync_playwright() as driver:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page.goto(url)
        page.locator("#words", has_text="training").wait_for(timeout=60_000)
        page.wait_for_timeout(8000)
        taken += frames(page, "1   Four ranks train on this machine.", 3)
        page.locator("#alerts .guilty", has_text="read_slowly").first.wait_for(timeout=90_000)
        taken += frames(page, "2   One rank is slow: the page names it, the part of the step, and its line.", 5)
        page.click("text=Kill rank 1")
        taken += frames(page, "3   SIGKILL for rank 1: the others go on, and lose no step.", 8)
        browser.close()
    small = [frame.quantize(160, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for frame in taken]
    small[0].save(
        HERE / "faults.gif",
        save_all=True,
        append_images=small[1:],
        duration=[FRAME_MS] * (len(small) - 1) + [LAST_MS],
        loop=0,
        optimize=True,
    )


if __name__ == "__main__":
    main()
