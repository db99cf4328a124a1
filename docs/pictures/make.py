"""Make the pictures of the live page from real runs.

    python docs/pictures/make.py faults        # faults.gif: a rank is slowed and named, a rank is killed
    python docs/pictures/make.py watch hang    # watch*.png: a slow rank, light, dark and on a phone; a job that hangs

Each takes a minute, and needs chromium, playwright and Pillow.
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
from playwright.sync_api import Browser, Page, sync_playwright

HERE = Path(__file__).parent
SIZE = (1120, 800)
WIDTH = 900
CAPTION_HEIGHT = 44
START_LIMIT_S = 120.0
FRAME_MS, LAST_MS = 600, 4000
SIZES = {"watch": (1280, "light"), "watch-dark": (1280, "dark"), "watch-phone": (400, "light")}

TRAINING = """
import time

import torch

import hora
import horovod.torch as hvd

EPOCHS = 60


def read_rows(rows):
    if hvd.rank() == 2 and {fault} == "slow":
        time.sleep(0.05)  # a slow disk
    return torch.stack(rows)


def refill(cache):
    time.sleep(1000)


hvd.init()
torch.manual_seed(hvd.rank())
loader = torch.utils.data.DataLoader(list(torch.randn(4096, 64)), batch_size=64, shuffle=True, collate_fn=read_rows)
model = torch.nn.Sequential(torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Linear(512, 2))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hora.report(total_steps=EPOCHS * len(loader))
for epoch in range(EPOCHS):
    for rows in loader:
        optimizer.zero_grad()
        labels = (rows.sum(dim=1) > 0).long()
        outputs = model(rows)
        loss = torch.nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        time.sleep(0.02)
        hora.report(loss=loss, accuracy=(outputs.argmax(dim=1) == labels).float().mean())
    if epoch == 5 and hvd.rank() == 1 and {fault} == "hang":
        refill(cache=[])
"""


@contextlib.contextmanager
def running(command: list[str], folder: Path = HERE) -> Iterator[str]:
    """A job with a live page, and the address of that page."""
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=printed)
        try:
            limit = time.monotonic() + START_LIMIT_S
            while not (found := re.search(rb"see it live: (\S+#token=\S+)", os.pread(printed.fileno(), 65536, 0))):
                if time.monotonic() > limit:
                    raise TimeoutError("the job has printed no address")
                time.sleep(0.1)
            yield found[1].decode()
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)


@contextlib.contextmanager
def training(fault: str) -> Iterator[str]:
    """Four ranks of a small training with a fault, and the address of their page."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job"
        job.mkdir()
        (job / "train.py").write_text(TRAINING.replace("{fault}", repr(fault)).lstrip())
        command = [sys.executable, "-m", "hora", "run", "-np", "4", "--dashboard", "python", "train.py"]
        with running(command, job) as url:
            yield url


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


def faults(browser: Browser) -> None:
    taken: list[Image.Image] = []
    with running([sys.executable, "-m", "hora", "demo", "faults", "--no-browser", "-np", "4"]) as url:
        page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]}, color_scheme="light")
        page.goto(url)
        page.locator("#words", has_text="training").wait_for(timeout=60_000)
        page.wait_for_timeout(8000)
        taken += frames(page, "1   Four ranks train on this machine.", 3)
        page.locator("#alerts .guilty", has_text="read_slowly").first.wait_for(timeout=90_000)
        taken += frames(page, "2   One rank is slow: the page names it, the part of the step, and its line.", 5)
        page.click("text=Kill rank 1")
        taken += frames(page, "3   SIGKILL for rank 1: the others go on, and lose no step.", 8)
    small = [frame.quantize(160, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE) for frame in taken]
    small[0].save(
        HERE / "faults.gif",
        save_all=True,
        append_images=small[1:],
        duration=[FRAME_MS] * (len(small) - 1) + [LAST_MS],
        loop=0,
        optimize=True,
    )


def watch(browser: Browser) -> None:
    with training("slow") as url:
        for name, (width, scheme) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
            page.goto(url)
            page.locator("#alerts .guilty", has_text="read_rows").first.wait_for(timeout=120_000)
            page.wait_for_timeout(20_000 if name == "watch" else 2000)
            save(page, name)


def hang(browser: Browser) -> None:
    with training("hang") as url:
        page = browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        page.goto(url)
        page.get_by_text("refill").first.wait_for(timeout=180_000)
        page.wait_for_timeout(2000)
        save(page, "watch-hang")


def save(page: Page, name: str) -> None:
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("RGB")
    picture.quantize(200, dither=Image.Dither.NONE).save(HERE / f"{name}.png", optimize=True)
    page.close()


def main() -> None:
    makers = {"faults": faults, "watch": watch, "hang": hang}
    wanted = sys.argv[1:] or list(makers)
    with sync_playwright() as driver:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name in wanted:
            makers[name](browser)
        browser.close()


if __name__ == "__main__":
    main()
