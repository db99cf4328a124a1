"""The image classifier: one training function for one or many ranks."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import hora.torch as hvd
from hora.labs.images.data import Augmentation, Images, cifar10, digits, fetch_cifar10
from hora.labs.images.options import ImageOptions
from hora.workflow import (
    Checkpoints,
    History,
    Loaders,
    Recipe,
    Schedule,
    TensorBoardLog,
    TensorLoader,
    accuracy,
    fit,
    save,
    seed_everything,
)
from hora.workflow.architectures import ResNet


@dataclass(frozen=True, kw_only=True)
class ImageRun:
    """Result of a run for the program that launched it."""

    accuracy: float
    history: History
    num_ranks: int
    seconds: float
    images_per_s: float
    model_path: str


def train(options: ImageOptions) -> ImageRun:
    """Train the classifier on this rank; rank 0 writes checkpoints, logs and the model."""
    hvd.init()
    device = pick_device(options)
    data = _load(options)
    seed_everything(options.seed)
    model = _network(options, device, channels=data.channels, num_classes=len(data.classes))
    seed_everything(options.seed + 1 + hvd.rank())  # the same weights everywhere, but different augmentation
    folder = Path(options.log_dir)
    began = time.perf_counter()
    history = fit(
        model,
        _loaders(options, data, device),
        _optimizer(options, model),
        torch.nn.functional.cross_entropy,
        epochs=options.epochs,
        metrics={"accuracy": accuracy},
        recipe=_recipe(options, device),
        checkpoints=Checkpoints(folder / "checkpoints", every_steps=options.checkpoint_steps or None),
        resume=options.resume,
        loggers=[TensorBoardLog(folder / "tensorboard")] if find_spec("tensorboard") else [],
    )
    if hvd.rank() == 0:
        save(folder / "model", model, classes=data.classes, notes={"data": options.data, "epochs": len(history)})
    return ImageRun(
        accuracy=history.last("valid_accuracy"),
        history=history,
        num_ranks=hvd.size(),
        seconds=time.perf_counter() - began,
        images_per_s=len(data.train_labels) * len(history) / history.seconds,
        model_path=str(folder / "model"),
    )


def measure(options: ImageOptions) -> float:
    """Return images per second of all ranks (forward, backward and step) on random images; rank 0 prints it."""
    hvd.init()
    device = pick_device(options)
    seed_everything(options.seed)
    stem = "large" if options.image_size >= 128 else "small"
    model = _network(options, device, channels=3, num_classes=options.num_classes, stem=stem)
    optimizer = _optimizer(options, model)
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    size = (options.batch_size, 3, options.image_size, options.image_size)
    images = torch.randn(size, device=device)
    if _channels_last(options, device):
        images = images.to(memory_format=torch.channels_last)
    labels = torch.randint(options.num_classes, (options.batch_size,), device=device)
    recipe = _recipe(options, device)

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(options.batches_per_allreduce):
            with recipe.autocast(device):
                loss = torch.nn.functional.cross_entropy(model(images), labels)
            loss.backward()
        optimizer.step()

    rates = []
    for timed in (False, True, True, True):  # the first round compiles, allocates and selects algorithms
        began = time.perf_counter()
        for _ in range(options.num_steps if timed else 10):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        hvd.barrier()
        if timed:
            num_images = options.batch_size * options.batches_per_allreduce * options.num_steps * hvd.size()
            rates.append(num_images / (time.perf_counter() - began))
    if hvd.rank() == 0:
        name = torch.cuda.get_device_name() if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
        what = f"ResNet-{options.depth}, {options.image_size}x{options.image_size}, batch {options.batch_size}"
        print(f"{what}, {recipe.precision}, {hvd.size()} ranks, {name}: {max(rates):.0f} images/s")
    return max(rates)


def pick_device(options: ImageOptions) -> torch.device:
    """Return this rank's GPU, or the CPU."""
    if options.no_cuda or not torch.cuda.is_available():
        # Ranks of one machine share its cores; more threads than cores would wait for each other. The launcher may know
        # of more ranks on this machine than local_size() does.
        share = max(1, len(os.sched_getaffinity(0)) // hvd.local_size())
        torch.set_num_threads(options.threads or min(share, torch.get_num_threads()))
        return torch.device("cpu")
    torch.cuda.set_device(hvd.local_rank() % torch.cuda.device_count())
    torch.backends.cudnn.benchmark = options.synthetic  # selecting algorithms by timing is not reproducible
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    return torch.device("cuda", torch.cuda.current_device())


def _load(options: ImageOptions) -> Images:
    if options.data == "digits":
        return digits()
    if options.download and hvd.local_rank() == 0:
        fetch_cifar10(options.data_dir)
    hvd.barrier()  # the other ranks of this host wait for the download
    return cifar10(options.data_dir)


def _network(
    options: ImageOptions, device: torch.device, *, channels: int, num_classes: int, stem: Any = "small"
) -> Any:
    width = options.width or (64 if device.type == "cuda" else 16)
    model = ResNet(options.depth, num_classes=num_classes, channels=channels, width=width, stem=stem)
    layout = torch.channels_last if _channels_last(options, device) else torch.contiguous_format
    model = model.to(device).to(memory_format=layout)  # type: ignore[call-overload]
    return torch.compile(model) if options.compile else model


def _channels_last(options: ImageOptions, device: torch.device) -> bool:
    return options.channels_last or device.type == "cuda"


def _optimizer(options: ImageOptions, model: torch.nn.Module) -> Any:
    plain = getattr(model, "_orig_mod", model)
    sgd = torch.optim.SGD(
        plain.parameters(), lr=options.base_lr, momentum=options.momentum, weight_decay=options.weight_decay
    )
    return hvd.DistributedOptimizer(
        sgd,
        named_parameters=plain.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.batches_per_allreduce,
    )


def _recipe(options: ImageOptions, device: torch.device) -> Recipe:
    automatic: Any = "bfloat16" if device.type == "cuda" else "float32"
    scale = hvd.size() * options.batches_per_allreduce
    return Recipe(
        precision=automatic if options.precision == "auto" else options.precision,  # type: ignore[arg-type]
        accumulate=options.batches_per_allreduce,
        clip_norm=options.clip_norm or None,
        schedule=Schedule(warmup_epochs=options.warmup_epochs, scale=scale, decay="cosine"),
    )


def _loaders(options: ImageOptions, data: Images, device: torch.device) -> Loaders:
    mean, std = data.moments()
    pad = 4 if data.train_images.shape[-1] >= 32 else 1
    kwargs: dict[str, Any] = {"batch_size": options.batch_size, "seed": options.seed}
    train = TensorLoader(
        data.train_images.to(device),
        data.train_labels.to(device),
        transform=Augmentation(mean, std, pad=pad, flip=data.flip),
        **kwargs,
    )
    test_images, test_labels = data.test_images.to(device), data.test_labels.to(device)
    valid = TensorLoader(test_images, test_labels, shuffle=False, transform=Augmentation(mean, std), **kwargs)
    return Loaders(train, valid)
