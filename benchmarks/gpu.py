"""Measure the overhead of `DistributedOptimizer` on a GPU with one rank: `python -m benchmarks.gpu`.

ResNet-50 on random images, whole training steps: the plain loop, and the same loop with the optimizer wrapped. The
two take turns in one process. Reports images per second, medians over the rounds, and the wrapped loop's share of the
plain one's speed.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.nn import functional

import horovod.torch as hvd
from benchmarks.names import some_of
from hora.workflow.architectures import ResNet

WAYS = ("tf32", "bf16 channels-last", "bf16 channels-last compiled")


def make_step(way: str, options: argparse.Namespace, *, wrapped: bool) -> Callable[[], None]:
    """Return a function that does one training step."""
    torch.manual_seed(0)
    layout = torch.channels_last if "channels-last" in way else torch.contiguous_format
    model: Any = ResNet(options.depth, num_classes=1000, channels=3, width=64, stem="large").cuda()
    model = model.to(memory_format=layout)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=5e-5)
    if wrapped:
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    run = torch.compile(model) if "compiled" in way else model
    images = torch.randn(options.batch_size, 3, 224, 224, device="cuda").to(memory_format=layout)
    labels = torch.randint(1000, (options.batch_size,), device="cuda")

    def precision() -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16) if "bf16" in way else nullcontext()

    def step() -> None:
        optimizer.zero_grad()
        with precision():
            loss = functional.cross_entropy(run(images), labels)
        loss.backward()
        optimizer.step()

    return step


def rate(step: Callable[[], None], options: argparse.Namespace) -> float:
    """Return the images per second of one turn."""
    step()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(options.steps):
        step()
    torch.cuda.synchronize()
    return options.steps * options.batch_size / (time.perf_counter() - begin)


def measure(way: str, options: argparse.Namespace) -> dict[str, list[float]]:
    """Time both loops in turns; each goes first in every other round."""
    steps = {"plain": make_step(way, options, wrapped=False), "hvd": make_step(way, options, wrapped=True)}
    for step in steps.values():
        for _ in range(5):
            step()
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(options.rounds):
        for name in sorted(steps, reverse=bool(number % 2)):
            rates[name].append(rate(steps[name], options))
    return rates


def report(way: str, rates: dict[str, list[float]]) -> str:
    """Return one line per precision."""
    shares = [ours / plain for ours, plain in zip(rates["hvd"], rates["plain"], strict=True)]
    parts = [f"{way:28s}"]
    parts += [
        f"{name} {statistics.median(of):6.0f} images/s ({min(of):.0f}..{max(of):.0f})" for name, of in rates.items()
    ]
    parts.append(f"hvd / plain {statistics.median(shares):.3f} ({min(shares):.3f}..{max(shares):.3f})")
    return "  ".join(parts)


def main() -> None:
    """Run all precisions on this machine's first GPU."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--depth", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=10, help="of one turn")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--ways", type=some_of(WAYS), default="all", help=f"of {','.join(WAYS)} (default: all)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU, and torch sees none here\n")
    hvd.init()
    torch.cuda.set_device(hvd.local_rank())
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
    print(
        f"torch {torch.__version__}, {torch.cuda.get_device_name()}, ResNet-{options.depth}, batch {options.batch_size}"
    )
    for way in options.ways:
        print(report(way, measure(way, options)), flush=True)
        torch.cuda.empty_cache()
    hvd.shutdown()


if __name__ == "__main__":
    main()
