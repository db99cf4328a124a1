"""Images for the classifier: scikit-learn's digits, CIFAR-10 (from a folder or downloaded), and augmentation.

Images are uint8 tensors (row, channel, height, width) until a batch is drawn.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hora.files import replaced
from hora.safe_load import load_pickle

CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
CIFAR10_SHA256 = "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce"
_CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_PARTS = (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
_RECORD_BYTES = 1 + 3 * 32 * 32


@dataclass(frozen=True, kw_only=True)
class Images:
    """A data set in memory. `flip`: whether mirroring preserves an image's class."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor
    classes: tuple[str, ...]
    flip: bool

    @property
    def channels(self) -> int:
        """Colours per pixel."""
        return self.train_images.shape[1]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return mean and standard deviation of each channel of the training images, for pixels from 0 to 1."""
        pixels = self.train_images.double() / 255
        return pixels.mean(dim=(0, 2, 3)).float(), pixels.std(dim=(0, 2, 3)).float()


class Augmentation:
    """Normalizes a uint8 batch, shifts each image at random by up to `pad` pixels, and mirrors half if `flip`."""

    def __init__(self, mean: torch.Tensor, std: torch.Tensor, *, pad: int = 0, flip: bool = False) -> None:
        self.mean = mean.reshape(1, -1, 1, 1)
        self.std = std.reshape(1, -1, 1, 1)
        self.pad = pad
        self.flip = flip

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        if self.pad:
            images = self._shifted(images)
        if self.flip:
            mirrored = torch.rand(len(images), device=images.device) < 0.5
            images = torch.where(mirrored.reshape(-1, 1, 1, 1), images.flip(3), images)
        device = images.device
        return (images.float() / 255 - self.mean.to(device)) / self.std.to(device)

    def _shifted(self, images: torch.Tensor) -> torch.Tensor:
        num, channels, height, width = images.shape
        padded = torch.nn.functional.pad(images, [self.pad] * 4)
        down, right = torch.randint(2 * self.pad + 1, (2, num, 1), device=images.device)
        rows = (down + torch.arange(height, device=images.device)).reshape(num, 1, height, 1)
        columns = (right + torch.arange(width, device=images.device)).reshape(num, 1, 1, width)
        image = torch.arange(num, device=images.device).reshape(num, 1, 1, 1)
        channel = torch.arange(channels, device=images.device).reshape(1, channels, 1, 1)
        return padded[image, channel, rows, columns]


def digits(*, seed: int = 0) -> Images:
    """Return the 1797 handwritten digits (8x8, grey) of scikit-learn; every fifth is for testing."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ValueError("the digits need scikit-learn: pip install scikit-learn") from error
    bunch = load_digits()
    images = torch.from_numpy((bunch.images * (255 / 16)).round().astype(np.uint8)).unsqueeze(1)
    labels = torch.from_numpy(bunch.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    test, train = order[: len(order) // 5], order[len(order) // 5 :]
    return Images(
        train_images=images[train],
        train_labels=labels[train],
        test_images=images[test],
        test_labels=labels[test],
        classes=tuple(str(digit) for digit in range(10)),
        flip=False,
    )


def cifar10(folder: str | Path) -> Images:
    """Load CIFAR-10 from a folder with the published batches, in the Python or the binary version."""
    where = next((place for place in _places(Path(folder)) if _batch(place, "test_batch")), None)
    if where is None:
        raise ValueError(
            f"{folder} holds no CIFAR-10 batches (test_batch, test_batch.bin); unpack cifar-10-python.tar.gz "
            "or cifar-10-binary.tar.gz there, or let fetch_cifar10 / --download get it"
        )
    parts = []
    for name in _CIFAR10_PARTS:
        path = _batch(where, name)
        if path is None:
            raise ValueError(f"{where} lacks the CIFAR-10 batch {name}")
        parts.append(_read_binary(path) if path.suffix == ".bin" else _read_python(path))
    images, labels = zip(*parts, strict=True)
    return Images(
        train_images=torch.cat(images[:-1]),
        train_labels=torch.cat(labels[:-1]),
        test_images=images[-1],
        test_labels=labels[-1],
        classes=_CIFAR10_CLASSES,
        flip=True,
    )


def fetch_cifar10(
    folder: str | Path, *, url: str = CIFAR10_URL, sha256: str = CIFAR10_SHA256, timeout_s: float = 60.0
) -> Path:
    """Download CIFAR-10 to `folder` unless it is there, verify its checksum and unpack it."""
    target = Path(folder)
    if any(_batch(place, "test_batch") for place in _places(target)):
        return target
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        archive = response.read()
    found = hashlib.sha256(archive).hexdigest()
    if found != sha256:
        raise ValueError(f"{url} has the SHA-256 {found} instead of {sha256}: not the published file; nothing was kept")
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        members = {Path(member.name).name: member for member in tar.getmembers() if member.isfile()}
        # test_batch last: its presence means that the others are complete
        for name in _CIFAR10_PARTS:
            content = tar.extractfile(members[name])
            assert content is not None, "regular files have content"
            with replaced(target / name, unfinished=f"{name}.partial") as file:
                file.write(content.read())
    return target


def _places(folder: Path) -> list[Path]:
    return [folder, folder / "cifar-10-batches-py", folder / "cifar-10-batches-bin"]


def _batch(folder: Path, name: str) -> Path | None:
    return next((path for path in (folder / name, folder / f"{name}.bin") if path.is_file()), None)


def _read_binary(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    content = np.fromfile(path, dtype=np.uint8)
    if not len(content) or len(content) % _RECORD_BYTES:
        raise ValueError(f"{path} has {len(content)} bytes: not a whole number of images of {_RECORD_BYTES} bytes")
    records = torch.from_numpy(content).reshape(-1, _RECORD_BYTES)
    return records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0].long()


def _read_python(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
    try:
        batch = load_pickle(path.read_bytes(), encoding="bytes").plain()
        images, labels = batch[b"data"], batch[b"labels"]
        pixels = torch.from_numpy(np.array(images, dtype=np.uint8)).reshape(-1, 3, 32, 32)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a CIFAR-10 batch: {error}") from error
    return pixels, torch.tensor(labels, dtype=torch.int64)
