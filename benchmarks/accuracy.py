"""Compare the final losses and accuracies of all compressions and local optimizers, over a link of 100 Mbit/s; as root.

    python -m benchmarks.accuracy --results out/accuracy.jsonl      everything, an hour on two cores
    python -m benchmarks.accuracy --tasks digits --seeds 0          a minute

Tasks: "digits" (an MLP on scikit-learn's digits), "images" (the images lab's ResNet18, narrow, on the same pictures)
and "characters" (examples/characters.py with 0.8 million parameters), all with Adam. Each setting starts from the same
weights and trains the same batches, in two offices with one rank each. Loss and accuracy are measured on held-out data,
after `exchange()`. Reports the bytes that rank 0's office sent, the seconds of the whole training, and the standard
deviation over the seeds. `--results` collects the runs as lines of JSON, and skips runs that it already contains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

import horovod.torch as hvd
from benchmarks import offices
from benchmarks.names import some_of
from hora.labs.images.data import digits as load_digits

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "examples"))

LINK = {"rate": "100mbit"}
PERIOD = 20

SETTINGS: dict[str, Callable[[Any], Any]] = {
    "plain": hvd.DistributedOptimizer,
    "int8": lambda o: hvd.DistributedOptimizer(o, compression=hvd.Compression.int8),
    "PowerSGD 2": lambda o: hvd.DistributedOptimizer(o, compression=hvd.Compression.powersgd(rank=2)),
    "PowerSGD 4": lambda o: hvd.DistributedOptimizer(o, compression=hvd.Compression.powersgd(rank=4)),
    f"LocalSGD {PERIOD}": lambda o: hvd.LocalSGD(o, every=PERIOD),
    f"DiLoCo {PERIOD}": lambda o: hvd.DiLoCo(o, every=PERIOD),
    f"DES-LOC {PERIOD}": lambda o: hvd.DESLOC(o, every=PERIOD),
}


class Task(NamedTuple):
    """A model, its batches, and its held-out data."""

    model: nn.Module
    learning_rate: float
    batch: Callable[[torch.Generator], tuple[torch.Tensor, torch.Tensor]]
    test: tuple[torch.Tensor, torch.Tensor]

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(self.model(inputs).flatten(0, -2), targets.flatten())


def pictures(model: nn.Module, learning_rate: float, batch_size: int) -> Task:
    data = load_digits()
    inputs, labels = data.train_images.float() / 255, data.train_labels.long()

    def batch(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        some = torch.randint(0, len(inputs), (batch_size,), generator=generator)
        return inputs[some], labels[some]

    return Task(model, learning_rate, batch, (data.test_images.float() / 255, data.test_labels.long()))


def digits() -> Task:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return pictures(model, 1e-3, 16)


def images() -> Task:
    from hora.workflow.architectures import ResNet

    return pictures(ResNet(18, num_classes=10, channels=1, width=16), 1e-3, 16)


def characters() -> Task:
    import characters as example

    text, unseen = example.made_text(5000, seed=0), example.made_text(200, seed=1)

    def cut(of: torch.Tensor, count: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        pieces = example.pieces(of, count, 64, generator)
        return pieces[:, :-1], pieces[:, 1:]

    model = example.Characters(width=128, depth=4)
    return Task(model, 1e-3, lambda g: cut(text, 8, g), cut(unseen, 64, torch.Generator().manual_seed(0)))


TASKS: dict[str, tuple[Callable[[], Task], int]] = {
    "digits": (digits, 400),
    "images": (images, 300),
    "characters": (characters, 300),
}


def sent_bytes() -> int:
    with open("/proc/self/net/dev") as file:
        return next(int(line.split(":")[1].split()[8]) for line in file if "cable" in line)


def trained(name: str, setting: str, seed: int, num_steps: int) -> dict[str, Any]:
    """Train once and return the results."""
    torch.manual_seed(seed)
    task = TASKS[name][0]()
    hvd.broadcast_parameters(task.model.state_dict(), root_rank=0)
    optimizer = SETTINGS[setting](torch.optim.Adam(task.model.parameters(), lr=task.learning_rate))
    generator = torch.Generator().manual_seed(1000 * seed + hvd.rank())
    hvd.barrier()
    began, before = time.perf_counter(), sent_bytes()
    for _ in range(num_steps):
        optimizer.zero_grad()
        task.loss(*task.batch(generator)).backward()
        optimizer.step()
    if hasattr(optimizer, "exchange"):
        optimizer.exchange()
    took_s, sent = time.perf_counter() - began, sent_bytes() - before
    task.model.eval()
    with torch.no_grad():
        inputs, targets = task.test
        loss = task.loss(inputs, targets).item()
        right = (task.model(inputs).argmax(-1) == targets).float().mean().item()
    found = {"loss": loss, "accuracy": 100 * right, "mb": sent / 1e6, "seconds": took_s}
    return {"task": name, "setting": setting, "seed": seed, "steps": num_steps, **found}


def work(runs: list[tuple[str, str, int, int]], results: Path) -> None:
    """Run the trainings on one rank; rank 0 appends each to the results."""
    torch.set_num_threads(1)
    hvd.init()
    for run in runs:
        found = trained(*run)
        if hvd.rank() == 0:
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
    hvd.shutdown()


def known(results: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


def table(results: list[dict[str, Any]]) -> str:
    lines = ["| task | setting | seeds | loss | accuracy | MB sent | seconds |", "|---|---|---|---|---|---|---|"]
    for task in TASKS:
        for setting in SETTINGS:
            some = [result for result in results if (result["task"], result["setting"]) == (task, setting)]
            if some:
                lines.append(row(task, setting, some))
    return "\n".join(lines)


def row(task: str, setting: str, results: list[dict[str, Any]]) -> str:
    def spread(name: str, digits: int) -> str:
        values = [result[name] for result in results]
        around = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
        return f"{statistics.mean(values):.{digits}f}{around}"

    mb, seconds = (statistics.mean(result[name] for result in results) for name in ("mb", "seconds"))
    accuracy = f"{spread('accuracy', 1)} %"
    return f"| {task} | {setting} | {len(results)} | {spread('loss', 3)} | {accuracy} | {mb:.1f} | {seconds:.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=some_of(tuple(TASKS)), default="all", help=f"of {','.join(TASKS)}, or all")
    parser.add_argument("--settings", type=some_of(tuple(SETTINGS)), default="all", help=f"of {','.join(SETTINGS)}")
    parser.add_argument("--seeds", default="0,1,2", help="a run of each with each (default: 0,1,2)")
    parser.add_argument("--steps", type=int, default=0, help="of each run (default: each task's own number)")
    parser.add_argument("--limit", type=float, default=7200.0, help="seconds for everything (default: 7200)")
    parser.add_argument("--results", type=Path, help="lines of JSON, to go on with and to append to")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        work(arguments.worker, arguments.results)
        return
    with tempfile.TemporaryDirectory() as folder:
        results = arguments.results or Path(folder) / "results.jsonl"
        done = {(run["task"], run["setting"], run["seed"], run["steps"]) for run in known(results)}
        runs = [
            (task, setting, seed, arguments.steps or TASKS[task][1])
            for task in arguments.tasks
            for seed in map(int, arguments.seeds.split(","))
            for setting in arguments.settings
        ]
        runs = [run for run in runs if run not in done]
        if runs:
            command = [sys.executable, "-m", "benchmarks.accuracy", "--worker", json.dumps(runs)]
            with offices.offices(2, **LINK) as hosts:
                offices.run_ranks(hosts, [*command, "--results", str(results)], num_local=1, limit_s=arguments.limit)
        print(table(known(results)))


if __name__ == "__main__":
    main()
