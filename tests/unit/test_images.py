"""The image classifier's data and flags, without training."""

import hashlib
import io
import pickle
import sys
import tarfile
import urllib.error
from dataclasses import fields
from functools import partial
from http.server import HTTPServer, SimpleHTTPRequestHandler
from threading import Thread

import numpy as np
import pytest
import torch

from hora.labs.images.data import Augmentation, cifar10, digits, fetch_cifar10
from hora.labs.images.options import ImageOptions

BATCHES = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]


def _pixels(seed):
    return np.random.default_rng(seed).integers(0, 256, (4, 3072), dtype=np.uint8), [seed % 10, 1, 2, 3]


def _python_batch(seed):
    """Return a batch as published: a protocol 2 pickle with byte-string keys and numpy's old module name."""
    pixels, labels = _pixels(seed)
    content = pickle.dumps({b"data": pixels, b"labels": labels}, protocol=2)
    return content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")


def _write(folder, kind):
    folder.mkdir(parents=True, exist_ok=True)
    for seed, name in enumerate(BATCHES):
        pixels, labels = _pixels(seed)
        if kind == "python":
            (folder / name).write_bytes(_python_batch(seed))
        else:
            (folder / f"{name}.bin").write_bytes(
                b"".join(bytes([label]) + row.tobytes() for label, row in zip(labels, pixels, strict=True))
            )


@pytest.mark.parametrize(("kind", "inside"), [("python", "cifar-10-batches-py"), ("binary", "."), ("python", ".")])
def test_both_published_forms_of_cifar10(tmp_path, kind, inside):
    _write(tmp_path / inside, kind)
    data = cifar10(tmp_path)
    assert data.train_images.shape == (20, 3, 32, 32)
    assert data.train_images.dtype is torch.uint8
    assert data.test_images.shape == (4, 3, 32, 32)
    assert data.test_labels.tolist() == [5, 1, 2, 3]
    assert np.array_equal(data.train_images[4].flatten().numpy(), _pixels(1)[0][0])
    assert data.channels == 3


def test_a_forged_batch_is_rejected_without_running_code(tmp_path):
    class _Bomb:
        def __reduce__(self):
            return (pytest.fail, ("code in a batch was run",))

    _write(tmp_path, "python")
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps({b"data": _Bomb()}))
    with pytest.raises(ValueError, match=r"data_batch_3 is not a CIFAR-10 batch: _pytest\.outcomes"):
        cifar10(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\x80\x02}", pickle.dumps([1]), pickle.dumps({b"data": [1]})])
def test_damaged_python_batches(tmp_path, content):
    _write(tmp_path, "python")
    (tmp_path / "data_batch_2").write_bytes(content)
    with pytest.raises(ValueError, match="data_batch_2 is not a CIFAR-10 batch"):
        cifar10(tmp_path)


def test_incomplete_folders(tmp_path):
    with pytest.raises(ValueError, match="holds no CIFAR-10 batches"):
        cifar10(tmp_path)
    _write(tmp_path, "binary")
    whole = (tmp_path / "data_batch_1.bin").read_bytes()
    (tmp_path / "data_batch_1.bin").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="not a whole number of images"):
        cifar10(tmp_path)
    (tmp_path / "data_batch_1.bin").unlink()
    with pytest.raises(ValueError, match="lacks the CIFAR-10 batch data_batch_1"):
        cifar10(tmp_path)


@pytest.fixture
def server(tmp_path):
    """A web server on loopback with an archive like the published one."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for seed, name in enumerate(BATCHES):
            content = _python_batch(seed)
            member = tarfile.TarInfo(f"cifar-10-batches-py/{name}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    folder = tmp_path / "served"
    folder.mkdir()
    (folder / "cifar.tar.gz").write_bytes(archive.getvalue())
    handler = partial(
        type("Quiet", (SimpleHTTPRequestHandler,), {"log_message": lambda *_: None}), directory=str(folder)
    )
    with HTTPServer(("127.0.0.1", 0), handler) as http:
        thread = Thread(target=http.serve_forever, name="test-http")
        thread.start()
        yield f"http://127.0.0.1:{http.server_port}/cifar.tar.gz", hashlib.sha256(archive.getvalue()).hexdigest()
        http.shutdown()
        thread.join(10)


def test_a_download_is_verified_before_it_is_unpacked(tmp_path, server):
    url, digest = server
    target = tmp_path / "data"
    with pytest.raises(ValueError, match=f"has the SHA-256 {digest} instead of"):
        fetch_cifar10(target, url=url)
    assert not target.exists()
    fetch_cifar10(target, url=url, sha256=digest)
    assert len(cifar10(target).train_labels) == 20
    assert sorted(path.name for path in target.iterdir()) == BATCHES
    fetch_cifar10(target, url="http://127.0.0.1:9/not-asked-again")
    with pytest.raises(urllib.error.URLError):
        fetch_cifar10(tmp_path / "other", url=url.replace("cifar.tar", "missing"))


def test_digits_are_always_split_alike():
    data, again = digits(), digits()
    assert len(data.train_labels) + len(data.test_labels) == 1797
    assert torch.equal(data.test_images, again.test_images)
    assert set(data.test_labels.tolist()) == set(range(10))
    mean, std = data.moments()
    normal = Augmentation(mean, std)(data.train_images)
    assert float(normal.mean()) == pytest.approx(0, abs=1e-4)
    assert float(normal.std()) == pytest.approx(1, abs=1e-3)


def test_digits_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match="pip install scikit-learn"):
        digits()


def test_augmentation_shifts_and_mirrors_within_bounds():
    image = torch.zeros(1, 1, 5, 5, dtype=torch.uint8)
    image[0, 0, 2, 1] = 255
    augment = Augmentation(torch.zeros(1), torch.ones(1), pad=1, flip=True)
    torch.manual_seed(0)
    batch = augment(image.expand(500, 1, 5, 5))
    assert batch.shape == (500, 1, 5, 5)
    assert bool((batch.sum(dim=(1, 2, 3)) == 1).all())
    places = {tuple(place) for place in batch[:, 0].nonzero()[:, 1:].tolist()}
    # One step in each direction from (2, 1), or from its mirror image (2, 3).
    assert places == {(row, column) for row in (1, 2, 3) for column in (0, 1, 2, 3, 4)}


def test_flags_are_derived_from_the_fields():
    options = ImageOptions.parse(
        ["--fp16-allreduce", "--batches-per-allreduce", "3", "--warmup-epochs", "1.5", "--resume"]
    )
    assert options.fp16_allreduce
    assert options.resume
    assert options.batches_per_allreduce == 3
    assert options.warmup_epochs == 1.5
    assert ImageOptions.parse([]) == ImageOptions()
    assert all(option.metadata["help"] for option in fields(ImageOptions))
    with pytest.raises(ValueError, match="--batch-size must be at least 1, but it is 0"):
        ImageOptions.parse(["--batch-size", "0"])
    with pytest.raises(ValueError, match="--clip-norm must not be negative"):
        ImageOptions.parse(["--clip-norm", "-1"])
    with pytest.raises(SystemExit):
        ImageOptions.parse(["--depth", "19"])
