"""Options of the image classifier. Its command-line flags are generated from these fields."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from hora.spelling import Parser


def _flag(default: Any, text: str, choices: tuple[Any, ...] | None = None) -> Any:
    return field(default=default, metadata={"help": text, "choices": choices})


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options of a training run. `fp16_allreduce` is the flag `--fp16-allreduce`, and so on."""

    data: str = _flag("digits", "what to learn", ("digits", "cifar10"))
    data_dir: str = _flag("data/cifar10", "where the CIFAR-10 batches are")
    download: bool = _flag(False, "fetch CIFAR-10 into --data-dir if it is not there (checksum verified)")
    depth: int = _flag(18, "layers of the ResNet", (18, 34, 50))
    width: int = _flag(0, "channels of the first stage; 0: 64 on a GPU, 16 on a CPU")
    epochs: int = _flag(12, "passes over the training images")
    batch_size: int = _flag(32, "images per rank and batch")
    batches_per_allreduce: int = _flag(1, "batches whose gradients are summed locally before an allreduce")
    base_lr: float = _flag(0.02, "learning rate of one rank; multiplied by ranks x batches per allreduce")
    momentum: float = _flag(0.9, "of SGD")
    weight_decay: float = _flag(5e-4, "of SGD")
    clip_norm: float = _flag(0.0, "the longest gradient; 0: no limit")
    warmup_epochs: float = _flag(2.0, "epochs in which the learning rate grows to its full value")
    fp16_allreduce: bool = _flag(False, "send gradients as float16")
    precision: str = _flag(
        "auto", "of the forward pass; auto: bfloat16 on GPUs", ("auto", "float32", "bfloat16", "float16")
    )
    compile: bool = _flag(False, "torch.compile the network")
    channels_last: bool = _flag(False, "channels-last memory layout; always on GPUs")
    threads: int = _flag(0, "CPU threads per rank; 0: the machine's cores, divided by its ranks")
    no_cuda: bool = _flag(False, "do not use a GPU")
    seed: int = _flag(42, "of weights, order and augmentation")
    log_dir: str = _flag("out/images", "checkpoints, TensorBoard files, model")
    resume: bool = _flag(False, "go on from the last good checkpoint in --log-dir")
    checkpoint_steps: int = _flag(0, "also write a checkpoint every so many steps; 0: only after epochs")
    synthetic: bool = _flag(False, "only measure images/s, with random images on the device")
    image_size: int = _flag(32, "height and width of synthetic images; 224 takes the stem for photographs")
    num_classes: int = _flag(10, "of synthetic images")
    num_steps: int = _flag(50, "timed steps of the synthetic run")

    def __post_init__(self) -> None:
        for name in ("epochs", "batch_size", "batches_per_allreduce", "image_size", "num_classes", "num_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be at least 1, but it is {getattr(self, name)}")
        for name in ("width", "clip_norm", "warmup_epochs", "checkpoint_steps", "threads"):
            if getattr(self, name) < 0:
                raise ValueError(f"--{name.replace('_', '-')} must not be negative, but it is {getattr(self, name)}")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        """Add one flag per field."""
        for option in fields(cls):
            name = "--" + option.name.replace("_", "-")
            text = option.metadata["help"]
            if isinstance(option.default, bool):
                parser.add_argument(name, action="store_true", help=text)
            else:
                kind, choices = type(option.default), option.metadata["choices"]
                help_text = f"{text} (default: {option.default})"
                parser.add_argument(name, type=kind, default=option.default, choices=choices, help=help_text)

    @classmethod
    def parse(cls, argv: Sequence[str] | None = None, *, description: str = "") -> ImageOptions:
        """Parse a command line."""
        parser = Parser(description=description)
        cls.add_flags(parser)
        return cls.from_namespace(parser.parse_args(argv))

    @classmethod
    def from_namespace(cls, namespace: argparse.Namespace) -> ImageOptions:
        """Create the options from parsed flags, which may include others."""
        return cls(**{option.name: getattr(namespace, option.name) for option in fields(cls)})
